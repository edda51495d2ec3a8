"""Keeps the stream to an output processor: sends requests, and hands the frames' output to their collectors."""

import asyncio
import logging
import math
from collections import deque
from collections.abc import Callable, Iterable
from typing import Protocol, TypeAlias

import grpc
import grpc.aio

from tokenloom.request import errors, wire_errors
from tokenloom.services.runtime.host.tasks import first_of
from tokenloom.services.runtime.peers import hello
from tokenloom.services.runtime.peers.silence import PeerSilent, was_silent
from tokenloom.v1 import output_processor_pb2 as pb
from tokenloom.v1 import output_processor_pb2_grpc, types_pb2

from .request_ids import UNKNOWN_MARK, mark_of
from .submission import Submission

log = logging.getLogger(__name__)

Call: TypeAlias = "grpc.aio.StreamStreamCall[pb.ProcessInput, pb.ProcessFrame]"

INITIAL_CREDIT = 64
"""Frames in flight. A frame holds the tokens of one step, so this is more than a second of decoding."""
MESSAGE_BYTES = 4 << 20
"""Limit on the prompts that share one message, below every message limit. A larger prompt has a message of its own."""
MIN_BACKOFF, MAX_BACKOFF = 0.1, 0.2
"""Seconds between two attempts to connect: a restarted output processor is used at once."""
IDLE_TICKS = round(60 / hello.HEARTBEAT_SECONDS)
"""The stream to an output processor that this gateway does not work with any more ends so long after its last request:
a request that is sought may come back to it."""
SILENT_TICKS = round(hello.SILENCE_SECONDS / hello.HEARTBEAT_SECONDS)


class _NotNeeded(errors.Unavailable):
    """The stream had no request for long, and the gateway works with other output processors."""

    reason = errors.Unavailable.reason


class StreamOwner(Protocol):
    """Places requests on streams, and receives those that have to move to another one."""

    def on_open(self) -> None:
        """Called when requests may be sent on a stream."""

    def on_unknown(self, stream: "ProcessStream", submission: Submission) -> None:
        """Called when an output processor does not have a request that is to be resumed; another one may."""

    def on_moved(self, stream: "ProcessStream", submission: Submission, error: errors.TokenloomError) -> None:
        """Called when the output processor does not run a request, or the rest of it; another one may."""

    def on_lost(self, stream: "ProcessStream", submissions: list[Submission]) -> None:
        """Called when a stream has ended, with the requests that were live on it. No output of it follows."""


