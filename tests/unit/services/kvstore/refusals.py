"""Requests to a kvstore that it must refuse, with the code and the reason.

They are about a pool of 8 blocks of 8 tokens. In it `mine` and `away`, which is suspended, are a
client's, `driven` is the driver's, and `p` is a pin.
"""

from __future__ import annotations

from google.protobuf import duration_pb2
from quire.common.v1 import common_pb2
from quire.kvstore.v1 import kvstore_pb2 as pb

from kvstore.sequences import MAX_BATCH, MAX_STATE_BYTES

SHAPE = common_pb2.KvShape(
    layer_count=1, kv_head_count=1, head_size=8, dtype=common_pb2.DTYPE_FLOAT32
)
BLOCK_BYTES = 8 * 2 * 8 * 4
NUM_BLOCKS = 8
SPACE = common_pb2.Namespace(model_fingerprint=b"m" * 32, tenant="t")
OTHER = common_pb2.Namespace(model_fingerprint=b"m" * 32, tenant="u")
MOST = 2**31 - 1
LONG = "x" * 129
MINUTE = duration_pb2.Duration(seconds=60)
OLD, NEW = -1, -2  # epochs, filled in once they are known


# --- requests ---------------------------------------------------------------


def plan(sequence_id: str, length: int, first: int = 0, **more) -> pb.OpenPlan:
    its = {"namespace": SPACE, "token_ids": range(first, first + length)}
    return pb.OpenPlan(sequence_id=sequence_id, **its | more)


def opening(sequence_id: str, length: int, first: int = 0, *, driver_epoch=0, **more):
    plans = [plan(sequence_id, length, first, **more)]
    return pb.OpenSequencesRequest(plans=plans, driver_epoch=driver_epoch)


def extension(sequence_id: str, length: int, **more) -> pb.ExtendSequencesRequest:
    plans = [pb.ExtendPlan(sequence_id=sequence_id, length=length)]
    return pb.ExtendSequencesRequest(plans=plans, **more)


def commits(*plans: pb.CommitPlan, **more) -> pb.CommitBlocksRequest:
    return pb.CommitBlocksRequest(plans=plans, **more)


def commit(sequence_id: str, count: int, **more) -> pb.CommitBlocksRequest:
    return commits(pb.CommitPlan(sequence_id=sequence_id, computed_token_count=count, **more))


def fork(source: str, sequence_id: str) -> pb.ForkSequencesRequest:
    return forks((source, sequence_id))


def forks(*pairs, **more) -> pb.ForkSequencesRequest:
    plans = [pb.ForkPlan(source_sequence_id=one, sequence_id=other) for one, other in pairs]
    return pb.ForkSequencesRequest(plans=plans, **more)


def truncation(sequence_id: str, length: int) -> pb.TruncateSequencesRequest:
    return pb.TruncateSequencesRequest(
        plans=[pb.TruncatePlan(sequence_id=sequence_id, length=length)]
    )


def suspension(sequence_id: str, mode: int = pb.SUSPEND_MODE_AUTO) -> pb.SuspendSequencesRequest:
    return pb.SuspendSequencesRequest(plans=[pb.SuspendPlan(sequence_id=sequence_id, mode=mode)])


def resumption(*sequence_ids: str) -> pb.ResumeSequencesRequest:
    return pb.ResumeSequencesRequest(sequence_ids=sequence_ids)


def closing(*sequence_ids: str, **more) -> pb.CloseSequencesRequest:
    return pb.CloseSequencesRequest(sequence_ids=sequence_ids, **more)


def pin(pin_id: str, **more) -> pb.PinPrefixRequest:
    its = {"owner": "o", "ttl": MINUTE}
    if "sequence_id" not in more:
        its["tokens"] = pb.PrefixTokens(token_ids=range(8), namespace=SPACE)
    return pb.PinPrefixRequest(pin_id=pin_id, **its | more)


def tokens(count: int) -> pb.PrefixTokens:
    return pb.PrefixTokens(token_ids=range(count), namespace=SPACE)


