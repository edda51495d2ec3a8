"""Output processors as a gateway sees them, which compute a token now and then, and whose streams may be cut."""

import asyncio
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio

from tokenloom.request import errors, wire_errors
from tokenloom.services.output_processor.request.kept_requests import RETURNED_SECONDS
from tokenloom.services.runtime.peers import hello
from tokenloom.v1 import types_pb2
from tokenloom.v1.output_processor_pb2 import (
    ProcessFrame,
    ProcessInput,
    RecallRequest,
    RecallResponse,
    RequestFinished,
    Resume,
    Submit,
)

from .world import World

FINGERPRINT = types_pb2.Fingerprint(model="model", tokenizer=b"t" * 32)
TOKEN_SECONDS = 0.05
KEEP_SECONDS = 60.0
"""How long a request is kept whose gateway was lost, or that has ended."""


def text_of(num_tokens: int) -> str:
    """Return what so many tokens of any output say."""
    return "".join(f"{number} " for number in range(num_tokens))


@dataclass(eq=False)
class Run:
    """A request at an output processor.

    Attributes:
        call, slot: Where its output goes; None: nowhere.
        tokens: How many were computed of each output.
        num_known: Tokens that another output processor had computed.
        has_ended: It has computed all.
        is_lost: Its gateway was lost.
    """

    submit: Submit
    call: "_Call | None"
    slot: int
    tokens: list[int] = field(default_factory=list)
    is_live: bool = True
    num_known: int = 0
    has_ended: bool = False
    is_lost: bool = False

    @property
    def num_outputs(self) -> int:
        return self.submit.num_samples or 1

    @property
    def num_computed(self) -> int:
        """Tokens of the prompt and of all outputs, computed here."""
        return len(self.submit.prompt.token_ids) + sum(self.tokens) - self.num_known


class Processor:
    """Runs the requests of gateways.

    Attributes:
        runs: All requests that it has begun.
    """

    def __init__(self, world: World, name: str) -> None:
        self.name = name
        self.runs: list[Run] = []
        self._world = world
        self._by_id: dict[str, Run] = {}
        self._calls: list[_Call] = []

    def connect(self) -> "_Call":
        """Return the gateway's side of a new stream."""
        call = _Call(self)
        self._calls.append(call)
        return call

    def cut(self) -> None:
        """Lose all streams."""
        for call in list(self._calls):
            call.lose()

    def lost(self, call: "_Call") -> None:
        """Continue the requests of a stream that has ended if they can be resumed, and end all others."""
        self._calls.remove(call)
        for run in self.runs:
            if run.call is call:
                run.call, run.is_lost = None, True
                if not run.submit.fingerprint:
                    self._end(run)

    def receive(self, call: "_Call", message: ProcessInput) -> None:
        """Do what a gateway asks for, in the order of a real output processor."""
        if message.HasField("hello"):
            for run in self.runs:
                if run.is_lost and run.is_live:
                    self._world.loop.create_task(self._expire(run), name=f"{self.name} waits for the gateway")
            call.send(ProcessFrame(hello=hello.make_hello(self.name, 1, fingerprint=FINGERPRINT)))
        for each in message.moved:
            run = self._by_id.get(each.request_id)
            if run is not None and run.submit.tenant == each.tenant and run.is_lost and run.is_live:
                self._end(run)
        for submit in message.submit:
            self._submit(call, submit)
        for resume in message.resume:
            self._find_or_refuse(call, resume)
        for slot in message.cancel_slots:
            for run in self.runs:
                if (run.call, run.slot) == (call, slot):
                    self._end(run)
        for each in message.withdraw:
            run = self._by_id.get(each.request_id)
            if run is not None and run.submit.tenant == each.tenant:
                self._end(run)

    async def _expire(self, run: Run) -> None:
        """End a request that its gateway, which is back, neither submits again nor asks for."""
        await asyncio.sleep(RETURNED_SECONDS)
        if run.is_lost and run.is_live:
            self._end(run)

    def _submit(self, call: "_Call", submit: Submit) -> None:
        if submit.take_over and self._find(call, submit):
            return
        run = Run(submit, call, submit.slot)
        run.tokens = [0] * run.num_outputs
        for journal in submit.journals:
            run.tokens[journal.sample_index] = len(journal.token_ids)
        run.num_known = sum(run.tokens)
        self.runs.append(run)
        if (old := self._by_id.get(submit.request_id)) is None or not old.is_live or old.call is None:
            if old is not None:
                self._end(old)
            self._by_id[submit.request_id] = run
        self._world.loop.create_task(self._compute(run), name=f"{self.name} computes")

    def _find_or_refuse(self, call: "_Call", resume: Resume) -> None:
        if not self._find(call, resume):
            call.fail(resume.slot, errors.RequestLost("not known"))

    def _find(self, call: "_Call", wanted: Submit | Resume) -> bool:
        """Continue a request on another stream. Returns whether it was known."""
        run = self._by_id.get(wanted.request_id)
        if run is None or run.submit.tenant != wanted.tenant or not (run.is_live or run.has_ended):
            return False
        if run.submit.fingerprint != wanted.fingerprint:
            call.fail(wanted.slot, errors.BodyChanged("another body"))
            return True
        if run.call is not None and not run.has_ended:
            run.call.fail(run.slot, errors.Aborted("The answer continues in another call."))
        run.call, run.slot, run.is_lost = call, wanted.slot, False
        for sample in range(run.num_outputs):
            self._send(run, sample, 0, run.tokens[sample])
        if run.has_ended:
            self._finish(run)
        return True

    def recall(self, wanted: RecallRequest) -> RecallResponse:
        """Return what a request was begun with."""
        run = self._by_id.get(wanted.request_id)
        if run is None or run.submit.tenant != wanted.tenant or not (run.is_live or run.has_ended):
            raise _error(grpc.StatusCode.NOT_FOUND)
        is_attended = run.call is not None and run.is_live
        num_counted = 0 if run.is_lost else run.tokens[0]
        submit = run.submit
        return RecallResponse(
            recipe=submit.recipe, fingerprint=submit.fingerprint, is_attended=is_attended, num_counted=num_counted
        )

    async def _compute(self, run: Run) -> None:
        max_tokens = run.submit.sampling_params.max_tokens
        while run.is_live and min(run.tokens) < max_tokens:
            await asyncio.sleep(TOKEN_SECONDS)
            if not run.is_live:
                return
            for sample, number in enumerate(run.tokens):
                if number < max_tokens:
                    run.tokens[sample] = number + 1
                    self._send(run, sample, number, number + 1)
        if run.is_live:
            run.has_ended, run.is_live = True, False
            self._finish(run)
            if run.submit.fingerprint:
                await asyncio.sleep(KEEP_SECONDS)
            self._forget(run)

    def _send(self, run: Run, sample: int, start: int, stop: int) -> None:
        if run.call is None or start == stop:
            return
        text = text_of(stop)[len(text_of(start)) :]
        run.call.send(
            ProcessFrame(
                slot=[run.slot],
                text=[text],
                token_index=[start],
                num_tokens=[stop - start],
                token_ids=range(start, stop),
                sample_index=[sample],
            )
        )

    def _finish(self, run: Run) -> None:
        if run.call is None:
            return
        for sample in range(run.num_outputs):
            finished = RequestFinished(
                slot=run.slot,
                sample_index=sample,
                reason=types_pb2.FINISH_REASON_LENGTH,
                prompt_tokens=len(run.submit.prompt.token_ids),
                completion_tokens=run.tokens[sample],
                attempts=1,
            )
            run.call.send(ProcessFrame(finished=[finished]))

    def _end(self, run: Run) -> None:
        run.is_live = False
        self._forget(run)

    def _forget(self, run: Run) -> None:
        run.call = None
        if self._by_id.get(run.submit.request_id) is run:
            del self._by_id[run.submit.request_id]