class ProcessStream:
    """Holds one incarnation of a stream; it is not reused after it has ended.

    Attributes:
        leaving: Whether the output processor drains, so that it gets no new requests.
        was_silent: Whether the stream has ended because the output processor was silent, so that it may still work.
    """

    def __init__(self, owner: StreamOwner) -> None:
        self._owner = owner
        self._slots: dict[int, Submission] = {}  # bounded by the requests that the gateway admits
        self._next_slot = 1
        self._outbox: deque[pb.ProcessInput] = deque()  # bounded by the same; `write` empties it
        self._outbox_bytes = 0
        self._outbox_filled = asyncio.Event()
        self._silent_ticks = self._idle_ticks = 0
        self._uncredited = 0
        self._ended = False
        self.leaving = self.was_silent = False

    def submit(self, submission: Submission, *, again: bool = False) -> int:
        """Send a request and return its slot. ``again``: it continues what arrived from another stream, or waited."""
        assert not self._ended
        if not self._slots:
            self._silent_ticks = 0
        slot = self._next_slot
        self._next_slot += 1
        self._slots[slot] = submission
        if submission.is_sought:
            self._message().resume.append(submission.resume(slot))
            return slot
        submit = submission.again(slot, now=asyncio.get_running_loop().time()) if again else submission.first(slot)
        num_bytes = submission.num_bytes + 4 * sum(len(journal.token_ids) for journal in submit.journals)
        self._message(num_bytes).submit.append(submit)
        return slot

    def cancel(self, slot: int) -> None:
        """End a request if it is live; no more output reaches its collector."""
        if self._slots.pop(slot, None) is not None and not self._ended:
            self._message().cancel_slots.append(slot)

    def withdraw(self, request_id: str, tenant: str) -> None:
        """End a request that has no slot here, if the output processor has it."""
        if not self._ended:
            self._message().withdraw.add(request_id=request_id, tenant=tenant)

    def end(self) -> list[Submission]:
        """Detach all requests and return them: the stream is gone, and its late frames reach no collector."""
        self._ended = True
        submissions = list(self._slots.values())
        self._slots.clear()
        return submissions

    async def write(self, call: Call) -> None:
        """Send what is in the outbox, until cancelled. What is added while a write waits shares a message."""
        while True:
            await self._outbox_filled.wait()
            message = self._outbox.popleft()
            if not self._outbox:
                self._outbox_filled.clear()
                self._outbox_bytes = 0
            await call.write(message)

    async def read(self, call: Call) -> None:
        """Hand out frames, until the stream fails."""
        while True:
            self.deal(await _next(call))

    async def watch(self, is_needed: Callable[[], bool] = lambda: True) -> None:
        """Raise :class:`PeerSilent` when the output processor owes a heartbeat for longer than its event loop
        can be busy. Counts ticks, not time: a pause of this process is one tick, however long.

        ``is_needed``: returns whether the stream stays open without requests.
        """
        while self._silent_ticks < SILENT_TICKS:
            await asyncio.sleep(hello.HEARTBEAT_SECONDS)
            self._silent_ticks = self._silent_ticks + 1 if self._slots else 0
            self._idle_ticks = 0 if self._slots else self._idle_ticks + 1
            if self._idle_ticks >= IDLE_TICKS and not is_needed():
                raise _NotNeeded("the stream is not needed any more")
        raise PeerSilent("the output processor is silent")

    def deal(self, frame: pb.ProcessFrame) -> None:
        """Hand a frame's columns to their collectors, and grant credit for it.

        Raises :class:`errors.FailedPrecondition` when the columns do not fit together.
        """
        self._silent_ticks = 0
        self.leaving = self.leaving or frame.leaving
        n = len(frame.slot)
        token_ids = list(frame.token_ids)
        counts = list(frame.num_tokens) or [1] * n
        if not n == len(frame.text) == len(frame.token_index) == len(counts) or sum(counts) != len(token_ids):
            raise errors.FailedPrecondition("a frame's columns differ in length")
        samples = list(frame.sample_index) or [0] * n
        logprobs_of = self._deal_prompts(frame.logprobs) if frame.logprobs else {}
        ending = {(finished.slot, finished.sample_index) for finished in frame.finished}
        start = 0
        for slot, sample, text, token_index, count in zip(
            frame.slot, samples, frame.text, frame.token_index, counts, strict=True
        ):
            end = start + count
            if (target := self._slots.get(slot)) is not None:
                index = target.first_index + sample
                if logprobs_of or ending:
                    key = slot, sample
                    logprobs, ends = logprobs_of.get(key, ()), key in ending
                    target.collector.put(index, text, token_index, token_ids[start:end], logprobs=logprobs, ends=ends)
                else:
                    target.collector.put(index, text, token_index, token_ids[start:end])
            start = end
        for part in frame.pooled:
            if (target := self._slots.get(part.slot)) is not None:
                target.collector.put_pooled(target.first_index, part)
        for slot in frame.engine_death_slots:
            if (submission := self._slots.get(slot)) is not None:
                submission.engine_deaths += 1
        for finished in frame.finished:
            self._finish(finished)
        if n or frame.finished or frame.logprobs or frame.pooled:  # heartbeats need no credit
            self._grant()

    def _deal_prompts(
        self, logprobs: Iterable[pb.SlotTextLogprobs]
    ) -> dict[tuple[int, int], list[pb.SlotTextLogprobs]]:
        """Hand out the log probabilities of prompts; return those of output tokens, by slot and sample."""
        of_tokens: dict[tuple[int, int], list[pb.SlotTextLogprobs]] = {}
        for each in logprobs:
            if not each.prompt:
                of_tokens.setdefault((each.slot, each.sample_index), []).append(each)
            elif (target := self._slots.get(each.slot)) is not None:
                target.num_prompt_logprobs += len(each.logprobs.sampled)
                target.collector.put_prompt(target.first_index, each)
        return of_tokens

    def _finish(self, finished: pb.RequestFinished) -> None:
        if (target := self._slots.get(finished.slot)) is None:
            return
        if finished.HasField("error") and finished.error.reason == errors.TryElsewhere.reason:
            self.cancel(finished.slot)  # its other samples move with it
            self._owner.on_moved(self, target, wire_errors.from_proto(finished.error))
            return
        if finished.error.reason == errors.RequestLost.reason and target.is_sought:
            del self._slots[finished.slot]
            self._owner.on_unknown(self, target)
            return
        target.num_live -= 1
        if not target.num_live:
            del self._slots[finished.slot]
            target.release()
        target.collector.finish(target.first_index + finished.sample_index, finished)

    def _grant(self) -> None:
        self._uncredited += 1
        if self._uncredited >= INITIAL_CREDIT // 2:
            self._message().credit += self._uncredited
            self._uncredited = 0

    def _message(self, num_bytes: int = 0) -> pb.ProcessInput:
        """Return the message under construction, with room for so much of a request."""
        self._outbox_bytes += num_bytes
        if not self._outbox or self._outbox_bytes > MESSAGE_BYTES:
            self._outbox.append(pb.ProcessInput())
            self._outbox_bytes = num_bytes
            self._outbox_filled.set()
        return self._outbox[-1]