def shape(**other) -> pb.AttachPoolRequest:
    its = {"layer_count": 1, "kv_head_count": 1, "head_size": 8, "dtype": SHAPE.dtype}
    return pb.AttachPoolRequest(shape=common_pb2.KvShape(**its | other))


def many(make) -> list:
    return [make(f"s{number}") for number in range(MAX_BATCH + 1)]


def seconds(count: float) -> duration_pb2.Duration:
    return duration_pb2.Duration(seconds=int(count), nanos=int(count % 1 * 1e9))


# --- what is refused --------------------------------------------------------

INVALID = ("INVALID_ARGUMENT", "INVALID_REQUEST")
COMMIT = ("INVALID_ARGUMENT", "INVALID_COMMIT")
MISSING = ("NOT_FOUND", "SEQUENCE_NOT_FOUND")
EXISTS = ("ALREADY_EXISTS", "SEQUENCE_EXISTS")
FOREIGN = ("PERMISSION_DENIED", "FOREIGN_SEQUENCE")
AWAY = ("FAILED_PRECONDITION", "SEQUENCE_SUSPENDED")
LAPSED = ("FAILED_PRECONDITION", "LEASE_LAPSED")
FULL = ("RESOURCE_EXHAUSTED", "OUT_OF_BLOCKS")

