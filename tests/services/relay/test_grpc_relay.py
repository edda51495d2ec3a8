"""Clients of a relay do not notice that a gateway is lost: stubs as they are generated."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from tests.services.gateway.fakes import FakeMesh as RealGateway
from tests.tokenloom.client.fake_gateway import TEXT, FakeGateway, FakeMesh
from tokenloom.request import errors
from tokenloom.services.relay import grpc_relay as grpc_relay_module
from tokenloom.services.relay.grpc_relay import GrpcRelay
from tokenloom.services.runtime.host import limits, servicer_edge
from tokenloom.services.runtime.host.listener import bind
from tokenloom.v1 import inference_pb2 as pb
from tokenloom.v1 import inference_pb2_grpc, types_pb2
from tokenloom.v1.kserve import grpc_service_pb2 as kserve_pb2
from tokenloom.v1.kserve import grpc_service_pb2_grpc as kserve_pb2_grpc

LIMIT = 30.0
GENERATE, SESSION = "/tokenloom.v1.Inference/Generate", "/tokenloom.v1.Inference/GenerateSession"
INFER, VLLM = "/inference.GRPCInferenceService/ModelInfer", "/vllm.grpc.engine.VllmEngine/Generate"
EMBED = "/tokenloom.v1.Inference/Embed"


def channel_to(directory: Path) -> Any:
    """Return a channel to the relay."""
    return grpc.aio.insecure_channel(f"unix:{directory}/relay", [("grpc.default_authority", "localhost")])


@asynccontextmanager
async def relayed(directory: Path, *gateways: str, max_bytes: int = 1 << 26) -> AsyncIterator[tuple[Any, GrpcRelay]]:
    """A stub as a client makes it, and the relay that it is connected to."""
    address = f"unix:{directory}/relay"
    grpc_relay = GrpcRelay(gateways, max_bytes)
    server = grpc.aio.server(maximum_concurrent_rpcs=grpc_relay_module.MOST_CALLS)
    server.add_generic_rpc_handlers((grpc_relay,))
    bind(server, address, None, insecure=False)
    await server.start()
    try:
        async with channel_to(directory) as channel:
            yield inference_pb2_grpc.InferenceStub(channel), grpc_relay
    finally:
        await server.stop(None)
        await grpc_relay.close()


def text_of(responses: list[pb.GenerateResponse], index: int = 0) -> str:
    return "".join(response.text for response in responses if response.index == index)


async def test_an_answer_goes_on_at_the_next_gateway(socket_dir: Path) -> None:
    """Each token once, also of several outputs."""
    mesh = FakeMesh()
    async with (
        asyncio.timeout(LIMIT),
        FakeGateway(mesh, socket_dir / "a", stops_at=5) as first,
        FakeGateway(mesh, socket_dir / "b") as second,
        relayed(socket_dir, first.address, second.address) as (stub, grpc_relay),
    ):
        call = aiter(stub.Generate(pb.GenerateRequest(text="a", n=2), timeout=LIMIT))
        responses = [await anext(call) for _ in range(5)]
        await first.cut()
        responses += [response async for response in call]
        assert (text_of(responses), text_of(responses, 1)) == (TEXT, TEXT)
        assert mesh.calls == ["Generate request-0", "Resume request-0"]
        assert grpc_relay.num_continued == 1


async def test_an_answer_that_no_gateway_knows_any_more_ends_with_that_error(socket_dir: Path) -> None:
    mesh = FakeMesh()
    async with (
        asyncio.timeout(LIMIT),
        FakeGateway(mesh, socket_dir / "a", stops_at=5) as first,
        FakeGateway(mesh, socket_dir / "b") as second,
        relayed(socket_dir, first.address, second.address) as (stub, _),
    ):
        call = aiter(stub.Generate(pb.GenerateRequest(text="a")))
        responses = [await anext(call) for _ in range(5)]
        mesh.kept.clear()
        await first.cut()
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            [response async for response in call]
        assert (failed.value.code(), failed.value.details()) == (
            grpc.StatusCode.NOT_FOUND,
            "The request is not known.",
        )
        assert text_of(responses) == TEXT[:5]


async def test_no_address_of_the_mesh_is_shown_where_there_is_no_gateway(socket_dir: Path) -> None:
    async with asyncio.timeout(LIMIT), relayed(socket_dir, f"unix:{socket_dir}/none") as (stub, _):
        for call in (stub.Generate(pb.GenerateRequest(text="a")), stub.Resume(pb.InferenceResumeRequest())):
            code, details, _ = await _failure(call)
            assert (code, "none" in details) == (grpc.StatusCode.UNAVAILABLE, False)


async def test_a_relay_does_not_take_the_socket_of_one_that_runs(socket_dir: Path) -> None:
    async with FakeGateway(FakeMesh(), socket_dir / "a") as gateway, relayed(socket_dir, gateway.address) as (stub, _):
        with pytest.raises(errors.Unavailable, match="a process listens there"):
            async with relayed(socket_dir, gateway.address):
                pass
        assert text_of([response async for response in stub.Generate(pb.GenerateRequest(text="a"))]) == TEXT


async def test_a_client_that_leaves_ends_its_answer(socket_dir: Path) -> None:
    mesh, ended = FakeMesh(), asyncio.Event()

    class Gateway(FakeGateway):
        async def Cancel(self, request: pb.InferenceCancelRequest, context: Any) -> pb.InferenceCancelResponse:
            assert request.request_id == "request-0"
            ended.set()
            return pb.InferenceCancelResponse()

    async with (
        asyncio.timeout(LIMIT),
        Gateway(mesh, socket_dir / "a", stops_at=3) as gateway,
        relayed(socket_dir, gateway.address) as (stub, _),
    ):
        call = stub.Generate(pb.GenerateRequest(text="a"))
        await call.read()
        call.cancel()
        await ended.wait()


async def test_calls_come_through_as_they_are(socket_dir: Path) -> None:
    """Results, and errors with their details."""
    async with (
        RealGateway(socket_dir).gateway() as mesh,
        relayed(socket_dir, mesh.grpc_address) as (stub, _),
        mesh.inference() as direct,
    ):
        for each in (direct, stub):
            assert (await each.ListModels(pb.ListModelsRequest())).models
        wrong = pb.GenerateRequest(text="a", sampling_params=types_pb2.SamplingParams(temperature=-1))
        assert await _failure(stub.Generate(wrong)) == await _failure(direct.Generate(wrong))
        assert await _failure(stub.Embed(pb.EmbedRequest())) == await _failure(direct.Embed(pb.EmbedRequest()))
        async with channel_to(socket_dir) as channel:
            for _ in range(8):  # refused before its message has arrived
                code, _, _ = await _failure(channel.unary_stream("/none.Such/Method")(b""))
                assert code is grpc.StatusCode.UNIMPLEMENTED


async def test_what_a_client_sends_that_resumes_by_itself_comes_through(socket_dir: Path) -> None:
    class Gateway(FakeGateway):
        async def GenerateSession(self, requests: Any, context: Any) -> None:  # type: ignore[override]
            async for request in requests:
                await context.write(pb.GenerateResponse(text=request.text, usage=pb.Usage(prompt_tokens=1)))

    mesh = FakeMesh()
    async with (
        asyncio.timeout(LIMIT),
        Gateway(mesh, socket_dir / "a") as gateway,
        relayed(socket_dir, gateway.address) as (stub, _),
    ):
        call = stub.Generate(pb.GenerateRequest(text="a"), metadata=(("idempotency-key", "its own"),))
        assert text_of([response async for response in call]) == TEXT
        assert mesh.by_key == {"its own": "request-0"}
        session = stub.GenerateSession()
        for text in ("one", "two"):
            await session.write(pb.GenerateRequest(text=text))
            assert (await session.read()).text == text
        await session.done_writing()
        assert await session.read() is grpc.aio.EOF


async def _failure(call: Any) -> tuple[Any, ...]:
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        [response async for response in call]
    error = failed.value
    return error.code(), error.details(), dict(error.trailing_metadata() or ())


async def test_a_call_that_changes_nothing_is_made_again(socket_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_relay_module, "_WAIT_SECONDS", 0.0)

    class Gateway(FakeGateway):
        async def ListModels(self, request: pb.ListModelsRequest, context: Any) -> pb.ListModelsResponse:
            if self.lost:
                self.stopped.set()
                await asyncio.Event().wait()
            return pb.ListModelsResponse(models=[pb.Model(name="a model")])

        lost = False

    async with (
        asyncio.timeout(LIMIT),
        Gateway(FakeMesh(), socket_dir / "a") as first,
        Gateway(FakeMesh(), socket_dir / "b") as second,
        relayed(socket_dir, first.address, second.address) as (stub, grpc_relay),
    ):
        first.lost = True
        asked = asyncio.ensure_future(_models(stub))
        await first.stopped.wait()
        await first.cut()
        assert await asked == ["a model"]
        assert grpc_relay.num_continued == 1


async def _models(stub: Any) -> list[str]:
    return [model.name for model in (await stub.ListModels(pb.ListModelsRequest())).models]


async def test_a_call_that_no_gateway_was_reached_with_is_made_at_the_next_one(socket_dir: Path) -> None:
    """Also one whose client goes on sending: none of its messages is lost."""

    class Gateway(FakeGateway):
        async def GenerateSession(self, requests: Any, context: Any) -> None:  # type: ignore[override]
            async for request in requests:
                await context.write(pb.GenerateResponse(text=request.text, usage=pb.Usage(prompt_tokens=1)))

    async with (
        asyncio.timeout(LIMIT),
        Gateway(FakeMesh(), socket_dir / "b") as second,
        relayed(socket_dir, f"unix:{socket_dir}/none", second.address) as (stub, grpc_relay),
    ):
        session = stub.GenerateSession()
        for text in ("one", "two"):
            await session.write(pb.GenerateRequest(text=text))
            assert (await session.read()).text == text
        await session.done_writing()
        assert await session.read() is grpc.aio.EOF
        assert grpc_relay.num_continued == 1


async def test_a_client_that_goes_on_sending_where_one_message_is_asked_takes_no_memory(socket_dir: Path) -> None:
    class Gateway(FakeGateway):
        async def Embed(self, request: pb.EmbedRequest, context: Any) -> None:  # type: ignore[override]
            self.stopped.set()
            await asyncio.Event().wait()

    async with (
        asyncio.timeout(LIMIT),
        Gateway(FakeMesh(), socket_dir / "a") as gateway,
        relayed(socket_dir, gateway.address),
        channel_to(socket_dir) as channel,
    ):
        call = channel.stream_stream("/tokenloom.v1.Inference/Embed")()
        await call.write(b"")
        await gateway.stopped.wait()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(_write(call, 64), 1)


async def test_a_call_beyond_those_that_one_connection_carries_is_refused(
    socket_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grpc_relay_module, "MOST_CALLS", 1)
    async with (
        asyncio.timeout(LIMIT),
        FakeGateway(FakeMesh(), socket_dir / "a", stops_at=1) as gateway,
        relayed(socket_dir, gateway.address) as (stub, _),
    ):
        first = stub.Generate(pb.GenerateRequest(text="a"))
        assert (await first.read()).text == TEXT[0]
        code, _, _ = await _failure(stub.Generate(pb.GenerateRequest(text="a")))
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        first.cancel()


async def _write(call: Any, num_mebibytes: int) -> None:
    for _ in range(num_mebibytes):
        await call.write(bytes(1 << 20))


async def test_a_sound_is_heard_again_where_its_gateway_is_lost_before_a_text(socket_dir: Path) -> None:
    """Whatever of it has arrived; the rest comes from the client. Without room for it the call ends."""

    class Gateway(FakeGateway):
        async def Transcribe(self, requests: Any, context: Any) -> None:  # type: ignore[override]
            heard = b""
            async for request in requests:
                heard += request.data
                if len(heard) == self.lost_after:
                    self.stopped.set()
                    await asyncio.Event().wait()
            await context.write(pb.TranscribeResponse(text=heard.decode()))

        lost_after = 0

    for size, is_kept in ((4, True), (100, False)):
        directory = socket_dir / str(size)
        directory.mkdir()
        async with (
            asyncio.timeout(LIMIT),
            Gateway(FakeMesh(), directory / "a") as first,
            Gateway(FakeMesh(), directory / "b") as second,
            relayed(directory, first.address, second.address, max_bytes=64) as (stub, grpc_relay),
        ):
            first.lost_after = 1 + size  # type: ignore[attr-defined]
            call = stub.Transcribe()
            for part in (b"a", b"b" * size):
                await call.write(pb.TranscribeRequest(data=part))
            await first.stopped.wait()
            await first.cut()
            with contextlib.suppress(asyncio.InvalidStateError):  # it has ended where the sound is not kept
                await call.write(pb.TranscribeRequest(data=b"c"))
                await call.done_writing()
            if is_kept:
                assert (await call.read()).text == "abbbbc"
            else:
                with pytest.raises(grpc.aio.AioRpcError, match="The connection to the gateway was lost"):
                    await call.read()
            assert (grpc_relay.num_continued, grpc_relay._room.taken) == (int(is_kept), 0)


class SessionGateway(FakeGateway):
    """Answers each turn by its text. ``holds``: the text of turns that are never answered to their end."""

    def __init__(self, path: Path, *, holds: str = "") -> None:
        super().__init__(FakeMesh(), path)
        self.turns: list[tuple[str, bool]] = []
        """The text of each turn, and whether it was one that goes on."""
        self._holds = holds

    async def GenerateSession(self, requests: Any, context: Any) -> None:  # type: ignore[override]
        async for request in requests:
            self.turns.append((request.text, request.HasField("continued_turn")))
            request_id = f"{self.address} {len(self.turns)}"
            await context.write(pb.GenerateResponse(request_id=request_id, text=request.text))
            if request.text == self._holds:
                await asyncio.Event().wait()
            await context.write(pb.GenerateResponse(request_id=request_id, usage=pb.Usage(prompt_tokens=1)))


async def _say(session: Any, text: str, **fields: Any) -> None:
    await session.write(pb.GenerateRequest(text=text, **fields))
    await _hear(session)


async def _hear(session: Any) -> None:
    while not (await session.read()).HasField("usage"):
        pass


async def test_turns_that_lose_a_gateway_together_go_on_at_the_next_one(
    socket_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each leaves the one that it has lost, not the one to which the other has gone."""
    monkeypatch.setattr(grpc_relay_module, "_WAIT_SECONDS", 0.0)
    async with (
        asyncio.timeout(LIMIT),
        SessionGateway(socket_dir / "a", holds="a turn") as first,
        SessionGateway(socket_dir / "b") as second,
        relayed(socket_dir, first.address, second.address) as (stub, grpc_relay),
    ):
        sessions = [stub.GenerateSession() for _ in range(2)]
        for session in sessions:
            await session.write(pb.GenerateRequest(text="a turn"))
            await session.read()
        await first.cut()
        await asyncio.gather(*map(_hear, sessions))
        assert grpc_relay.num_continued == 2


