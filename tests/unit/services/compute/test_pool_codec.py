"""A pool's handle over the wire: every kind of memory, and peers that know fewer kinds."""

from __future__ import annotations

import pytest
from quire.common.v1 import common_pb2
from quire.kvstore.v1 import kvstore_pb2 as pb

from compute import types as ct
from compute.errors import PoolUnavailable
from kvstore import types as kv
from services.common.dtypes import dtype_name, dtype_number
from services.compute import codec as compute_codec
from services.kvstore import codec as kvstore_codec

NUMBERS = (bytes(range(64)), bytes(range(16)), 4711, 4026531836)


def sent(memory: kv.SharedMemory) -> pb.PoolHandle:
    layout = kv.PoolLayout(kv.KvShape(2, 3, 8, "fp8_e4m3"), 16, 100)
    handle = kv.PoolHandle(memory, 4096, layout.pool_bytes, layout, 2**64 - 1)
    return pb.PoolHandle.FromString(kvstore_codec.pool_handle(handle).SerializeToString())


def test_memory_of_a_device_arrives_whole():
    message = sent(kv.CudaIpcMemory(*NUMBERS))
    handle = compute_codec.pool_handle(message)
    assert handle.memory == ct.CudaIpcMemory(*NUMBERS)
    assert (handle.offset_bytes, handle.generation) == (4096, 2**64 - 1)
    assert handle.layout == ct.PoolLayout(ct.KvShape(2, 3, 8, "fp8_e4m3"), 16, 100)
    assert handle.size_bytes == handle.layout.pool_bytes
    # An older compute finds no name, and so does not map what it cannot read.
    assert message.name == ""


def test_an_older_peer_finds_shared_memory_by_its_name_alone():
    message = sent(kv.PosixMemory("quire-x"))
    assert message.name == message.posix.name == "quire-x"
    message.ClearField("memory")
    assert compute_codec.pool_handle(message).memory == ct.PosixMemory("quire-x")


def test_memory_of_a_kind_that_is_not_known_is_not_taken_for_another():
    message = sent(kv.CudaIpcMemory(*NUMBERS))
    message.ClearField("memory")
    with pytest.raises(PoolUnavailable, match="update compute"):
        compute_codec.pool_handle(message)


def test_both_domains_know_the_types_of_the_wire_and_count_their_bytes_alike():
    numbers = set(common_pb2.Dtype.values()) - {common_pb2.DTYPE_UNSPECIFIED}
    names = {dtype_name(number) for number in numbers}
    assert names == set(kv.DTYPE_BYTES) == set(ct.DTYPE_BYTES)
    assert {dtype_number(name) for name in names} == numbers
    for name in names:
        ours = ct.PoolLayout(ct.KvShape(3, 5, 24, name), 8, 7)
        theirs = kv.PoolLayout(kv.KvShape(3, 5, 24, name), 8, 7)
        assert ours.block_bytes == theirs.block_bytes
        assert ours.pool_bytes == theirs.pool_bytes
