"""A body into what the engine takes, and the engine's names of fields back into the body's."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from gateway import grammar
from gateway.errors import InvalidField
from gateway.grammar import Structure, StructureKind
from gateway.ports import SamplingOptions
from gateway.sessions import DEFAULT_TTL, SessionOptions
from gateway.types import BeamOptions, EarlyStopping, GenerationRequest
from services.gateway.frontend import new_seed, renamed
from services.gateway.rest.schema import (
    ChatRequest,
    CompletionRequest,
    GenerationOptions,
    StructuredOutputs,
)

_EARLY_STOPPING = {
    None: EarlyStopping.NO,
    False: EarlyStopping.NO,
    True: EarlyStopping.YES,
    "never": EarlyStopping.NEVER,
}

_NAMES = {
    "echo_stop": "include_stop_str_in_output",
    "salt": "cache_salt",
    "return_logprob": "logprobs",
}


def generation_requests(
    asked: GenerationOptions,
    prompts: Sequence[list[int]],
    grammar_text: str,
    answer_id: str,
    log_id: str,
) -> list[GenerationRequest]:
    """One for each prompt. Raises InvalidField for a bias of what is no token id."""
    # One prompt's answer has the id that its client sees, so that it can be cancelled.
    ids = [answer_id] if len(prompts) == 1 else [f"{answer_id}-{i}" for i in range(len(prompts))]
    sampling = _sampling(asked, grammar_text)
    return [
        GenerationRequest(
            request_id=request_id,
            prompt_ids=prompt,
            # None of it is shown if none was asked for.
            max_tokens=1 if asked.token_limit == 0 else asked.token_limit,
            sampling=sampling,
            n=asked.n or 1,
            best_of=asked.num_candidates,
            beams=_beams(asked),
            stop=tuple(asked.stop or ()),
            echo_stop=bool(asked.include_stop_str_in_output),
            ignore_eos=bool(asked.ignore_eos),
            priority=asked.priority or 0,
            salt=asked.cache_salt or "",
            log_id=log_id,
        )
        for request_id, prompt in zip(ids, prompts, strict=True)
    ]


def _sampling(asked: GenerationOptions, grammar_text: str) -> SamplingOptions:
    temperature = asked.temperature
    if temperature is None:
        temperature = 0.0 if asked.has_beams else 1.0
    scores_answer, scores_prompt, num_top = _scores(asked)
    return SamplingOptions(
        temperature=temperature,
        top_k=max(0, asked.top_k or 0),
        top_p=1.0 if asked.top_p is None else asked.top_p,
        min_p=asked.min_p or 0.0,
        typical_p=1.0 if asked.typical_p is None else asked.typical_p,
        repetition_penalty=1.0 if asked.repetition_penalty is None else asked.repetition_penalty,
        frequency_penalty=asked.frequency_penalty or 0.0,
        presence_penalty=asked.presence_penalty or 0.0,
        logit_bias=_biases(asked.logit_bias or {}),
        min_tokens=asked.min_tokens or 0,
        stop_token_ids=tuple(asked.stop_token_ids or ()),
        grammar=grammar_text,
        # Seeds are 64 bits without a sign inside.
        seed=new_seed() if asked.seed is None else asked.seed % 2**64,
        return_logprob=scores_answer,
        return_prompt_logprobs=scores_prompt,
        num_top_logprobs=num_top,
    )


def _scores(asked: GenerationOptions) -> tuple[bool, bool, int]:
    """Whether answer and prompt are scored, and how many others are needed beside a token."""
    scores_answer, num_top, echo = False, 0, False
    if isinstance(asked, CompletionRequest):
        scores_answer = asked.logprobs is not None
        num_top, echo = asked.logprobs or 0, bool(asked.echo)
    elif isinstance(asked, ChatRequest):
        scores_answer, num_top = bool(asked.logprobs), asked.top_logprobs or 0
    scores_prompt = asked.prompt_logprobs is not None or (echo and scores_answer)
    return scores_answer, scores_prompt, max(num_top, asked.prompt_logprobs or 0)


def _biases(biases: dict[str, float]) -> tuple[tuple[int, float], ...]:
    for name in biases:
        # Only the one way to write a number, so that none is there twice.
        if not (name.isascii() and name.isdecimal() and str(int(name[:10])) == name):
            field = f"logit_bias.{name}"
            raise InvalidField(field, f"{field}: must be a token id")
    return tuple((int(name), bias) for name, bias in biases.items())


def _beams(asked: GenerationOptions) -> BeamOptions | None:
    if not asked.has_beams or asked.num_beams is None:
        return None
    penalty = 1.0 if asked.length_penalty is None else asked.length_penalty
    return BeamOptions(asked.num_beams, penalty, _EARLY_STOPPING[asked.early_stopping])


def structure(asked: GenerationOptions) -> Structure | None:
    """What the answer must be, if anything. Raises InvalidField."""
    if asked.structured_outputs is not None:
        return _structured(asked.structured_outputs)
    wanted, field = asked.response_format, "response_format"
    if wanted is None:
        return None
    if (wanted.json_schema is None) == (wanted.type == "json_schema"):
        field = "response_format.json_schema"
        raise InvalidField(field, f"{field}: is for type json_schema, and needed there")
    if wanted.json_schema is not None:
        return Structure(StructureKind.JSON_SCHEMA, json.dumps(wanted.json_schema.schema_), field)
    return grammar.json_object(field) if wanted.type == "json_object" else None


def _structured(wanted: StructuredOutputs) -> Structure:
    given = [name.removesuffix("_") for name, value in wanted if value not in (None, False)]
    if len(given) != 1:
        text = "structured_outputs: must have one of json, json_object, regex, choice, grammar"
        raise InvalidField("structured_outputs", text)
    field = f"structured_outputs.{given[0]}"
    if wanted.json_object:
        return grammar.json_object(field)
    if wanted.choice is not None:
        return grammar.choice(wanted.choice, field)
    if wanted.regex is not None:
        return Structure(StructureKind.REGEX, wanted.regex, field)
    if wanted.grammar is not None:
        return Structure(StructureKind.GRAMMAR, wanted.grammar, field)
    schema = wanted.json_ if isinstance(wanted.json_, str) else json.dumps(wanted.json_)
    return Structure(StructureKind.JSON_SCHEMA, schema, field)


def session(asked: GenerationOptions, num_prompts: int) -> SessionOptions | None:
    """How the conversation is kept, if at all. Raises InvalidField."""
    if asked.session is None:
        return None
    if num_prompts > 1:
        raise InvalidField("session", "session: has one prompt")
    ttl = DEFAULT_TTL if asked.session.ttl is None else asked.session.ttl
    return SessionOptions(asked.session.id, ttl)


@contextmanager
def rest_names(asked: GenerationOptions) -> Iterator[None]:
    """Errors inside name the field as the client wrote it."""
    try:
        yield
    except InvalidField as error:
        raise renamed(error, _rest_name(error.field, asked)) from None


def _rest_name(field: str, asked: GenerationOptions) -> str:
    is_chat = isinstance(asked, ChatRequest)
    if field == "prompt" and is_chat:
        return "messages"
    if field == "max_tokens" and "max_completion_tokens" in asked.model_fields_set:
        return "max_completion_tokens"
    if field == "num_top_logprobs":
        return "top_logprobs" if is_chat else "logprobs"
    if field == "return_prompt_logprobs":
        return "echo" if asked.prompt_logprobs is None else "prompt_logprobs"
    if field == "grammar":
        wanted = structure(asked)
        return wanted.field if wanted else field
    if field.startswith("logit_bias["):
        index = int(field.removeprefix("logit_bias[").partition("]")[0])
        return f"logit_bias.{list(asked.logit_bias or ())[index]}"
    return _NAMES.get(field, field)