class OutputLink:
    """Connects to one output processor, again and again.

    Attributes:
        stream: The live stream, once both sides have said hello; otherwise None.
        mark: What stands for the output processor in ids of requests, once it has said hello.
        changed_at: When it was lost, or returned, last; -inf if it was never lost.
    """

    def __init__(
        self,
        address: str,
        ours: types_pb2.Hello,
        owner: StreamOwner,
        is_needed: Callable[[], bool] = lambda: True,
    ) -> None:
        """Args:
        ours: What this gateway says hello with.
        owner: Learns what happens to the streams.
        is_needed: Returns whether a stream stays open without requests.
        """
        self.address = address
        self.mark = UNKNOWN_MARK
        self.changed_at = -math.inf
        self._owner = owner
        self.stream: ProcessStream | None = None
        self._ours = ours
        self._is_needed = is_needed
        self._backoff = MIN_BACKOFF

    async def connect(self, stub: "output_processor_pb2_grpc.OutputProcessorAsyncStub") -> None:
        """Keep one incarnation of the stream to its end, then back off."""
        call = stub.Process()
        stream = ProcessStream(self._owner)
        greeted = False
        try:
            stream.leaving = await self._greet(call)
            greeted, self.stream = True, stream
            if self.changed_at > -math.inf:
                self.changed_at = asyncio.get_running_loop().time()
            log.info("connected to output processor %s", self.address)
            self._owner.on_open()
            await first_of(stream.write(call), stream.watch(self._is_needed), stream.read(call))
        except (grpc.aio.AioRpcError, errors.TokenloomError, asyncio.InvalidStateError, TimeoutError) as error:
            level = logging.WARNING if greeted and not isinstance(error, _NotNeeded) else logging.DEBUG
            reason = error.code().name if isinstance(error, grpc.aio.AioRpcError) else error
            log.log(level, "output processor %s: %s", self.address, reason)
            stream.was_silent = was_silent(error)
        finally:
            call.cancel()  # otherwise the call and its requests would stay alive on the other side
            self.stream = None
            if greeted:
                self.changed_at = asyncio.get_running_loop().time()
            self._owner.on_lost(stream, stream.end())
        self._backoff = MIN_BACKOFF if greeted else min(self._backoff * 2, MAX_BACKOFF)
        await asyncio.sleep(self._backoff)

    async def _greet(self, call: Call) -> bool:
        """Exchange hellos; return whether the output processor drains."""
        async with asyncio.timeout(hello.HELLO_SECONDS):
            await call.write(pb.ProcessInput(hello=self._ours))
            frame = await _next(call)
        hello.check_hello(frame.hello, fingerprint=self._ours.fingerprint)
        self.mark = mark_of(frame.hello.peer_id)
        return frame.leaving


async def _next(call: Call) -> pb.ProcessFrame:
    frame = await call.read()
    if not isinstance(frame, pb.ProcessFrame):
        raise errors.Unavailable("the output processor ended the stream")
    return frame
