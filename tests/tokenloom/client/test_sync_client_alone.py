"""The blocking client's retries, deadlines, resumption and errors, on grpcio-testing's channel and clock."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import grpc
import grpc_testing
import pytest

from tokenloom.client import Client, errors, sync_client
from tokenloom.client.answer_course import IDEMPOTENCY_KEY
from tokenloom.request import wire_errors
from tokenloom.v1 import inference_pb2, types_pb2

_SERVICE = inference_pb2.DESCRIPTOR.services_by_name["Inference"]
_NOBODY = "failed to connect to all addresses; last error: UNKNOWN: ipv4:10.0.0.1:9000: Connection refused ()"


class World:
    """A client of two gateways whose calls the test answers, and a clock that only the client's waiting moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock = grpc_testing.strict_fake_time(1000.0)
        self.gateways: dict[str, Any] = {}
        self.waits: list[float] = []
        monkeypatch.setattr(sync_client, "open_channel", self._open)
        monkeypatch.setattr(sync_client, "sleep", self._sleep)
        monkeypatch.setattr(sync_client, "time", SimpleNamespace(monotonic=self.clock.time))
        self.client = Client("one:9000,two:9000", api_key="key", timeout=60)
        self._threads = ThreadPoolExecutor(1)

    def call(self, method: Callable[..., Any], *arguments: Any, **options: Any) -> Future[Any]:
        """Call the client in a thread, which waits for this test's answers."""
        return self._threads.submit(method, *arguments, **options)

    def take(self, gateway: str, method: str) -> tuple[dict[str, str], Any, Any]:
        """Return metadata, request and handle of the next call that a gateway gets."""
        channel = self.gateways[gateway]
        take = channel.take_unary_stream if method in ("Generate", "Resume") else channel.take_unary_unary
        metadata, request, rpc = take(_SERVICE.methods_by_name[method])
        return dict(metadata), request, rpc

    def close(self) -> None:
        self._threads.shutdown()
        self.client.close()

    def _open(self, address: str, _: object) -> Any:
        self.gateways[address] = grpc_testing.channel([_SERVICE], self.clock)
        return self.gateways[address]

    def _sleep(self, seconds: float) -> None:
        self.waits.append(seconds)
        self.clock.sleep_for(seconds)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    world = World(monkeypatch)
    yield world
    world.close()


def part(text: str, *, at: int = 0, ends: bool = False) -> inference_pb2.GenerateResponse:
    reason = types_pb2.FINISH_REASON_STOP if ends else types_pb2.FINISH_REASON_UNSPECIFIED
    return inference_pb2.GenerateResponse(
        request_id="r1",
        text=text,
        token_ids=list(text.encode()),
        token_index=at,
        text_length=at + len(text),
        finish_reason=reason,
    )


def fail(rpc: Any, error: errors.TokenloomError) -> None:
    """End a call as a gateway does."""
    details = wire_errors.to_status(error).SerializeToString()
    _end(rpc, wire_errors.status_of(error), error.message, (("grpc-status-details-bin", details),))


def cut(rpc: Any, details: str = "Socket closed") -> None:
    """End a call as a lost connection does."""
    _end(rpc, grpc.StatusCode.UNAVAILABLE, details)


def _end(rpc: Any, code: grpc.StatusCode, details: str, metadata: tuple[tuple[str, bytes], ...] = ()) -> None:
    response = (None,) if isinstance(rpc, grpc_testing.UnaryUnaryChannelRpc) else ()
    rpc.terminate(*response, metadata, code, details)


def answer(rpc: Any, *parts: inference_pb2.GenerateResponse) -> None:
    for each in parts:
        rpc.send_response(each)
    rpc.terminate((), grpc.StatusCode.OK, "")


def test_a_full_mesh_is_asked_again_when_it_said_at_the_next_gateway(world: World) -> None:
    answering = world.call(world.client.generate, "abc")
    metadata, request, rpc = world.take("one:9000", "Generate")
    assert (metadata["authorization"], request.text) == ("Bearer key", "abc")
    fail(rpc, errors.ResourceExhausted("full", retry_after=3.0))
    again, _, rpc = world.take("two:9000", "Generate")
    answer(rpc, part("Hi", ends=True))
    assert answering.result(30).text == "Hi"
    (wait,) = world.waits
    assert 3.0 <= wait <= 3.6
    assert again[IDEMPOTENCY_KEY] != metadata[IDEMPOTENCY_KEY], "the mesh has ended the first request"


