"""The search alone, against transformers' on a tiny random model."""

from __future__ import annotations

import pytest

from gateway.beam_search import BeamSearch
from gateway.ports import TokenLogprob
from gateway.types import BeamOptions, EarlyStopping, FinishReason

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

VOCAB_SIZE, EOS_ID = 40, 7


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=128,
        initializer_range=0.5,
        bos_token_id=None,
        eos_token_id=EOS_ID,
        pad_token_id=0,
    )
    # In fp64, so that what is compared is the search: in fp32 the same logits differ with the
    # order of sums, and a length penalty of -1 multiplies the difference by the length.
    return transformers.LlamaForCausalLM(config).double().eval()


def candidates(model, token_ids, count):
    with torch.inference_mode():
        logits = model(torch.tensor([token_ids])).logits[0, -1]
    top = torch.topk(torch.log_softmax(logits, dim=-1), min(count, VOCAB_SIZE))
    pairs = zip(top.indices.tolist(), top.values.tolist(), strict=True)
    return [TokenLogprob(token_id, value) for token_id, value in pairs]


def search(model, prompt, max_tokens, options):
    beams = BeamSearch(options, {EOS_ID}, max_tokens)
    running = [list(prompt)]
    while not beams.is_done:
        found = [candidates(model, tokens, beams.num_candidates) for tokens in running]
        running = [[*running[b.parent], b.token_id] for b in beams.advance(found)]
    return beams.results()


STOPPING = {EarlyStopping.NO: False, EarlyStopping.YES: True, EarlyStopping.NEVER: "never"}


@pytest.mark.parametrize("early_stopping", list(EarlyStopping))
@pytest.mark.parametrize("length_penalty", [-1.0, 0.0, 1.0, 2.0])
@pytest.mark.parametrize("num_beams", [2, 4])
def test_texts_and_scores_are_those_of_transformers(
    model, num_beams, length_penalty, early_stopping
):
    for seed in range(4):
        prompt = torch.randint(1, VOCAB_SIZE, (5,), generator=torch.Generator().manual_seed(seed))
        options = BeamOptions(num_beams, length_penalty, early_stopping)
        results = search(model, prompt.tolist(), 12, options)
        expected = model.generate(
            prompt[None],
            attention_mask=torch.ones_like(prompt[None]),
            max_new_tokens=12,
            num_beams=num_beams,
            num_return_sequences=num_beams,
            length_penalty=length_penalty,
            early_stopping=STOPPING[early_stopping],
            do_sample=False,
            return_dict_in_generate=True,
            output_scores=True,
        )
        texts = []
        for row in expected.sequences.tolist():
            text = row[5:]
            end = text.index(EOS_ID) + 1 if EOS_ID in text else len(text)
            texts.append(text[:end])
        assert [result.token_ids for result in results] == texts
        # transformers adds up in fp32
        scores = pytest.approx(expected.sequences_scores.tolist(), abs=1e-4)
        assert [result.score for result in results] == scores


def test_fewer_candidates_than_asked_for_are_enough():
    beams = BeamSearch(BeamOptions(3), {EOS_ID}, 4)
    branches = beams.advance([[TokenLogprob(1, -0.5)]])
    assert [(b.parent, b.token_id) for b in branches] == [(0, 1)]
    branches = beams.advance([[TokenLogprob(EOS_ID, -0.1), TokenLogprob(2, -0.2)]])
    assert [(b.parent, b.token_id) for b in branches] == [(0, 2)]
    assert beams.results()[0].token_ids == [1, EOS_ID]


def test_a_beam_at_the_limit_ends_by_length():
    beams = BeamSearch(BeamOptions(2), (), 1)
    assert beams.advance([[TokenLogprob(1, -0.5), TokenLogprob(2, -1.0)]]) == []
    assert [r.reason for r in beams.results()] == [FinishReason.LENGTH] * 2
