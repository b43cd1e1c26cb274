"""A client of the kvstore that does anything at random and believes nothing.

python -m tests.integration.kvstore_client ADDRESS SEED
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, field

import grpc
from google.protobuf import duration_pb2
from quire.common.v1 import common_pb2
from quire.kvstore.v1 import kvstore_pb2 as pb
from quire.kvstore.v1 import kvstore_pb2_grpc

from services.common.errors import error_details
from tests.integration.kvstore_process import BLOCK_SIZE

SPACE = common_pb2.Namespace(model_fingerprint=b"m" * 32)
NO_ROOM = {"OUT_OF_BLOCKS", "QUOTA_EXCEEDED", "PIN_BUDGET_EXCEEDED"}
MOST_OPEN = 5


@dataclass
class Mine:
    """A sequence that this client has open."""

    tokens: list[int]
    table: list[int]
    length: int
    num_computed: int
    num_findable: int = 0  # leading blocks that others may read
    is_suspended: bool = False


@dataclass
class Books:
    """What one client owns, as it was told."""

    name: str
    seed: int
    open: dict[str, Mine] = field(default_factory=dict)
    pins: set[str] = field(default_factory=set)
    num_calls: int = 0
    num_refused: int = 0
    num_cuts: int = 0  # answers that were lost
    num_hits: int = 0
    num_made: int = 0

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)

    def writable(self) -> set[int]:
        """Blocks that its next steps write to."""
        return {
            block
            for mine in self.open.values()
            for block in mine.table[max(mine.num_findable, mine.num_computed // BLOCK_SIZE) :]
        }

    def num_blocks(self, length: int) -> int:
        return -(-length // BLOCK_SIZE)


class Refused(Exception):
    """The server said no, and why."""


class Cut(Exception):
    """The server went away: nobody knows whether the call was done."""


async def play(
    books: Books, stub, num_calls: int, watch: Callable[[], None], *, outlasts: bool = False
) -> None:
    """Make so many calls at random, check every answer, and close everything.

    `watch` is called after each. `outlasts`: the server may be replaced meanwhile.
    """
    player = _Player(books, stub)
    while books.num_calls < num_calls or books.open or books.pins:
        try:
            if player.lacks_room:
                await player.make_room()
            elif books.num_calls < num_calls:
                await player.anything()
            else:
                await player.end()
        except Refused as error:
            if str(error) not in NO_ROOM:
                raise
            books.num_refused += 1
            player.lacks_room = True
        except Cut:
            assert outlasts
            books.num_cuts += 1
            await asyncio.sleep(0.05)
            await player.look_again()
        watch()
    assert not await player.listed()


class _Player:
    def __init__(self, books: Books, stub) -> None:
        self.books, self.stub, self.random = books, stub, books.random
        self.lacks_room = False

    async def call(self, method: str, request):
        self.books.num_calls += 1
        try:
            return await getattr(self.stub, method)(request, timeout=30)
        except grpc.aio.AioRpcError as error:
            status = error_details(error)
            if not status.reason:
                assert status.code is grpc.StatusCode.UNAVAILABLE, status
                raise Cut from None
            raise Refused(status.reason) from None

    async def anything(self) -> None:
        resident = [key for key, mine in self.books.open.items() if not mine.is_suspended]
        away = [key for key, mine in self.books.open.items() if mine.is_suspended]
        calls = [self.open] if len(self.books.open) < MOST_OPEN else []
        if resident:
            key = self.random.choice(resident)
            one_of_it = [self.extend, self.commit, self.commit, self.truncate, self.close]
            calls += [lambda call=call: call(key) for call in (*one_of_it, self.suspend, self.pin)]
            if len(self.books.open) < MOST_OPEN:
                calls.append(lambda: self.fork(key))
        if away:
            calls += [lambda: self.resume(self.random.choice(away))] * 2
        if self.books.pins:
            calls.append(self.unpin)
        await self.random.choice(calls)()

    async def open(self) -> None:
        key = self.new_id()
        # Few distinct beginnings, so that clients share what others have computed.
        kinds = [self.random.randrange(2) for _ in range(self.random.randrange(4))]
        tokens = [kind for kind in kinds for _ in range(BLOCK_SIZE)] + [self.random.randrange(9)]
        plan = pb.OpenPlan(sequence_id=key, token_ids=tokens, namespace=SPACE)
        request = pb.OpenSequencesRequest(plans=[plan])
        [opened] = (await self.call("OpenSequences", request)).sequences
        num_hits = opened.cached_token_count
        assert opened.sequence_id == key
        assert len(opened.block_ids) == self.books.num_blocks(len(tokens))
        assert num_hits % BLOCK_SIZE == 0
        assert num_hits < len(tokens)
        self.books.num_hits += num_hits
        its = list(opened.block_ids)
        self.assert_new(its[num_hits // BLOCK_SIZE :])
        self.books.open[key] = Mine(
            tokens, its, len(tokens), num_hits, num_findable=num_hits // BLOCK_SIZE
        )
        [again] = (await self.call("OpenSequences", request)).sequences
        assert again == opened

    async def extend(self, key: str) -> None:
        mine = self.books.open[key]
        length = mine.length + self.random.randrange(-2, 12)
        request = pb.ExtendSequencesRequest(plans=[pb.ExtendPlan(sequence_id=key, length=length)])
        answer = await self.call("ExtendSequences", request)
        for grown in answer.sequences:
            assert grown.sequence_id == key
            new = list(grown.block_ids)
            self.assert_new(new)
            if grown.HasField("copied_from_block_id"):
                assert grown.first_index == len(mine.table) - 1
                assert mine.table.pop() == grown.copied_from_block_id
                mine.num_computed = min(mine.num_computed, grown.first_index * BLOCK_SIZE)
                mine.num_findable = min(mine.num_findable, grown.first_index)
            assert grown.first_index == len(mine.table)
            mine.table += new
        mine.length = max(mine.length, length)
        assert len(mine.table) == self.books.num_blocks(mine.length)

    async def commit(self, key: str) -> None:
        mine = self.books.open[key]
        start = len(mine.tokens)
        new = [self.random.randrange(9) for _ in range(max(0, mine.length - start))]
        count = min(mine.length, start + len(new))
        plan = pb.CommitPlan(
            sequence_id=key, computed_token_count=count, token_start=start, token_ids=new
        )
        await self.call("CommitBlocks", pb.CommitBlocksRequest(plans=[plan]))
        mine.tokens += new
        mine.num_computed = max(mine.num_computed, count)
        mine.num_findable = max(mine.num_findable, count // BLOCK_SIZE)

    async def fork(self, key: str) -> None:
        mine, new = self.books.open[key], self.new_id()
        plan = pb.ForkPlan(source_sequence_id=key, sequence_id=new)
        [forked] = (
            await self.call("ForkSequences", pb.ForkSequencesRequest(plans=[plan]))
        ).sequences
        length = min(mine.length, len(mine.tokens))
        assert (forked.sequence_id, forked.length) == (new, length)
        assert list(forked.block_ids) == mine.table[: self.books.num_blocks(length)]
        assert forked.computed_token_count == mine.num_computed
        self.books.open[new] = Mine(
            mine.tokens[:], list(forked.block_ids), length, mine.num_computed, mine.num_findable
        )

    async def truncate(self, key: str) -> None:
        mine = self.books.open[key]
        length = self.random.randint(max(1, mine.length - 5), mine.length)
        plan = pb.TruncatePlan(sequence_id=key, length=length)
        # Others may have what we give up before the answer is here.
        del mine.tokens[length:]
        del mine.table[self.books.num_blocks(length) :]
        mine.length, mine.num_computed = length, min(length, mine.num_computed)
        # A block that is cut within is copied before the next write, if others find it.
        mine.num_findable = min(mine.num_findable, len(mine.table))
        await self.call("TruncateSequences", pb.TruncateSequencesRequest(plans=[plan]))

    async def close(self, key: str) -> None:
        del self.books.open[key]
        await self.call("CloseSequences", pb.CloseSequencesRequest(sequence_ids=[key, "ghost"]))

    async def suspend(self, key: str) -> None:
        mode = self.random.choice([pb.SUSPEND_MODE_AUTO, pb.SUSPEND_MODE_RECOMPUTE])
        plan = pb.SuspendPlan(sequence_id=key, mode=mode)
        mine = self.books.open[key]
        mine.is_suspended, mine.table = True, []
        answer = await self.call("SuspendSequences", pb.SuspendSequencesRequest(plans=[plan]))
        assert [one.sequence_id for one in answer.sequences] == [key]
        assert not answer.copies, "it runs none"

    async def resume(self, key: str) -> None:
        request = pb.ResumeSequencesRequest(sequence_ids=[key])
        [back] = (await self.call("ResumeSequences", request)).sequences
        mine = self.books.open[key]
        assert back.sequence_id == key
        assert back.length == len(mine.tokens)
        # Others may have computed more of it meanwhile; a token is left to compute.
        assert back.computed_token_count <= max(mine.num_computed, len(mine.tokens) - 1)
        assert len(back.block_ids) == self.books.num_blocks(back.length)
        mine.is_suspended, mine.table, mine.length = False, list(back.block_ids), back.length
        mine.num_computed = back.computed_token_count
        mine.num_findable = mine.num_computed // BLOCK_SIZE
        self.assert_new(mine.table[mine.num_findable :], but=key)

    async def pin(self, key: str) -> None:
        mine, pin_id = self.books.open[key], self.new_id()
        if mine.num_computed < BLOCK_SIZE or self.books.pins:
            return
        request = pb.PinPrefixRequest(
            pin_id=pin_id,
            owner=self.books.name,
            sequence_id=key,
            ttl=duration_pb2.Duration(seconds=600),
        )
        pin = (await self.call("PinPrefix", request)).pin
        assert pin.token_count == mine.num_computed // BLOCK_SIZE * BLOCK_SIZE
        assert pin.cached_token_count <= pin.token_count
        self.books.pins.add(pin_id)

    async def unpin(self) -> None:
        request = pb.UnpinPrefixRequest(owner=self.books.name)
        answer = await self.call("UnpinPrefix", request)
        # Pins may have given way to sequences that had no room beside them.
        assert answer.ended_pin_count <= len(self.books.pins)
        self.books.pins.clear()

    async def make_room(self) -> None:
        """One that finds no room gives some, or all could wait for each other."""
        self.lacks_room = False
        resident = [key for key, mine in self.books.open.items() if not mine.is_suspended]
        if resident:
            await self.close(self.random.choice(resident))

    async def end(self) -> None:
        if self.books.pins:
            await self.unpin()
        else:
            await self.close(next(iter(self.books.open)))

    async def look_again(self) -> None:
        """An answer was lost: what the server knows of ours is what there is."""
        while True:
            try:
                present = await self.listed()
                break
            except Cut:
                await asyncio.sleep(0.05)
        for key, mine in list(self.books.open.items()):
            one = present.get(key)
            if one is None:  # it was closed by the call that was cut
                del self.books.open[key]
                continue
            assert abs(one.length - mine.length) <= 16
            known = min(len(one.token_ids), len(mine.tokens))
            assert list(one.token_ids[:known]) == mine.tokens[:known]
        for key, one in present.items():
            self.books.open[key] = Mine(
                list(one.token_ids),
                list(one.block_ids),
                one.length,
                one.computed_token_count,
                one.computed_token_count // BLOCK_SIZE,
                one.is_suspended,
            )

    async def listed(self) -> dict[str, pb.SequenceInfo]:
        """Ours."""
        request = pb.ListSequencesRequest(page_size=1000, include_tokens=True)
        answer = await self.call("ListSequences", request)
        name = f"{self.books.name}-"
        return {
            one.sequence_id: one for one in answer.sequences if one.sequence_id.startswith(name)
        }

    def assert_new(self, blocks: list[int], but: str = "") -> None:
        """None of them is in another table of ours."""
        assert len(set(blocks)) == len(blocks)
        for key, mine in self.books.open.items():
            assert key == but or not set(mine.table) & set(blocks), key

    def new_id(self) -> str:
        self.books.num_made += 1
        return f"{self.books.name}-{self.books.num_made}"


async def main(address: str, seed: int) -> None:
    books = Books(f"p{seed}", seed)
    async with grpc.aio.insecure_channel(address) as channel:
        await play(books, kvstore_pb2_grpc.KvCacheServiceStub(channel), 300, lambda: None)
    sys.stdout.write(json.dumps({"calls": books.num_calls, "refused": books.num_refused}))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