def test_no_try_that_would_begin_after_the_deadline(world: World) -> None:
    answering = world.call(world.client.generate, "abc", timeout=5.0)
    for gateway in ("one:9000", "two:9000"):
        fail(world.take(gateway, "Generate")[2], errors.ResourceExhausted("full", retry_after=2.0))
    error = answering.exception(30)
    assert isinstance(error, errors.ResourceExhausted)
    assert len(world.waits) == 1, "the second wait, twice as long, would pass the fifth second"


def test_a_refusal_is_final_and_keeps_its_field(world: World) -> None:
    answering = world.call(world.client.generate, "abc")
    fail(world.take("one:9000", "Generate")[2], errors.InvalidArgument("top_p must be at most 1", field="top_p"))
    error = answering.exception(30)
    assert isinstance(error, errors.InvalidArgument)
    assert (error.field, error.message, world.waits) == ("top_p", "top_p must be at most 1", [])


def test_a_cut_answer_is_resumed_where_it_broke_off(world: World) -> None:
    opening = world.call(world.client.stream, "abc")
    _, _, rpc = world.take("one:9000", "Generate")
    rpc.send_response(part("Hi"))
    stream = opening.result(30)
    assert next(stream).text == "Hi"
    reading = world.call(next, stream)
    cut(rpc)
    _, resume, rpc = world.take("two:9000", "Resume")
    assert (resume.request_id, resume.positions[0].num_tokens, resume.positions[0].text_length) == ("r1", 2, 2)
    answer(rpc, part("!", at=2, ends=True))
    assert reading.result(30).text == "!"
    assert world.waits == [0.0], "the request runs on: the first resumption costs nothing"


def test_a_call_that_brought_nothing_is_repeated_with_its_key(world: World) -> None:
    answering = world.call(world.client.generate, "abc")
    first, _, rpc = world.take("one:9000", "Generate")
    cut(rpc)
    second, _, rpc = world.take("two:9000", "Generate")
    answer(rpc, part("Hi", ends=True))
    assert answering.result(30).text == "Hi"
    assert second[IDEMPOTENCY_KEY] == first[IDEMPOTENCY_KEY]


@pytest.mark.parametrize("method", ["generate", "models"])
def test_addresses_at_which_no_gateway_ever_answered_are_tried_once(world: World, method: str) -> None:
    answering = world.call(getattr(world.client, method), *["abc"] * (method == "generate"))
    for gateway in ("one:9000", "two:9000"):
        cut(world.take(gateway, "Generate" if method == "generate" else "ListModels")[2], _NOBODY)
    error = answering.exception(30)
    assert isinstance(error, errors.Unavailable)
    assert error.message == (
        "cannot connect to one:9000: ipv4:10.0.0.1:9000: Connection refused; "
        "cannot connect to two:9000: ipv4:10.0.0.1:9000: Connection refused"
    )
    assert not any(world.waits)


def test_a_gateway_that_has_answered_is_waited_for(world: World) -> None:
    models = world.call(world.client.models)
    rpc = world.take("one:9000", "ListModels")[2]
    rpc.terminate(inference_pb2.ListModelsResponse(), (), grpc.StatusCode.OK, "")
    assert models.result(30) == []
    models = world.call(world.client.models)
    for gateway in ("one:9000", "two:9000", "one:9000", "two:9000", "one:9000"):
        cut(world.take(gateway, "ListModels")[2], _NOBODY)
    error = models.exception(30)
    assert isinstance(error, errors.Unavailable)
    assert error.message == "cannot connect to one:9000: ipv4:10.0.0.1:9000: Connection refused"
    assert len(world.waits) == 4


def test_status_of_a_proxy_that_answers_for_a_gateway_is_no_connection(world: World) -> None:
    """A status without our details is the transport's, whatever sent it."""
    models = world.call(world.client.models, timeout=0.5)
    cut(world.take("one:9000", "ListModels")[2], "upstream connect error")
    error = models.exception(30)
    assert isinstance(error, errors.Unavailable)
    assert error.message == "the connection to one:9000 was lost: upstream connect error"
