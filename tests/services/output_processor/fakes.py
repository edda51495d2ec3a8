"""Fakes of a coordinator and an engine that tests control, and the gateway's side of a stream."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, Self

import grpc
import grpc.aio

from tokenloom.request import errors, wire_errors
from tokenloom.services.runtime.host.listener import SERVER_OPTIONS
from tokenloom.services.runtime.local_streams.socket_end import status
from tokenloom.services.runtime.peers.hello import QUARANTINE, make_hello
from tokenloom.v1.coordinator_pb2 import (
    EngineEntry,
    EngineIdentity,
    EngineReport,
    EngineState,
    EnrollRequest,
    PickBatch,
    PickRequest,
    PickResponse,
    PickResult,
    PickResults,
    Position,
    Snapshot,
    WatchRequest,
)
from tokenloom.v1.coordinator_pb2_grpc import CoordinatorServicer, add_CoordinatorServicer_to_server
from tokenloom.v1.engine_pb2 import (
    AddRequest,
    EngineFrame,
    EngineInput,
    Finished,
    KVGrant,
    KVSource,
    PickId,
    SessionTurn,
    SlotLogprobs,
)
from tokenloom.v1.engine_pb2_grpc import EngineServicer, add_EngineServicer_to_server
from tokenloom.v1.output_processor_pb2 import ProcessFrame, ProcessInput, RequestFinished, Submit, TextOptions
from tokenloom.v1.output_processor_pb2_grpc import OutputProcessorStub
from tokenloom.v1.types_pb2 import EngineRole, FinishReason, ModelLimits, Prompt, SamplingParams

VOCAB_SIZE = 2048
LIMITS = ModelLimits(max_model_len=1024, vocab_size=VOCAB_SIZE)
STOP, LENGTH = FinishReason.FINISH_REASON_STOP, FinishReason.FINISH_REASON_LENGTH
SOON = 30.0  # bound of every wait: a hang is a failure


class EngineStream:
    """One stream as the fake engine sees it."""

    def __init__(self, engine: "FakeEngine") -> None:
        self.engine = engine
        self.inputs: asyncio.Queue[EngineInput] = asyncio.Queue()
        self.frames: asyncio.Queue[EngineFrame | grpc.aio.AioRpcError | None] = asyncio.Queue()
        self.ended = asyncio.Event()
        self.step = 0

    async def next_input(self) -> EngineInput:
        """The next message that holds more than credit."""
        while True:
            message = await asyncio.wait_for(self.inputs.get(), SOON)
            if message.add or message.accept or message.stop_at or message.abort_slots:
                return message

    async def next_adds(self, count: int) -> list[AddRequest]:
        adds: list[AddRequest] = []
        while len(adds) < count:
            adds += (await self.next_input()).add
        assert len(adds) == count
        return adds

    def send(
        self,
        *rows: tuple[int, int, Sequence[int]],
        finished: Sequence[Finished] = (),
        granted: Sequence[KVGrant] = (),
        logprobs: Sequence[SlotLogprobs] = (),
    ) -> None:
        """A step's frame; rows are (slot, token_index, token_ids)."""
        self.step += 1
        self.frames.put_nowait(
            EngineFrame(
                step=self.step,
                slot=[slot for slot, _, _ in rows],
                token_index=[index for _, index, _ in rows],
                num_tokens=[len(ids) for _, _, ids in rows],
                token_ids=[i for _, _, ids in rows for i in ids],
                finished=finished,
                kv_granted=granted,
                logprobs=logprobs,
            )
        )

    def prefilled(self, slot: int, token_index: int, token_ids: Sequence[int], **fields: Any) -> KVSource:
        """The frame that ends a prefill leg."""
        fields = {"num_output_tokens": token_index + len(token_ids), "kv": kv_source(slot)} | fields
        end = Finished(slot=slot, reason=FinishReason.FINISH_REASON_PREFILLED, **fields)
        self.send((slot, token_index, token_ids), finished=[end])
        return end.kv

    def grant(self, slot: int) -> KVSource:
        """The frame of a prefill's first step, when it takes more."""
        self.send(granted=[KVGrant(slot=slot, kv=kv_source(slot))])
        return kv_source(slot)

    def die(self) -> None:
        """The stream ends with its engine, which answers no more."""
        self.engine.is_gone = True
        self.frames.put_nowait(None)

    def lose(self, details: str) -> None:
        """The transport gives the connection up, for this reason; the engine runs on."""
        self.frames.put_nowait(status(grpc.StatusCode.UNAVAILABLE, details))


