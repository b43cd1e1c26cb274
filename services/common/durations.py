"""Between seconds and google.protobuf.Duration."""

from __future__ import annotations

from google.protobuf import duration_pb2


def duration(seconds: float) -> duration_pb2.Duration:
    nanos = round(seconds * 1e9)
    return duration_pb2.Duration(seconds=nanos // 10**9, nanos=nanos % 10**9)


def seconds_of(message: duration_pb2.Duration) -> float:
    seconds: float = message.seconds + message.nanos / 1e9
    return seconds
