"""A kvstore that is killed at any of its kill points, and the one that follows it."""

from __future__ import annotations

import signal
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from google.protobuf import duration_pb2
from quire.common.v1 import common_pb2
from quire.kvstore.v1 import kvstore_pb2 as pb

from kvstore.kill_points import KILL_POINTS
from services.common.errors import error_details
from tests.integration.kvstore_process import SHAPE, KvStoreProcess, findings, listed

SPACE = common_pb2.Namespace(model_fingerprint=b"m" * 32, tenant="t")
OTHERS = common_pb2.Namespace(model_fingerprint=b"m" * 32, tenant="u")
MINUTE = duration_pb2.Duration(seconds=60)
# A repeat of a call that was done says so.
DONE = {"SEQUENCE_EXISTS", "SEQUENCE_SUSPENDED", "SEQUENCE_NOT_SUSPENDED"}


class Client:
    """Calls that lead past every kill point. It goes on at the call that was not answered.

    `known`: the lengths of the sequences that it was told are open.
    """

    def __init__(self) -> None:
        self.epoch = self.transfer = self.next_call = 0
        self.known: dict[str, int] = {}
        self.was_cut = False

    def run(self, stub) -> bool:
        """Make all calls that are left; False if the server died meanwhile."""
        calls = self.calls(stub)
        while self.next_call < len(calls):
            method, request, told = calls[self.next_call]
            try:
                answer = getattr(stub, method)(request, timeout=20)
            except grpc.RpcError as error:
                status = error_details(error)
                if not status.reason:
                    assert status.code is grpc.StatusCode.UNAVAILABLE
                    self.was_cut = True
                    return False
                assert self.was_cut, status
                assert status.reason in DONE
                answer = None
            self.was_cut = False
            self.learn(method, answer)
            self.known = {k: n for k, n in {**self.known, **told}.items() if n}
            self.next_call += 1
            calls = self.calls(stub)
        return True

    def learn(self, method: str, answer) -> None:
        if method == "AcquireDriverLease":
            self.epoch = answer.epoch
        if method == "SuspendSequences" and answer is not None:
            self.transfer = answer.transfer

    def calls(self, stub):
        mine = {"driver_epoch": self.epoch}
        open_a = pb.OpenPlan(
            sequence_id="a", token_ids=range(100, 112), namespace=SPACE, driver_state=b"state"
        )
        commit_b = pb.CommitPlan(
            sequence_id="b", computed_token_count=17, token_start=12, token_ids=range(5)
        )
        step = pb.UpdateSequencesRequest(
            extends=[pb.ExtendPlan(sequence_id="a", length=20)],
            completed_transfer=self.transfer,
            runs_copies=True,
            **mine,
        )
        return [
            ("AttachPool", pb.AttachPoolRequest(shape=SHAPE), {}),
            ("AcquireDriverLease", pb.AcquireDriverLeaseRequest(driver_id="one"), {}),
            ("OpenSequences", opening("theirs", range(20), OTHERS), {"theirs": 20}),
            ("CommitBlocks", commit("theirs", 20), {}),
            ("OpenSequences", pb.OpenSequencesRequest(plans=[open_a], **mine), {"a": 12}),
            ("CommitBlocks", commit("a", 12, **mine), {}),
            (
                "ForkSequences",
                pb.ForkSequencesRequest(
                    plans=[pb.ForkPlan(source_sequence_id="a", sequence_id="b")], **mine
                ),
                {"b": 12},
            ),
            ("ExtendSequences", extension("b", 17, **mine), {"b": 17}),
            ("CommitBlocks", pb.CommitBlocksRequest(plans=[commit_b], **mine), {}),
            (
                "TruncateSequences",
                pb.TruncateSequencesRequest(
                    plans=[pb.TruncatePlan(sequence_id="b", length=10)], **mine
                ),
                {"b": 10},
            ),
            ("PinPrefix", pin(range(16)), {}),
            (
                "SuspendSequences",
                pb.SuspendSequencesRequest(
                    plans=[pb.SuspendPlan(sequence_id="b", mode=pb.SUSPEND_MODE_SWAP)],
                    runs_copies=True,
                    **mine,
                ),
                {},
            ),
            ("UpdateSequences", step, {"a": 20}),
            ("CloseSequences", pb.CloseSequencesRequest(sequence_ids=["theirs"]), {"theirs": 0}),
            ("UnpinPrefix", pb.UnpinPrefixRequest(owner="o"), {}),
            ("OpenSequences", opening("large", range(500, 540), OTHERS), {"large": 40}),
            ("CommitBlocks", commit("large", 40), {}),
            ("CloseSequences", pb.CloseSequencesRequest(sequence_ids=["large"]), {"large": 0}),
            (
                "ResumeSequences",
                pb.ResumeSequencesRequest(sequence_ids=["b"], runs_copies=True, **mine),
                {},
            ),
            ("AcquireDriverLease", pb.AcquireDriverLeaseRequest(adopts=True), {}),
            ("OpenSequences", opening("again", range(100, 112), SPACE), {"again": 12}),
        ]


