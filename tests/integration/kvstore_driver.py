"""A driver of the kvstore among other clients: one update per step, over one stream."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field

from quire.kvstore.v1 import kvstore_pb2 as pb

from tests.integration.kvstore_client import SPACE
from tests.integration.kvstore_process import BLOCK_SIZE

MOST_RUNNING = 3


@dataclass
class Running:
    """A sequence that it has open. The first `num_shared` blocks are others' too."""

    tokens: list[int]
    table: list[int]
    num_shared: int


@dataclass
class Driver:
    """It runs the copies that it is asked to, in name, and says so with the next update."""

    name: str
    epoch: int
    running: dict[str, Running] = field(default_factory=dict)
    num_made: int = 0
    num_copies: int = 0
    num_refused: int = 0

    def __post_init__(self) -> None:
        self.random = random.Random(self.name)

    def writable(self) -> set[int]:
        """Blocks that its next steps write to."""
        return {block for one in self.running.values() for block in one.table[one.num_shared :]}

    async def drive(self, stub, num_steps: int, watch) -> None:
        stream = stub.DriveSequences()
        transfer, commits = 0, []
        for step in range(num_steps):
            update = pb.UpdateSequencesRequest(
                commits=commits,
                driver_epoch=self.epoch,
                runs_copies=True,
                completed_transfer=transfer,
            )
            is_last = step == num_steps - 1
            leaving = [key for key in self.running if is_last or self.random.random() < 0.15]
            for key in leaving:  # others may have its blocks before the answer is here
                del self.running[key]
            update.closes.extend(leaving)
            for key, one in self.running.items():
                update.extends.add(sequence_id=key, length=len(one.tokens) + 1)
            opening = {} if is_last else self.open_more(update)
            await stream.write(pb.DriveSequencesRequest(update=update))
            answer = (await asyncio.wait_for(stream.read(), 30)).update
            transfer = max(transfer, answer.transfer)
            self.num_copies += len(answer.copies)
            commits = self.learn(answer, opening)
            watch()
        await stream.done_writing()

    def open_more(self, update: pb.UpdateSequencesRequest) -> dict[str, list[int]]:
        if len(self.running) >= MOST_RUNNING:
            return {}
        self.num_made += 1
        key = f"{self.name}-{self.num_made}"
        kinds = [self.random.randrange(2) for _ in range(self.random.randrange(4))]
        tokens = [kind for kind in kinds for _ in range(BLOCK_SIZE)] + [self.random.randrange(9)]
        update.opens.add(sequence_id=key, token_ids=tokens, namespace=SPACE)
        return {key: tokens}

    def learn(self, answer, opening: dict[str, list[int]]) -> list[pb.CommitPlan]:
        """What it has now; the commits of the step that it runs next."""
        refused = {refusal.sequence_id: refusal.reason for refusal in answer.refused}
        assert set(refused.values()) <= {"OUT_OF_BLOCKS"}
        self.num_refused += len(refused)
        for grown in answer.extended:
            table = self.running[grown.sequence_id].table
            assert grown.first_index == len(table)
            assert not grown.HasField("copied_from_block_id")
            table.extend(grown.block_ids)
        commits = []
        for key, one in self.running.items():
            if key not in refused:
                commits.append(self.step(key, one, [self.random.randrange(9)]))
        for opened in answer.opened:
            tokens = opening[opened.sequence_id]
            num_hits, rest = divmod(opened.cached_token_count, BLOCK_SIZE)
            table = list(opened.block_ids)
            num_shared = num_hits + (rest > 0) - len(opened.copies)
            new = [copy.target_block_id for copy in opened.copies]
            assert table[num_shared : num_shared + len(new)] == new
            self.running[opened.sequence_id] = one = Running(tokens, table, num_shared)
            commits.append(self.step(opened.sequence_id, one, []))
        return commits

    def step(self, key: str, one: Running, drawn: list[int]) -> pb.CommitPlan:
        start = len(one.tokens)
        one.tokens += drawn
        assert len(one.table) == -(-len(one.tokens) // BLOCK_SIZE)
        return pb.CommitPlan(
            sequence_id=key,
            computed_token_count=len(one.tokens),
            token_start=start,
            token_ids=drawn,
        )