REFUSED = {
    # the pool
    "another layout": (
        "AttachPool",
        shape(layer_count=2),
        ("FAILED_PRECONDITION", "LAYOUT_MISMATCH"),
    ),
    "no layers": ("AttachPool", shape(layer_count=0), INVALID),
    "a type from the future": ("AttachPool", shape(dtype=99), INVALID),
    # open
    "open under an empty id": ("OpenSequences", opening("", 9), INVALID),
    "open under a long id": ("OpenSequences", opening(LONG, 9), INVALID),
    "open in a long group": ("OpenSequences", opening("s", 9, group_id=LONG), INVALID),
    "open without tokens": ("OpenSequences", opening("s", 0), INVALID),
    "open with a negative token": ("OpenSequences", opening("s", 2, -1), INVALID),
    "open with too much state": (
        "OpenSequences",
        opening("s", 9, driver_state=bytes(MAX_STATE_BYTES + 1)),
        INVALID,
    ),
    "open with other tokens": ("OpenSequences", opening("mine", 12, 1), EXISTS),
    "open in another namespace": ("OpenSequences", opening("mine", 12, namespace=OTHER), EXISTS),
    "open what is suspended": ("OpenSequences", opening("away", 9, 100), EXISTS),
    "open what is the driver's": ("OpenSequences", opening("driven", 9, 200), EXISTS),
    "open what can never fit": (
        "OpenSequences",
        opening("s", NUM_BLOCKS * 8 + 1),
        ("INVALID_ARGUMENT", "PROMPT_EXCEEDS_POOL"),
    ),
    "open what does not fit now": ("OpenSequences", opening("s", NUM_BLOCKS * 8, 300), FULL),
    "open the second time with another epoch": (
        "OpenSequences",
        opening("mine", 12, driver_epoch=NEW),
        EXISTS,
    ),
    "open one good and one bad": (
        "OpenSequences",
        pb.OpenSequencesRequest(plans=[plan("s", 9), plan("", 9)]),
        INVALID,
    ),
    # extend
    "extend an unknown one": ("ExtendSequences", extension("ghost", 9), MISSING),
    "extend without an id": ("ExtendSequences", extension("", 9), MISSING),
    "extend a foreign one": ("ExtendSequences", extension("driven", 20), FOREIGN),
    "extend a client's as the driver": (
        "ExtendSequences",
        extension("mine", 20, driver_epoch=NEW),
        FOREIGN,
    ),
    "extend a suspended one": ("ExtendSequences", extension("away", 20), AWAY),
    "extend to the largest number": ("ExtendSequences", extension("mine", MOST), FULL),
    "extend one and an unknown one": (
        "ExtendSequences",
        pb.ExtendSequencesRequest(
            plans=[
                pb.ExtendPlan(sequence_id="mine", length=20),
                pb.ExtendPlan(sequence_id="ghost", length=20),
            ]
        ),
        MISSING,
    ),
    # commit
    "commit for an unknown one": ("CommitBlocks", commit("ghost", 1), MISSING),
    "commit for a foreign one": ("CommitBlocks", commit("driven", 1), FOREIGN),
    "commit for a suspended one": ("CommitBlocks", commit("away", 1), AWAY),
    "commit beyond the length": ("CommitBlocks", commit("mine", 13), COMMIT),
    "commit the largest number": ("CommitBlocks", commit("mine", MOST), COMMIT),
    "commit less than nothing": ("CommitBlocks", commit("mine", -1), COMMIT),
    "commit after a gap": ("CommitBlocks", commit("mine", 9, token_start=MOST), COMMIT),
    "commit before the start": ("CommitBlocks", commit("mine", 9, token_start=-1), COMMIT),
    "commit other tokens": ("CommitBlocks", commit("mine", 9, token_ids=[5]), COMMIT),
    "commit a negative token": (
        "CommitBlocks",
        commit("mine", 12, token_start=12, token_ids=[-1]),
        COMMIT,
    ),
    "commit too much state": (
        "CommitBlocks",
        commit("mine", 12, driver_state=bytes(MAX_STATE_BYTES + 1)),
        INVALID,
    ),
    "commit twice in a call": (
        "CommitBlocks",
        commits(*[pb.CommitPlan(sequence_id="mine", computed_token_count=12)] * 2),
        COMMIT,
    ),
    # fork
    "fork an unknown one": ("ForkSequences", fork("ghost", "s"), MISSING),
    "fork a suspended one": ("ForkSequences", fork("away", "s"), AWAY),
    "fork under an id that is open": ("ForkSequences", fork("mine", "away"), EXISTS),
    "fork into itself": ("ForkSequences", fork("mine", "mine"), EXISTS),
    "fork under an empty id": ("ForkSequences", fork("mine", ""), INVALID),
    "fork under a long id": ("ForkSequences", fork("mine", LONG), INVALID),
    "fork what comes later in the call": (
        "ForkSequences",
        forks(("s", "t"), ("mine", "s")),
        MISSING,
    ),
    # truncate
    "truncate an unknown one": ("TruncateSequences", truncation("ghost", 1), MISSING),
    "truncate a foreign one": ("TruncateSequences", truncation("driven", 1), FOREIGN),
    "truncate a suspended one": ("TruncateSequences", truncation("away", 1), AWAY),
    "truncate to nothing": ("TruncateSequences", truncation("mine", 0), INVALID),
    "truncate to less than nothing": ("TruncateSequences", truncation("mine", -MOST - 1), INVALID),
    "truncate past the end": ("TruncateSequences", truncation("mine", 13), INVALID),
    # suspend, resume, close
    "suspend an unknown one": ("SuspendSequences", suspension("ghost"), MISSING),
    "suspend a foreign one": ("SuspendSequences", suspension("driven"), FOREIGN),
    "suspend again": ("SuspendSequences", suspension("away"), AWAY),
    "suspend in a way from the future": ("SuspendSequences", suspension("mine", 99), INVALID),
    "resume an unknown one": ("ResumeSequences", resumption("ghost"), MISSING),
    "resume a foreign one": ("ResumeSequences", resumption("driven"), FOREIGN),
    "resume what is not away": (
        "ResumeSequences",
        resumption("mine"),
        ("FAILED_PRECONDITION", "SEQUENCE_NOT_SUSPENDED"),
    ),
    "resume one and an unknown one": ("ResumeSequences", resumption("away", "ghost"), MISSING),
    "close a foreign one": ("CloseSequences", closing("mine", "driven"), FOREIGN),
    # pins
    "pin under an empty id": ("PinPrefix", pin(""), INVALID),
    "pin under a long id": ("PinPrefix", pin(LONG), INVALID),
    "pin for nobody": ("PinPrefix", pin("q", owner=""), INVALID),
    "pin for a long name": ("PinPrefix", pin("q", owner=LONG), INVALID),
    "pin nothing": ("PinPrefix", pb.PinPrefixRequest(pin_id="q", owner="o", ttl=MINUTE), INVALID),
    "pin less than a block": ("PinPrefix", pin("q", tokens=tokens(7)), INVALID),
    "pin no tokens": ("PinPrefix", pin("q", tokens=tokens(0)), INVALID),
    "pin without a time": ("PinPrefix", pin("q", ttl=seconds(0)), INVALID),
    "pin for too short": ("PinPrefix", pin("q", ttl=seconds(0.5)), INVALID),
    "pin for too long": ("PinPrefix", pin("q", ttl=seconds(8 * 86_400)), INVALID),
    "pin until before now": ("PinPrefix", pin("q", ttl=seconds(-5)), INVALID),
    "pin above all": ("PinPrefix", pin("q", priority=1001), INVALID),
    "pin below all": ("PinPrefix", pin("q", priority=-MOST - 1), INVALID),
    "pin an unknown sequence": ("PinPrefix", pin("q", sequence_id="ghost"), MISSING),
    "pin a sequence without a whole block": ("PinPrefix", pin("q", sequence_id="away"), INVALID),
    "pin something else": (
        "PinPrefix",
        pin("p", tokens=tokens(16)),
        ("ALREADY_EXISTS", "PIN_EXISTS"),
    ),
    "pin for somebody else": ("PinPrefix", pin("p", owner="x"), ("ALREADY_EXISTS", "PIN_EXISTS")),
    "pin over the budget": (
        "PinPrefix",
        pin("q", tokens=tokens(64)),
        ("RESOURCE_EXHAUSTED", "PIN_BUDGET_EXCEEDED"),
    ),
    "renew an unknown pin": (
        "RenewPin",
        pb.RenewPinRequest(pin_id="ghost", ttl=MINUTE),
        ("NOT_FOUND", "PIN_NOT_FOUND"),
    ),
    "renew for no time": ("RenewPin", pb.RenewPinRequest(pin_id="p"), INVALID),
    "unpin nothing": ("UnpinPrefix", pb.UnpinPrefixRequest(), INVALID),
    # lists
    "a page that is too large": ("ListSequences", pb.ListSequencesRequest(page_size=1001), INVALID),
    "a page of less than nothing": (
        "ListSequences",
        pb.ListSequencesRequest(page_size=-1),
        INVALID,
    ),
    "a page that was never given": (
        "ListSequences",
        pb.ListSequencesRequest(page_token="nonsense"),
        INVALID,
    ),
    # epochs that are over, or were never given
    "an old open": ("OpenSequences", opening("s", 9, driver_epoch=OLD), LAPSED),
    "an old extension": ("ExtendSequences", extension("driven", 20, driver_epoch=OLD), LAPSED),
    "an old commit": ("CommitBlocks", commits(driver_epoch=OLD), LAPSED),
    "an old fork": ("ForkSequences", forks(("driven", "s"), driver_epoch=OLD), LAPSED),
    "an old truncation": (
        "TruncateSequences",
        pb.TruncateSequencesRequest(driver_epoch=OLD),
        LAPSED,
    ),
    "an old suspension": ("SuspendSequences", pb.SuspendSequencesRequest(driver_epoch=OLD), LAPSED),
    "an old resumption": ("ResumeSequences", pb.ResumeSequencesRequest(driver_epoch=OLD), LAPSED),
    "an old close": ("CloseSequences", closing("driven", driver_epoch=OLD), LAPSED),
    "an old pin": ("PinPrefix", pin("q", driver_epoch=OLD), LAPSED),
    "an old update": (
        "UpdateSequences",
        pb.UpdateSequencesRequest(
            closes=["driven"],
            driver_epoch=OLD,
            completed_transfer=2**63 - 1,
            prefill_token_count=10**6,
            prefill_duration=seconds(1),
        ),
        LAPSED,
    ),
    "an epoch that never was": ("CloseSequences", closing("mine", driver_epoch=7), LAPSED),
    "a negative epoch": ("CloseSequences", closing("mine", driver_epoch=-(2**63)), LAPSED),
    # too many at once
    "too many opens": (
        "OpenSequences",
        pb.OpenSequencesRequest(plans=many(lambda key: plan(key, 1))),
        INVALID,
    ),
    "too many extensions": (
        "ExtendSequences",
        pb.ExtendSequencesRequest(
            plans=[pb.ExtendPlan(sequence_id="mine", length=20)] * (MAX_BATCH + 1)
        ),
        INVALID,
    ),
    "too many commits": (
        "CommitBlocks",
        commits(*many(lambda key: pb.CommitPlan(sequence_id=key))),
        INVALID,
    ),
    "too many forks": ("ForkSequences", forks(*many(lambda key: ("mine", key))), INVALID),
    "too many truncations": (
        "TruncateSequences",
        pb.TruncateSequencesRequest(
            plans=[pb.TruncatePlan(sequence_id="mine", length=9)] * (MAX_BATCH + 1)
        ),
        INVALID,
    ),
    "too many suspensions": (
        "SuspendSequences",
        pb.SuspendSequencesRequest(plans=[pb.SuspendPlan(sequence_id="mine")] * (MAX_BATCH + 1)),
        INVALID,
    ),
    "too many resumptions": ("ResumeSequences", resumption(*["away"] * (MAX_BATCH + 1)), INVALID),
    **{
        f"a report of {what}": (
            "UpdateSequences",
            pb.UpdateSequencesRequest(closes=["mine"], **fields),
            INVALID,
        )
        for what, fields in {
            "a transfer that never was": {"completed_transfer": 2**62},
            "a transfer below 0": {"completed_transfer": -1},
            "prompt tokens below 0": {"prefill_token_count": -1},
            "a prefill before its start": {"prefill_duration": seconds(-1)},
            "copies before their start": {"transfer_duration": seconds(-1)},
        }.items()
    },
    "a truncation to more than the one before it in the call leaves": (
        "TruncateSequences",
        pb.TruncateSequencesRequest(
            plans=[
                pb.TruncatePlan(sequence_id="mine", length=1),
                pb.TruncatePlan(sequence_id="mine", length=12),
            ]
        ),
        INVALID,
    ),
    "too many closes": ("CloseSequences", closing(*["mine"] * (MAX_BATCH + 1)), INVALID),
    **{
        f"an update with too many {name}": (
            "UpdateSequences",
            pb.UpdateSequencesRequest(
                **{name: many(make)},
                prefill_token_count=10**6,
                prefill_duration=seconds(1),
            ),
            INVALID,
        )
        for name, make in {
            "commits": lambda key: pb.CommitPlan(sequence_id="mine", computed_token_count=12),
            "closes": lambda key: "mine",
            "extends": lambda key: pb.ExtendPlan(sequence_id="mine", length=20),
            "opens": lambda key: plan(key, 1),
        }.items()
    },
}

