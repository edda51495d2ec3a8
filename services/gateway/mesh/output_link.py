"""The stream to one output processor: submits go up, frames come down and are dealt out to the requests' collectors."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeAlias

import grpc
import grpc.aio

from tokenloom.request import errors
from tokenloom.services.runtime.host.tasks import first_of
from tokenloom.services.runtime.peers import hello
from tokenloom.services.runtime.peers.channels import Channels
from tokenloom.v1 import output_processor_pb2, output_processor_pb2_grpc, types_pb2

from .collector import Collector

log = logging.getLogger(__name__)

SlotTextLogprobs: TypeAlias = output_processor_pb2.SlotTextLogprobs
Call: TypeAlias = "grpc.aio.StreamStreamCall[output_processor_pb2.ProcessInput, output_processor_pb2.ProcessFrame]"

INITIAL_CREDIT = 64
"""Frames in flight: a step's worth each, so this is over a second of decoding."""
MESSAGE_TOKENS = 1 << 20
"""Prompt tokens that share one message at most (packed, 2 to 4 MB): below every message limit."""
MIN_BACKOFF, MAX_BACKOFF = 0.1, 1.0
SILENT_TICKS = round(hello.SILENCE_SECONDS / hello.HEARTBEAT_SECONDS)


@dataclass(frozen=True, slots=True)
class Ticket:
    """One submitted request: (stream, slot) is its identity."""

    stream: "ProcessStream"
    slot: int

    def cancel(self) -> None:
        """Ends the request if it is live; no more output reaches its collector."""
        self.stream.cancel(self.slot)


@dataclass(slots=True)
class _Target:
    """Where a slot's output goes: its samples to as many indices of a collector."""

    collector: Collector
    first_index: int
    num_live: int


class ProcessStream:
    """One incarnation of the stream; never reused after it ended."""

    def __init__(self) -> None:
        self._slots: dict[int, _Target] = {}  # as many as the gateway admits requests
        self._next_slot = 1
        self._outbox: deque[output_processor_pb2.ProcessInput] = deque()  # bounded likewise: the writer empties it
        self._outbox_tokens = 0
        self._outbox_filled = asyncio.Event()
        self._silent_ticks = 0
        self._uncredited = 0
        self.ended = False

    @property
    def num_live(self) -> int:
        return len(self._slots)

    def submit(self, submit: output_processor_pb2.Submit, collector: Collector, index: int) -> Ticket:
        """Sends a request (its slot is filled in here); its samples go to the collector, from ``index`` on."""
        assert not self.ended
        if not self._slots:
            self._silent_ticks = 0
        submit.slot = slot = self._next_slot
        self._next_slot += 1
        self._slots[slot] = _Target(collector, index, submit.num_samples or 1)
        num_tokens = len(submit.prompt.token_ids)
        self._message(num_tokens).submit.append(submit)
        return Ticket(self, slot)

    def cancel(self, slot: int) -> None:
        if self._slots.pop(slot, None) is not None and not self.ended:
            self._message().cancel_slots.append(slot)

    def end(self, error: errors.TokenloomError) -> None:
        """The stream is gone: so are its requests."""
        self.ended = True
        for target in self._slots.values():
            target.collector.fail(error)
        self._slots.clear()

    async def write(self, call: Call) -> None:
        """Sends what is in the outbox, for ever. What is added while a write waits shares a message."""
        while True:
            await self._outbox_filled.wait()
            message = self._outbox.popleft()
            if not self._outbox:
                self._outbox_filled.clear()
                self._outbox_tokens = 0
            await call.write(message)

    async def watch(self) -> None:
        """Raises :class:`errors.Unavailable` when the peer owes a heartbeat.

        Counts ticks, not time: a pause of this process is one tick, however long.
        """
        while self._silent_ticks < SILENT_TICKS:
            await asyncio.sleep(hello.HEARTBEAT_SECONDS)
            self._silent_ticks = self._silent_ticks + 1 if self._slots else 0
        raise errors.Unavailable("the output processor is silent")

    def deal(self, frame: output_processor_pb2.ProcessFrame) -> None:
        """Hands a frame's columns to their collectors, and grants credit for it.

        Raises :class:`errors.FailedPrecondition` when the columns do not fit together.
        """
        self._silent_ticks = 0
        n = len(frame.slot)
        token_ids = list(frame.token_ids)
        counts = list(frame.num_tokens) or [1] * n
        if not n == len(frame.text) == len(frame.token_index) == len(counts) or sum(counts) != len(token_ids):
            raise errors.FailedPrecondition("a frame's columns differ in length")
        samples = list(frame.sample_index) or [0] * n
        told = self._deal_prompts(frame.logprobs) if frame.logprobs else {}
        ending = {(finished.slot, finished.sample_index) for finished in frame.finished}
        start = 0
        for slot, sample, text, token_index, count in zip(
            frame.slot, samples, frame.text, frame.token_index, counts, strict=True
        ):
            end = start + count
            if (target := self._slots.get(slot)) is not None:
                index = target.first_index + sample
                if told or ending:
                    key = slot, sample
                    logprobs, ends = told.get(key, ()), key in ending
                    target.collector.put(index, text, token_index, token_ids[start:end], logprobs=logprobs, ends=ends)
                else:
                    target.collector.put(index, text, token_index, token_ids[start:end])
            start = end
        for finished in frame.finished:
            self._finish(finished)
        if n or frame.finished or frame.logprobs:  # heartbeats are free
            self._grant()

    def _deal_prompts(self, logprobs: Iterable[SlotTextLogprobs]) -> dict[tuple[int, int], list[SlotTextLogprobs]]:
        """Hands out what is told of prompts; returns what is told of tokens, by slot and sample."""
        told: dict[tuple[int, int], list[SlotTextLogprobs]] = {}
        for each in logprobs:
            if not each.prompt:
                told.setdefault((each.slot, each.sample_index), []).append(each)
            elif (target := self._slots.get(each.slot)) is not None:
                target.collector.put_prompt(target.first_index, each)
        return told

    def _finish(self, finished: output_processor_pb2.RequestFinished) -> None:
        if (target := self._slots.get(finished.slot)) is not None:
            target.num_live -= 1
            if not target.num_live:
                del self._slots[finished.slot]
            target.collector.finish(target.first_index + finished.sample_index, finished)

    def _grant(self) -> None:
        self._uncredited += 1
        if self._uncredited >= INITIAL_CREDIT // 2:
            self._message().credit += self._uncredited
            self._uncredited = 0

    def _message(self, num_tokens: int = 0) -> output_processor_pb2.ProcessInput:
        """The message under construction with room for so many prompt tokens."""
        self._outbox_tokens += num_tokens
        if not self._outbox or self._outbox_tokens > MESSAGE_TOKENS:
            self._outbox.append(output_processor_pb2.ProcessInput())
            self._outbox_tokens = num_tokens
            self._outbox_filled.set()
        return self._outbox[-1]