def opening(sequence_id: str, tokens, namespace) -> pb.OpenSequencesRequest:
    plan = pb.OpenPlan(sequence_id=sequence_id, token_ids=tokens, namespace=namespace)
    return pb.OpenSequencesRequest(plans=[plan])


def commit(sequence_id: str, count: int, **more) -> pb.CommitBlocksRequest:
    plan = pb.CommitPlan(sequence_id=sequence_id, computed_token_count=count)
    return pb.CommitBlocksRequest(plans=[plan], **more)


def extension(sequence_id: str, length: int, **more) -> pb.ExtendSequencesRequest:
    plan = pb.ExtendPlan(sequence_id=sequence_id, length=length)
    return pb.ExtendSequencesRequest(plans=[plan], **more)


def pin(tokens) -> pb.PinPrefixRequest:
    return pb.PinPrefixRequest(
        pin_id="p",
        owner="o",
        ttl=MINUTE,
        tokens=pb.PrefixTokens(token_ids=tokens, namespace=OTHERS),
    )


def die_and_go_on(point: str) -> str:
    """What went wrong at a kill point; empty: nothing."""
    with tempfile.TemporaryDirectory(prefix="quire-test-") as folder:
        server, client = KvStoreProcess(Path(folder), 8, 6), Client()
        try:
            server.start(point)
            with server.channel() as channel:
                assert not client.run(server.stub(channel)), "it was never there"
            assert server.wait() == -signal.SIGKILL, "it ended in another way"
            server.start()
            with server.channel() as channel:
                check(server.stub(channel), client)
            assert server.stop() == 0
            assert not server.objects(), "something is left in shared memory"
        except AssertionError as error:
            return f"{point}: {error}\n{server.log.read_text()}"
        finally:
            server.end()
    return ""


def check(stub, client: Client) -> None:
    """The pool is in order, all that was answered is there, and the rest can be done."""
    assert not findings(stub)
    present = listed(stub)
    _, _, told = client.calls(stub)[client.next_call]
    for sequence_id, length in client.known.items():
        possible = {length, told.get(sequence_id, length)}
        found = present[sequence_id].length if sequence_id in present else 0
        assert found in possible, f"{sequence_id} has {found} of {possible}"
    assert present.keys() <= client.known.keys() | told.keys()
    if "a" in present:
        assert list(present["a"].token_ids) == list(range(100, 112))
        assert present["a"].driver_state == b"state"
    if client.next_call:
        stub.AttachPool(pb.AttachPoolRequest(shape=SHAPE))  # given up before its first use
    assert client.run(stub), "it died again"
    assert not findings(stub)
    final = {key: one.length for key, one in listed(stub).items()}
    assert final == {"a": 20, "b": 10, "again": 12}
    stub.CloseSequences(pb.CloseSequencesRequest(sequence_ids=["again"]))
    stub.ReleaseDriverLease(pb.ReleaseDriverLeaseRequest(epoch=client.epoch))
    stats = stub.GetStats(pb.GetStatsRequest())
    assert (stats.sequence_count, stats.held_block_count) == (0, 0)


def test_a_kill_at_any_point_leaves_a_pool_that_the_next_process_goes_on_with():
    # Two at a time: most of their time they start, and machines may have two cores.
    with ThreadPoolExecutor(2) as threads:
        wrong = [text for text in threads.map(die_and_go_on, KILL_POINTS) if text]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("point", ["journal.commit", "journal.commit.before:x", "nonsense"])
def test_a_kill_point_that_is_none_is_refused_at_the_start(tmp_path, point):
    server = KvStoreProcess(tmp_path, 8)
    try:
        server.launch(point)
        assert server.wait() == 1
        assert "QUIRE_TEST_KILL_POINT" in server.log.read_text()
    finally:
        server.end()
