"""The error table: through protos, gRPC statuses and OpenAI bodies, and back."""

import json
import logging

import grpc
import grpc.aio
import pytest
from google.rpc import error_details_pb2

from tokenloom.request import errors, wire_errors
from tokenloom.v1 import types_pb2


def tree(cls: type[errors.TokenloomError] = errors.TokenloomError) -> list[type[errors.TokenloomError]]:
    return [cls, *(leaf for child in cls.__subclasses__() for leaf in tree(child))]


# What an edge adds for itself (HTTP's 405 and 415) never travels.
ALL = [cls for cls in tree()[1:] if cls.__module__ == errors.__name__]


def rpc_error(
    code: grpc.StatusCode, details: str = "", metadata: tuple[tuple[str, bytes], ...] = ()
) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(*metadata), details)


def as_rpc(error: errors.TokenloomError) -> grpc.aio.AioRpcError:
    metadata = (("grpc-status-details-bin", wire_errors.to_status(error).SerializeToString()),)
    return rpc_error(wire_errors.status_of(error), error.message, metadata)


def test_reasons_are_unique() -> None:
    reasons = [cls.reason for cls in ALL]
    assert len(set(reasons)) == len(reasons)


@pytest.mark.parametrize("cls", ALL)
def test_every_class_survives_both_ways(cls: type[errors.TokenloomError]) -> None:
    error = cls("what was wrong", field="temperature")
    error.retry_after = 1.5
    for back in (wire_errors.from_proto(wire_errors.to_proto(error)), wire_errors.from_rpc(as_rpc(error))):
        assert type(back) is cls
        retry_after = None if cls.is_final else 1.5
        assert (back.message, back.field, back.retry_after) == ("what was wrong", "temperature", retry_after)


FINAL = {
    "InvalidArgument": True,
    "PayloadTooLarge": True,
    "BodyChanged": True,
    "ContextLengthExceeded": True,
    "Unauthenticated": True,
    "PermissionDenied": True,
    "NotFound": True,
    "ModelNotFound": True,
    "RequestLost": True,
    "QueryLost": True,
    "MediaLost": False,  # the caller sends the image again
    "FailedPrecondition": True,
    "Aborted": False,  # the call that has taken the answer over may be an earlier one of the same client
    "Unimplemented": True,
    "EngineLacks": True,
    "Cancelled": True,
    "ResourceExhausted": False,
    "RateLimitExceeded": False,
    "Unavailable": False,
    "TryElsewhere": False,
    "WeightsReplaced": False,
    "EngineDied": False,
    "GatewayLeaving": False,
    "DeadlineExceeded": True,
    "Internal": False,
    "EngineKiller": True,
    "OutputProcessorKiller": True,
}
"""By class, whether a client must not send the same request again."""


def test_every_class_says_whether_it_may_be_retried() -> None:
    assert {cls.__name__: cls.is_final for cls in ALL} == FINAL


@pytest.mark.parametrize("cls", ALL)
def test_only_what_may_be_retried_has_retry_info(cls: type[errors.TokenloomError]) -> None:
    error = cls("what was wrong")
    error.retry_after = 1.5
    details = [detail.TypeName().rpartition(".")[2] for detail in wire_errors.to_status(error).details]
    assert ("RetryInfo" in details) is not FINAL[cls.__name__]


@pytest.mark.parametrize(
    ("cls", "http", "code"),
    [
        (errors.InvalidArgument, 400, "INVALID_ARGUMENT"),
        (errors.ModelNotFound, 404, "NOT_FOUND"),
        (errors.PayloadTooLarge, 413, "INVALID_ARGUMENT"),
        (errors.Unauthenticated, 401, "UNAUTHENTICATED"),
        (errors.PermissionDenied, 403, "PERMISSION_DENIED"),
        (errors.ResourceExhausted, 503, "RESOURCE_EXHAUSTED"),
        (errors.RateLimitExceeded, 429, "RESOURCE_EXHAUSTED"),
        (errors.FailedPrecondition, 400, "FAILED_PRECONDITION"),
        (errors.DeadlineExceeded, 504, "DEADLINE_EXCEEDED"),
        (errors.Cancelled, 499, "CANCELLED"),
        (errors.Unavailable, 503, "UNAVAILABLE"),
        (errors.Unimplemented, 400, "UNIMPLEMENTED"),
        (errors.Internal, 500, "INTERNAL"),
    ],
)
def test_table(cls: type[errors.TokenloomError], http: int, code: str) -> None:
    assert cls.http_status == http
    assert cls.code.name == code


def test_what_is_temporary_says_when_to_come_again() -> None:
    assert errors.Unavailable("gone").retry_after == 1.0
    assert errors.ResourceExhausted("full").retry_after == 1.0
    assert errors.InvalidArgument("bad").retry_after is None
    assert not wire_errors.to_proto(errors.InvalidArgument("bad")).HasField("retry_after")


def test_unknown_reasons_and_codes_become_the_nearest_class() -> None:
    unavailable = grpc.StatusCode.UNAVAILABLE.value[0]
    assert type(wire_errors.from_proto(types_pb2.Error(code=unavailable, reason="NEW"))) is errors.Unavailable
    not_found = grpc.StatusCode.NOT_FOUND.value[0]
    assert type(wire_errors.from_proto(types_pb2.Error(code=not_found))) is errors.NotFound
    invalid = grpc.StatusCode.INVALID_ARGUMENT.value[0]
    assert type(wire_errors.from_proto(types_pb2.Error(code=invalid))) is errors.InvalidArgument
    assert type(wire_errors.from_proto(types_pb2.Error(code=999))) is errors.Internal


def test_the_transports_text_reaches_nobody() -> None:
    secret = "failed to connect to ipv4:10.0.0.3:5000: unix:/run/x"
    error = wire_errors.from_rpc(rpc_error(grpc.StatusCode.UNAVAILABLE, secret))
    assert type(error) is errors.Unavailable
    assert error.retry_after == 1.0
    assert "10.0.0.3" not in error.message
    assert "/run" not in error.message
    assert type(wire_errors.from_rpc(rpc_error(grpc.StatusCode.DATA_LOSS, secret))) is errors.Internal


def test_unexpected_exceptions_are_logged_and_hidden(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        proto = wire_errors.to_proto(ValueError("/etc/passwd"))
    assert (proto.message, proto.reason) == ("internal error", "INTERNAL")
    assert caplog.records[0].exc_info is not None


def test_openai_body() -> None:
    body = wire_errors.openai_body(errors.InvalidArgument("top_p must be a number", "top_p"))
    expected = {"message": "top_p must be a number", "type": "invalid_request_error", "param": "top_p"}
    assert json.loads(json.dumps(body)) == {"error": {**expected, "code": "invalid_argument"}}
    assert wire_errors.openai_body(errors.ModelNotFound("no"))["error"]["code"] == "model_not_found"


def test_a_tenants_limit_travels_by_name() -> None:
    error = errors.RateLimitExceeded("2 sessions are open", limit="sessions", retry_after=3)
    body = wire_errors.openai_body(error)["error"]
    assert (body["type"], body["code"], body["limit"]) == ("rate_limit_error", "rate_limit_exceeded", "sessions")
    back = wire_errors.from_rpc(as_rpc(error))
    assert isinstance(back, errors.RateLimitExceeded)
    assert (back.limit, back.retry_after) == ("sessions", 3)
    quota = error_details_pb2.QuotaFailure()
    assert any(detail.Unpack(quota) for detail in wire_errors.to_status(error).details)
    assert quota.violations[0].subject == "sessions"