async def test_a_session_keeps_what_was_said_where_its_gateway_is_lost_between_turns(socket_dir: Path) -> None:
    """Another call has found the next gateway meanwhile. A client that resumes by itself learns of the loss."""
    async with (
        asyncio.timeout(LIMIT),
        SessionGateway(socket_dir / "a") as first,
        SessionGateway(socket_dir / "b") as second,
        relayed(socket_dir, first.address, second.address) as (stub, _),
    ):
        session, own = stub.GenerateSession(), stub.GenerateSession()
        await _say(session, "one")
        await _say(own, "its own", resumable=True)
        await first.cut()
        await _say(stub.GenerateSession(), "another")
        second.turns.clear()
        await _say(session, "two")
        assert second.turns == [("one", True), ("two", False)]
        with pytest.raises(grpc.aio.AioRpcError, match="The connection to the gateway was lost; retry"):
            await _say(own, "more", resumable=True)
        assert len(second.turns) == 2


async def test_what_a_gateway_has_refused_is_not_cancelled_as_well(socket_dir: Path) -> None:
    cancelled = []

    class Gateway(FakeGateway, kserve_pb2_grpc.GRPCInferenceServiceServicer):
        async def ModelInfer(self, request: Any, context: Any) -> None:  # type: ignore[override]
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "not now")

        async def Cancel(self, request: pb.InferenceCancelRequest, context: Any) -> pb.InferenceCancelResponse:
            cancelled.append(request)
            return pb.InferenceCancelResponse()

    gateway = Gateway(FakeMesh(), socket_dir / "a")
    kserve_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(gateway, gateway._server)
    async with asyncio.timeout(LIMIT), gateway, relayed(socket_dir, gateway.address) as (stub, _):
        async with channel_to(socket_dir) as channel:
            asked = kserve_pb2_grpc.GRPCInferenceServiceStub(channel)
            with pytest.raises(grpc.aio.AioRpcError, match="not now"):
                await asked.ModelInfer(kserve_pb2.ModelInferRequest())
        await stub.Cancel(pb.InferenceCancelRequest(request_id="the last one"))
        assert [request.request_id for request in cancelled] == ["the last one"]