class OutputLink:
    """Keeps a stream to one output processor, whatever happens to the other side."""

    def __init__(self, address: str, peer_id: str, epoch: int, channels: Channels) -> None:
        self.address = address
        self._channels = channels
        self._peer_id = peer_id
        self._epoch = epoch
        self._stream: ProcessStream | None = None

    @property
    def stream(self) -> ProcessStream | None:
        """The live stream, once both sides said hello."""
        return self._stream

    async def run(self, fingerprint: types_pb2.Fingerprint, while_true: Callable[[], bool] = lambda: True) -> None:
        """Connects, serves and reconnects for as long as ``while_true`` says so; what is begun goes on to its end."""
        backoff = MIN_BACKOFF
        async with self._channels.open(self.address, "output_processor") as channel:
            stub = output_processor_pb2_grpc.OutputProcessorStub(channel)
            while while_true():
                connected = await self._connect(stub, fingerprint)
                backoff = MIN_BACKOFF if connected else min(backoff * 2, MAX_BACKOFF)
                await asyncio.sleep(backoff)

    async def _connect(
        self, stub: "output_processor_pb2_grpc.OutputProcessorAsyncStub", fingerprint: types_pb2.Fingerprint
    ) -> bool:
        """One incarnation of the stream, to its end. Returns whether it ever served."""
        call = stub.Process()
        stream = ProcessStream()
        greeted = False
        try:
            await self._greet(call, fingerprint)
            greeted = True
            self._stream = stream
            log.info("connected to output processor %s", self.address)
            await first_of(stream.write(call), stream.watch(), _read(call, stream))
        except (grpc.aio.AioRpcError, errors.TokenloomError, asyncio.InvalidStateError, TimeoutError) as error:
            level = logging.WARNING if greeted else logging.DEBUG
            reason = error.code().name if isinstance(error, grpc.aio.AioRpcError) else error
            log.log(level, "output processor %s: %s", self.address, reason)
        finally:
            # Leaving the call alone would keep it, and its requests, alive on the other side.
            call.cancel()
            self._stream = None
            stream.end(errors.Unavailable("the part that makes this answer's text went away; try again"))
        return greeted

    async def _greet(self, call: Call, fingerprint: types_pb2.Fingerprint) -> None:
        ours = hello.make_hello(self._peer_id, self._epoch, fingerprint=fingerprint, initial_credit=INITIAL_CREDIT)
        async with asyncio.timeout(hello.SILENCE_SECONDS):
            await call.write(output_processor_pb2.ProcessInput(hello=ours))
            frame = await _next(call)
        hello.check_hello(frame.hello, fingerprint=fingerprint)


async def _read(call: Call, stream: ProcessStream) -> None:
    while True:
        stream.deal(await _next(call))


async def _next(call: Call) -> output_processor_pb2.ProcessFrame:
    frame = await call.read()
    if not isinstance(frame, output_processor_pb2.ProcessFrame):
        raise errors.Unavailable("the output processor ended the stream")
    return frame
