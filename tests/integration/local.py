"""The whole of Quire in this process, over tiny random models or the real one."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

from gateway.engine import Engine, EngineSettings
from gateway.limits import Limits
from gateway.types import (
    Delta,
    Finished,
    GenerationRequest,
    PromptScored,
    ScoredToken,
    Started,
)
from services.common import config
from services.local import LocalQuire

EOS = 0
BLOCK_SIZE = 8
VOCAB_SIZE = 260
TINY = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "bos_token_id": None,
    "eos_token_id": EOS,
    "pad_token_id": EOS,
    # Larger than the usual 0.02, so that the likeliest token is far from certain.
    "initializer_range": 0.2,
}


def make_tiny(directory: Path, *, seed: int = 0, **changes) -> LlamaForCausalLM:
    """Save a random model with a tokenizer of bytes; returns transformers' own."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**{**TINY, **changes})).eval()
    model.save_pretrained(directory)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({name: n for n, name in enumerate(["<end>", *alphabet])}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.save(str(directory / "tokenizer.json"))
    return model


def block_bytes(directory: Path, dtype: str = "float32") -> int:
    """Of a page of BLOCK_SIZE tokens of a model of the shape of TINY."""
    shape = LlamaConfig.from_pretrained(directory)
    values = 2 * shape.num_hidden_layers * shape.num_key_value_heads * shape.head_dim
    return values * BLOCK_SIZE * (4 if dtype == "float32" else 2)


@contextlib.asynccontextmanager
async def started(
    model: Path | str,
    *,
    num_blocks: int = 512,
    num_host_blocks: int = 0,
    bytes_per_block: int = 0,
    dtype: str = "float32",
    draft: Path | None = None,
    **limits,
) -> AsyncIterator[LocalQuire]:
    """A pool of `num_blocks`; of a tiny model's, unless told how large a block is."""
    flags = ["--model", str(model), "--dtype", dtype]
    if draft is not None:
        flags += ["--draft-model", str(draft)]
    if not bytes_per_block:
        bytes_per_block = block_bytes(Path(model), dtype)
    quire = LocalQuire(
        config.load(config.WorkerSettings, "test", flags),
        kv_memory_bytes=num_blocks * bytes_per_block,
        block_size=BLOCK_SIZE,
        host_memory_bytes=num_host_blocks * bytes_per_block,
        engine_settings=EngineSettings(Limits(**{"step_target": 0.0, **limits})),
    )
    await quire.start()
    try:
        async with asyncio.timeout(60):
            while not quire.engine.is_ready():  # noqa: ASYNC110 - it has no event for this
                await asyncio.sleep(0.01)
        yield quire
        findings = quire.manager.audit()
        assert not findings, findings[:5]
    finally:
        await quire.stop()


@dataclass
class Answer:
    """All that came back for a request."""

    num_cached: int = -1
    prompt: list[ScoredToken] = field(default_factory=list)
    token_ids: dict[int, list[int]] = field(default_factory=dict)
    logprobs: dict[int, list[ScoredToken]] = field(default_factory=dict)
    texts: dict[int, str] = field(default_factory=dict)
    ends: dict[int, Finished] = field(default_factory=dict)

    def tokens(self) -> list[list[int]]:
        return [self.token_ids[n] for n in sorted(self.ends)]

    def what_counts(self) -> tuple:
        """Everything but what was cached."""
        return self.prompt, self.token_ids, self.logprobs, self.texts, self.ends


async def answer(engine: Engine, request: GenerationRequest) -> Answer:
    got = Answer()
    async for event in engine.generate(request):
        match event:
            case Started():
                got.num_cached = event.num_cached_tokens
            case PromptScored():
                got.prompt = event.tokens
            case Delta():
                got.token_ids.setdefault(event.index, []).extend(event.token_ids)
                got.logprobs.setdefault(event.index, []).extend(event.logprobs)
                got.texts[event.index] = got.texts.get(event.index, "") + event.text
            case Finished():
                got.ends[event.index] = event
                got.token_ids.setdefault(event.index, [])
    return got


async def answers(
    quire: LocalQuire, requests: Iterable[GenerationRequest], seconds: float = 240
) -> list[Answer]:
    """Of all requests, sent at once."""
    async with asyncio.timeout(seconds):
        return await asyncio.gather(*(answer(quire.engine, request) for request in requests))


def prompts(count: int, length: int = 20, *, shared: int = 0) -> list[Sequence[int]]:
    """Different prompts of bytes; the first `shared` tokens are the same."""
    generator = torch.Generator().manual_seed(7)
    rows = torch.randint(1, 257, (count, length), generator=generator)
    rows[:, :shared] = rows[0, :shared]
    return rows.tolist()