# --- what is accepted, and changes nothing ---------------------------------------

NO_CHANGE = {
    "an extension to less": ("ExtendSequences", extension("mine", 3)),
    "an extension to less than nothing": ("ExtendSequences", extension("mine", -MOST - 1)),
    "an extension to the present length": ("ExtendSequences", extension("mine", 12)),
    "an open again": ("OpenSequences", opening("mine", 12)),
    "a commit again": ("CommitBlocks", commit("mine", 9)),
    "a commit of less": ("CommitBlocks", commit("mine", 0)),
    "a truncation to the present length": ("TruncateSequences", truncation("mine", 12)),
    "a close of what is not open": ("CloseSequences", closing("ghost", "")),
    "a pin again": ("PinPrefix", pin("p")),
    "an end of no pin": ("UnpinPrefix", pb.UnpinPrefixRequest(pin_id="ghost")),
    "an attachment again": ("AttachPool", pb.AttachPoolRequest(shape=SHAPE)),
    "a release of an old lease": ("ReleaseDriverLease", pb.ReleaseDriverLeaseRequest(epoch=7)),
    "empty lists": ("UpdateSequences", pb.UpdateSequencesRequest()),
    "a transfer of an earlier process": (
        "UpdateSequences",
        pb.UpdateSequencesRequest(completed_transfer=7),
    ),
}