def kv_source(slot: int) -> KVSource:
    return KVSource(engine_id="engine-0", engine_epoch=11, lease_id=bytes([slot]) * 16, num_tokens=3)


class FakeEngine(EngineServicer):
    """Greets, then sends what the test puts into a stream's ``frames``; None ends the stream, an error loses it."""

    def __init__(self, identity: EngineIdentity) -> None:
        self.identity = identity
        self.is_gone = False
        self.can_be_quarantined = True
        self.streams: asyncio.Queue[EngineStream] = asyncio.Queue()

    async def next_stream(self) -> EngineStream:
        return await asyncio.wait_for(self.streams.get(), SOON)

    async def Connect(  # type: ignore[override]
        self, request_iterator: AsyncIterator[EngineInput], context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[EngineFrame]:
        if self.is_gone:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "nobody is there")
        stream = EngineStream(self)
        inputs = aiter(request_iterator)
        hello = (await anext(inputs)).hello
        assert hello.expected_peer_id == self.identity.engine_id
        assert hello.initial_credit > 0
        identity = self.identity
        features = (QUARANTINE,) if self.can_be_quarantined else ()
        hello = make_hello(identity.engine_id, identity.epoch, fingerprint=identity.fingerprint, features=features)
        # Before the greeting: a client may end the stream as soon as it has that.
        self.streams.put_nowait(stream)
        reader = asyncio.create_task(self._read(inputs, stream))
        try:
            yield EngineFrame(hello=hello)
            while (frame := await stream.frames.get()) is not None:
                if isinstance(frame, grpc.aio.AioRpcError):
                    await context.abort(frame.code(), frame.details() or "")
                yield frame
        finally:
            reader.cancel()
            stream.ended.set()

    async def _read(self, inputs: AsyncIterator[EngineInput], stream: EngineStream) -> None:
        async for message in inputs:
            stream.inputs.put_nowait(message)