@pytest.mark.parametrize("method", [GENERATE, SESSION, INFER, VLLM, EMBED])
async def test_a_client_that_says_nothing_does_not_keep_a_call(
    socket_dir: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """A gateway, which would bound that, learns of the call with its first message."""
    monkeypatch.setattr(servicer_edge, "MESSAGE_SECONDS", 0.01)
    async with (
        asyncio.timeout(LIMIT),
        FakeGateway(FakeMesh(), socket_dir / "a") as gateway,
        relayed(socket_dir, gateway.address),
        channel_to(socket_dir) as channel,
    ):
        code, _, _ = await _failure(channel.stream_stream(method)())
        assert code is grpc.StatusCode.DEADLINE_EXCEEDED


@pytest.mark.parametrize("method", [GENERATE, SESSION, INFER, VLLM, EMBED])
async def test_messages_that_are_not_answered_are_bounded(socket_dir: Path, method: str) -> None:
    request = pb.GenerateRequest(text="a" * 40).SerializeToString()
    async with (
        asyncio.timeout(LIMIT),
        FakeGateway(FakeMesh(), socket_dir / "a", stops_at=1) as gateway,
        relayed(socket_dir, gateway.address, max_bytes=64) as (stub, grpc_relay),
        channel_to(socket_dir) as channel,
    ):
        first = stub.Generate(pb.GenerateRequest(text="a" * 40))
        await first.read()
        call = channel.stream_stream(method)()
        await call.write(request)
        code, details, _ = await _failure(call)
        assert (code, "retry" in details) == (grpc.StatusCode.RESOURCE_EXHAUSTED, True)
        first.cancel()
        while grpc_relay.num_open:  # noqa: ASYNC110
            await asyncio.sleep(0)
        assert not grpc_relay._room.taken


@pytest.mark.parametrize("method", [GENERATE, SESSION, INFER])
async def test_messages_that_would_take_much_memory_are_refused(socket_dir: Path, method: str) -> None:
    """As by a gateway: 8 MiB of empty elements take up to 350 MiB once they are decoded."""
    empty = pb.GenerateRequest(sampling_params=types_pb2.SamplingParams()).SerializeToString()
    field = kserve_pb2.ModelInferRequest(raw_input_contents=[b""]).SerializeToString() if method == INFER else empty
    async with (
        asyncio.timeout(LIMIT),
        FakeGateway(FakeMesh(), socket_dir / "a") as gateway,
        relayed(socket_dir, gateway.address),
        channel_to(socket_dir) as channel,
    ):
        call = channel.stream_stream(method)()
        await call.write(field * limits.LARGE_BYTES)
        code, details, _ = await _failure(call)
        assert (code, "split the request" in details) == (grpc.StatusCode.INVALID_ARGUMENT, True)


async def test_calls_that_watch_the_health_leave_room_for_others(
    socket_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grpc_relay_module, "MOST_CALLS", 4)
    begun = asyncio.Event()

    async def watch(request: bytes, context: Any) -> None:
        await context.write(b"")
        begun.set()
        await asyncio.Event().wait()

    handlers: dict[str, Any] = {"Watch": grpc.unary_stream_rpc_method_handler(watch)}
    gateway = FakeGateway(FakeMesh(), socket_dir / "a")
    gateway._server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("grpc.health.v1.Health", handlers)])
    async with asyncio.timeout(LIMIT), gateway, relayed(socket_dir, gateway.address), channel_to(socket_dir) as channel:
        first = channel.unary_stream(servicer_edge.WATCH)(b"")
        await begun.wait()
        code, details, _ = await _failure(channel.unary_stream(servicer_edge.WATCH)(b""))
        assert (code, details) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "1 calls watch the health already; use Check")
        first.cancel()
