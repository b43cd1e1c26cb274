"""An open sequence: its tokens, its block table and how far its KV is."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from collections.abc import Sequence as TokenIds
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from kvstore.errors import InvalidCommit, InvalidRequest
from kvstore.prefix_tree import Chain
from kvstore.types import CommitPlan, OpenPlan

MAX_ID_BYTES = 128
MAX_STATE_BYTES = 64 * 1024
# Entries of one list in a call: it holds up all other calls while it is worked off.
MAX_BATCH = 4096


T = TypeVar("T")


def to_array(token_ids: TokenIds[int]) -> array[int]:
    """Tokens as packed int32. Raises ValueError for what is no token."""
    try:
        packed = array("i", token_ids)
    except (OverflowError, TypeError):
        raise ValueError("a token id is not an integer from 0 to 2147483647") from None
    if packed and np.frombuffer(packed, np.int32).min() < 0:
        raise ValueError("a token id is below 0")
    return packed


def _no_blocks() -> array[int]:
    return array("i")


@dataclass(slots=True, eq=False)
class Sequence:
    """What the page manager knows of an open sequence.

    States: resident, suspended. Of a resident one, num_computed <= length, num_computed <=
    len(tokens), and len(block_ids) == ceil(length / block_size). Tokens may run ahead of
    the length by those that have been drawn but have no slot yet. A suspended one has no
    blocks of the page pool; `num_computed` is what it had computed.

    `may_share_tail`: the last block may be one that others read, which must be copied
    before the next slot in it is given out. `num_forked_blocks`: leading ones that were
    shared by forking, which any of those who share them may compute. `sources`: blocks
    that are to be copied to its own from the index `first_target` on, held until its next
    commit says that they were.
    `host_ids`: blocks of the host pool that a suspended one waits with, the partial last
    one too if `has_host_tail`.
    """

    sequence_id: str
    serial: int
    tokens: array[int]
    num_prompt_tokens: int
    num_cached_tokens: int
    block_ids: array[int]
    length: int
    num_computed: int
    chain: Chain
    epoch: int = 0  # of the driver that opened it; 0: another client
    driver_state: bytes = b""  # the driver's own business
    group: str = ""  # sequences of a group are suspended and resumed together
    may_share_tail: bool = False
    num_forked_blocks: int = 0
    sources: array[int] = field(default_factory=_no_blocks)
    first_target: int = 0
    is_suspended: bool = False
    host_ids: array[int] = field(default_factory=_no_blocks)
    has_host_tail: bool = False

    def is_opened_by(self, plan: OpenPlan, prompt: array[int]) -> bool:
        """The plan is a repeat of the one that opened this sequence."""
        return (
            not self.is_suspended
            and self.chain.namespace == plan.namespace
            and self.num_prompt_tokens == len(prompt)
            and self.tokens[: self.num_prompt_tokens] == prompt
        )


def check_id(sequence_id: str, name: str = "sequence_id") -> None:
    """Raises InvalidRequest for what is no id of a sequence, or of something like it."""
    size = len(sequence_id.encode("utf-8", "surrogatepass"))
    if not 1 <= size <= MAX_ID_BYTES:
        raise InvalidRequest(name, f"must have 1 to {MAX_ID_BYTES} bytes, has {size}")


def check_batch(entries: Iterable[T], name: str = "plans") -> list[T]:
    """The entries of a call. Raises InvalidRequest for more than it may have."""
    checked = list(entries)
    if len(checked) > MAX_BATCH:
        raise InvalidRequest(name, f"has {len(checked)} entries, at most {MAX_BATCH} are allowed")
    return checked


def check_tokens(token_ids: TokenIds[int]) -> array[int]:
    """A prompt. Raises InvalidRequest, naming the field."""
    try:
        prompt = to_array(token_ids)
    except ValueError as error:
        raise InvalidRequest("token_ids", str(error)) from None
    if not prompt:
        raise InvalidRequest("token_ids", "the prompt is empty")
    return prompt


def check_state(driver_state: bytes) -> None:
    """Raises InvalidRequest for a state that is too large to be kept."""
    if len(driver_state) > MAX_STATE_BYTES:
        raise InvalidRequest(
            "driver_state", f"has {len(driver_state)} bytes, at most {MAX_STATE_BYTES} are kept"
        )


def check_plan(plan: OpenPlan) -> array[int]:
    """The prompt of a well-formed plan. Raises InvalidRequest, naming the field."""
    check_id(plan.sequence_id)
    check_state(plan.driver_state)
    if plan.group:
        check_id(plan.group, "group_id")
    return check_tokens(plan.token_ids)


def check_commit(sequence: Sequence, plan: CommitPlan) -> array[int]:
    """The tokens that a commit makes known. Raises InvalidCommit; nothing changed."""
    num_known = len(sequence.tokens)
    start = plan.token_start
    if not 0 <= start <= num_known:
        raise InvalidCommit("token_start", f"{start} leaves a gap after {num_known} known tokens")
    try:
        given = to_array(plan.token_ids)
    except ValueError as error:
        raise InvalidCommit("token_ids", str(error)) from None
    overlap = min(len(given), num_known - start)
    if given[:overlap] != sequence.tokens[start : start + overlap]:
        raise InvalidCommit("token_ids", "differ from the known ones")
    new = given[overlap:]
    limit = min(sequence.length, num_known + len(new))
    if not 0 <= plan.num_computed_tokens <= limit:
        raise InvalidCommit(
            "computed_token_count",
            f"{plan.num_computed_tokens} is not within the {limit} known tokens that have a slot",
        )
    if plan.driver_state is not None:
        check_state(plan.driver_state)
    return new