class FakeCoordinator(CoordinatorServicer):
    """Picks the first engine of the leg's role that is not excluded, or of any; or fails with ``error``."""

    def __init__(self, engines: Sequence[EngineIdentity], roles: Sequence[EngineRole]) -> None:
        self.engines = list(engines)
        self.roles = list(roles)
        self.error: errors.TokenloomError | None = None
        self.requests: list[PickRequest] = []
        self.batch_sizes: list[int] = []
        self._arrived: asyncio.Queue[PickRequest] = asyncio.Queue()
        self.watched = asyncio.Event()
        self._changed = asyncio.Event()
        self.running = self.waiting = 0  # as every engine reports
        self.position = Position(index=0, count=1)  # of every output processor
        self.hold = asyncio.Event()  # picks wait until it is set
        self.hold.set()

    async def next_pick(self) -> PickRequest:
        """The next that arrived, from the first on."""
        return await asyncio.wait_for(self._arrived.get(), SOON)

    async def Pick(self, request: PickRequest, context: grpc.aio.ServicerContext[Any, Any]) -> PickResponse:  # type: ignore[override]
        try:
            return await self._pick(request)
        except errors.TokenloomError as error:
            await wire_errors.abort(context, error)

    async def PickStream(  # type: ignore[override]
        self, requests: AsyncIterator[PickBatch], context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[PickResults]:
        yield PickResults()
        async for batch in requests:
            self.batch_sizes.append(len(batch.pick))
            if not batch.pick:
                await self.hold.wait()
                yield PickResults()
            for request in batch.pick:
                try:
                    result = PickResult(response=await self._pick(request))
                except errors.TokenloomError as error:
                    result = PickResult(error=wire_errors.to_proto(error))
                yield PickResults(result=[result])

    async def _pick(self, request: PickRequest) -> PickResponse:
        self.requests.append(request)
        self._arrived.put_nowait(request)
        error = self.error
        await self.hold.wait()
        if error is not None:
            raise error
        excluded = {(each.engine_id, each.epoch) for each in request.exclude}
        engines = zip(self.engines, self.roles, strict=True)
        able = [each for each in engines if (each[0].engine_id, each[0].epoch) not in excluded]
        if not able:
            raise errors.Unavailable("No engine is serving this model now; retry.")
        engine, role = next((each for each in able if each[1] == request.role), able[0])
        pick = PickId(coordinator_epoch=7, number=len(self.requests))
        whole = request.role != EngineRole.ENGINE_ROLE_DECODE and role != EngineRole.ENGINE_ROLE_PREFILL
        session = SessionTurn(branch=request.session, keep_seconds=request.keep_seconds) if request.session else None
        return PickResponse(engine=engine, whole_request=whole, pick=pick, session=session)

    async def Enroll(  # type: ignore[override]
        self, request: EnrollRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[Position]:
        assert (request.service, bool(request.instance_id)) == ("output_processor", True)
        yield self.position
        await asyncio.Event().wait()

    def publish(self) -> None:
        """Send a snapshot of the engines to every watcher."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def published(self) -> None:
        """Wait until every watcher has the last snapshot."""
        self.watched.clear()
        await asyncio.wait_for(self.watched.wait(), SOON)

    async def Watch(  # type: ignore[override]
        self, request: WatchRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[Snapshot]:
        while True:
            changed = self._changed
            engines = zip(self.engines, self.roles, strict=False)
            entries = [entry(each, self.waiting, role=role, running=self.running) for each, role in engines]
            yield Snapshot(coordinator_epoch=7, revision=1, complete=True, engines=entries)
            self.watched.set()
            await changed.wait()


def entry(
    identity: EngineIdentity,
    waiting: int = 0,
    state: EngineState = EngineState.ENGINE_STATE_SERVING,
    role: EngineRole = EngineRole.ENGINE_ROLE_BOTH,
    running: int = 0,
) -> EngineEntry:
    report = EngineReport(role=role, state=state, running=running)
    return EngineEntry(identity=identity, report=report, score=4 * waiting + running, waiting=waiting)


class Served:
    """A servicer on a unix socket; leaving kills it at once."""

    def __init__(self, path: Path, add: Any, servicer: Any) -> None:
        self._server = grpc.aio.server(options=SERVER_OPTIONS)
        add(servicer, self._server)
        self._server.add_insecure_port(f"unix:{path}")

    async def __aenter__(self) -> Self:
        await self._server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.kill()

    async def kill(self) -> None:
        await self._server.stop(None)


def serve_engine(engine: FakeEngine) -> Served:
    path = Path(engine.identity.address.removeprefix("unix:"))
    return Served(path, add_EngineServicer_to_server, engine)


def serve_coordinator(path: Path, coordinator: FakeCoordinator) -> Served:
    return Served(path, add_CoordinatorServicer_to_server, coordinator)


class Gateway:
    """The gateway's side of one ``Process`` stream."""

    def __init__(self, channel: grpc.aio.Channel, credit: int = 1000, peer_id: str = "gateway-0") -> None:
        self.call = OutputProcessorStub(channel).Process()
        self._hello = make_hello(peer_id, 5, initial_credit=credit)

    async def greet(self) -> ProcessFrame:
        await self.call.write(ProcessInput(hello=self._hello))
        return await self.read()

    async def send(self, **fields: Any) -> None:
        await self.call.write(ProcessInput(**fields))

    async def read(self) -> ProcessFrame:
        frame = await asyncio.wait_for(self.call.read(), SOON)
        assert isinstance(frame, ProcessFrame)
        return frame

    async def next_frame(self) -> ProcessFrame:
        """The next frame that is no heartbeat."""
        while (frame := await self.read()) == ProcessFrame():
            pass
        return frame

    async def until_finished(self, slot: int) -> tuple[str, list[int], RequestFinished]:
        """Text, tokens and end of a slot, where no other slot has output."""
        text, ids = "", list[int]()
        while True:
            frame = await self.next_frame()
            for at, part in zip(frame.slot, frame.text, strict=True):
                assert at == slot
                text += part
            ids += frame.token_ids
            for finished in frame.finished:
                assert finished.slot == slot
                return text, ids, finished

    def close(self) -> None:
        self.call.cancel()


def submit(slot: int, prompt: Sequence[int] = (5, 6, 7), **fields: Any) -> Submit:
    """A request; keywords of SamplingParams and TextOptions go where they belong."""
    params = {name: fields.pop(name) for name in list(fields) if name in SamplingParams.DESCRIPTOR.fields_by_name}
    text = {name: fields.pop(name) for name in list(fields) if name in TextOptions.DESCRIPTOR.fields_by_name}
    return Submit(
        slot=slot,
        request_id=f"request-{slot}",
        prompt=Prompt(token_ids=prompt),
        sampling_params=SamplingParams(**({"max_tokens": 100, "seed": 1} | params)),
        text=TextOptions(**text),
        **fields,
    )
