"""What another process says about an error is read as far as it can be."""

import grpc
import grpc.aio
import pytest
from google.protobuf.any_pb2 import Any
from google.protobuf.duration_pb2 import Duration
from google.rpc.error_details_pb2 import ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status

from tokenloom.request import errors, wire_errors
from tokenloom.v1 import types_pb2

DAY = 86_400.0


def rpc_error(details: bytes) -> grpc.aio.AioRpcError:
    metadata = grpc.aio.Metadata(("grpc-status-details-bin", details))
    return grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), metadata, "text")


@pytest.mark.parametrize("details", [b"\xff", b"\x0a\xff\xff\xff\xff\x0f", b"\x1a\x05\x0a\x03abc"])
def test_a_broken_status_is_none(details: bytes) -> None:
    error = wire_errors.from_rpc(rpc_error(details))
    assert isinstance(error, errors.Unavailable)
    assert error.message == "A service is unavailable; retry."


def test_a_broken_detail_is_passed_over() -> None:
    info = Any()
    info.Pack(ErrorInfo(domain="tokenloom", reason="UNAVAILABLE"))
    wrong = Any(type_url="type.googleapis.com/google.rpc.RetryInfo", value=b"\xff\xff")
    status = Status(code=14, message="The engine leaves.", details=[wrong, info])
    assert wire_errors.from_rpc(rpc_error(status.SerializeToString())).message == "The engine leaves."


@pytest.mark.parametrize(
    ("delay", "seconds"),
    [
        (Duration(seconds=2, nanos=500_000_000), 2.5),
        (Duration(seconds=2**63 - 1), DAY),
        (Duration(seconds=-(2**63)), 0.0),
        (Duration(), 0.0),
    ],
)
def test_the_time_until_a_retry_is_at_most_a_day(delay: Duration, seconds: float) -> None:
    info, retry = Any(), Any()
    info.Pack(ErrorInfo(domain="tokenloom", reason="UNAVAILABLE"))
    retry.Pack(RetryInfo(retry_delay=delay))
    by_rpc = wire_errors.from_rpc(rpc_error(Status(code=14, details=[info, retry]).SerializeToString()))
    in_stream = wire_errors.from_proto(types_pb2.Error(code=14, reason="UNAVAILABLE", retry_after=delay))
    for error in (by_rpc, in_stream):
        assert error.retry_after == seconds
        assert wire_errors.to_proto(error).retry_after.ToNanoseconds() == seconds * 1e9


@pytest.mark.parametrize(
    ("details", "expected", "is_cut"),
    [("Internal error from Core", errors.Unavailable, True), ("Exception deserializing", errors.Internal, False)],
)
def test_a_call_that_grpc_could_not_finish_counts_as_cut(
    details: str, expected: type[errors.TokenloomError], is_cut: bool
) -> None:
    """On a machine that stood still for seconds, pings were late, and the client got an INTERNAL for it."""
    none = grpc.aio.Metadata()
    failed = grpc.aio.AioRpcError(grpc.StatusCode.INTERNAL, none, none, details)
    assert type(wire_errors.from_rpc(failed)) is expected
    assert wire_errors.was_cut(failed) is is_cut
