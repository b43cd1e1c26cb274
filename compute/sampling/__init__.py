"""Drawing the next tokens of sequences from the logits of a step.

What happens to a row of logits, in this order: logit_bias; repetition, frequency and
presence penalty; no stop token before min_tokens; grammar; then, unless the temperature
is 0, temperature, top-k, top-p, min-p and typical-p, each on what the ones before it
kept. What is drawn is the inverse of the cumulative distribution, in the order of token
ids, at one uniform number. That number comes from a counter-based generator, so it
depends on (seed, sequence index, position) and on nothing else: not on the batch, and
not on what was drawn before.

A sequence that wants candidates draws nothing. Its row becomes log-probabilities first,
and penalties, biases and masks are applied to those, as in transformers' beam search.
"""

from compute.sampling.grammar import GrammarCompiler
from compute.sampling.grammar_state import Grammar, Grammars, GrammarState, NoGrammars
from compute.sampling.logprobs import scored
from compute.sampling.options import check_options
from compute.sampling.sampler import Drawn, RowsToDraw, sample
from compute.sampling.sequence import SequenceSampler

__all__ = [
    "Drawn",
    "Grammar",
    "GrammarCompiler",
    "GrammarState",
    "Grammars",
    "NoGrammars",
    "RowsToDraw",
    "SequenceSampler",
    "check_options",
    "sample",
    "scored",
]