class _Call:
    """The gateway's side of one stream."""

    def __init__(self, processor: Processor) -> None:
        self._processor = processor
        self._frames: asyncio.Queue[ProcessFrame | None] = asyncio.Queue()
        self._is_open = True

    async def write(self, message: ProcessInput) -> None:
        await asyncio.sleep(0)
        if not self._is_open:
            raise _unavailable()
        copy = ProcessInput()
        copy.CopyFrom(message)
        self._processor.receive(self, copy)

    async def read(self) -> ProcessFrame:
        frame = await self._frames.get()
        if frame is None:
            raise _unavailable()
        return frame

    def cancel(self) -> None:
        """End the stream, from the gateway's side."""
        if self._is_open:
            self._is_open = False
            self._processor.lost(self)

    def lose(self) -> None:
        """End the stream, from this side."""
        self._frames.put_nowait(None)
        self.cancel()

    def send(self, frame: ProcessFrame) -> None:
        if self._is_open:
            self._frames.put_nowait(frame)

    def fail(self, slot: int, error: errors.TokenloomError) -> None:
        """End the request of a slot with an error."""
        reason = types_pb2.FINISH_REASON_ERROR
        self.send(ProcessFrame(finished=[RequestFinished(slot=slot, reason=reason, error=wire_errors.to_proto(error))]))


def _unavailable() -> grpc.aio.AioRpcError:
    return _error(grpc.StatusCode.UNAVAILABLE)


def _error(code: grpc.StatusCode) -> grpc.aio.AioRpcError:
    metadata = grpc.aio.Metadata()
    return grpc.aio.AioRpcError(code, metadata, metadata, "of the explorer")


@dataclass
class Processors:
    """Holds the output processors of a mesh, and stands for the channels to them."""

    world: World
    by_address: dict[str, Processor] = field(default_factory=dict)
    was_cut: bool = False

    def cut(self, address: str) -> None:
        """Lose all streams to one of them."""
        self.was_cut = True
        self.by_address[address].cut()

    def add(self, address: str) -> None:
        """Begin another one."""
        self.by_address[address] = Processor(self.world, address)

    def open(self, address: str, service: str) -> "_Channel":
        """Return a channel, as :class:`Channels` does."""
        assert service == "output_processor"
        return _Channel(self.by_address[address])

    @property
    def runs(self) -> Iterator[Run]:
        return (run for each in self.by_address.values() for run in each.runs)

    def live_outputs(self) -> Counter[str]:
        """Return how many outputs are computed now for each tenant, and go to a gateway."""
        live: Counter[str] = Counter()
        for run in self.runs:
            if run.is_live and run.call is not None:
                live[run.submit.tenant] += run.num_outputs
        return live


class _Channel:
    """Makes the calls of a stub."""

    def __init__(self, processor: Processor) -> None:
        self._processor = processor

    async def __aenter__(self) -> "_Channel":
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    def stream_stream(self, *_: Any, **__: Any) -> Any:
        return self._processor.connect

    def unary_unary(self, method: str, **_: Any) -> Any:
        async def call(request: Any, **__: Any) -> RecallResponse:
            assert method.endswith("/Recall"), f"no scenario calls {method}"
            return self._processor.recall(request)

        return call
