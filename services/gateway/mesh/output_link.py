"""Keeps the streams to the output processors: sends requests, and hands the frames' output to their collectors."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import grpc
import grpc.aio

from tokenloom.request import errors
from tokenloom.services.runtime.host.host import Host
from tokenloom.services.runtime.host.tasks import first_of
from tokenloom.services.runtime.peers import hello
from tokenloom.services.runtime.peers.channels import Channels
from tokenloom.services.runtime.peers.members import Members
from tokenloom.v1 import output_processor_pb2 as pb
from tokenloom.v1 import output_processor_pb2_grpc, types_pb2

from .collector import Collector

log = logging.getLogger(__name__)

Cancel: TypeAlias = Callable[[], None]
Call: TypeAlias = "grpc.aio.StreamStreamCall[pb.ProcessInput, pb.ProcessFrame]"

INITIAL_CREDIT = 64
"""Frames in flight. A frame holds the tokens of one step, so this is more than a second of decoding."""
MESSAGE_TOKENS = 1 << 20
"""Limit on the prompt tokens that share one message (2 to 4 MB when packed), below every message limit."""
MIN_BACKOFF, MAX_BACKOFF = 0.1, 1.0
SILENT_TICKS = round(hello.SILENCE_SECONDS / hello.HEARTBEAT_SECONDS)


class OutputPool:
    """Spreads requests over the output processors that are connected, in turn."""

    def __init__(self, members: Members, peer_id: str, epoch: int, channels: Channels) -> None:
        self._members = members
        self._peer_id = peer_id
        self._epoch = epoch
        self._channels = channels
        self._links: list[OutputLink] = []  # one for each output processor
        self._turn = 0

    @property
    def num_connected(self) -> int:
        """Return how many output processors take requests."""
        return sum(link.stream is not None and link.address in self._members for link in self._links)

    @property
    def num_known(self) -> int:
        """Return how many output processors should take requests."""
        return sum(link.address in self._members for link in self._links)

    def start(self, host: Host, fingerprint: types_pb2.Fingerprint) -> None:
        """Connect to all of them, and keep them connected for as long as the host lives."""
        ours = hello.make_hello(self._peer_id, self._epoch, fingerprint=fingerprint, initial_credit=INITIAL_CREDIT)

        def joined(address: str) -> None:
            if all(link.address != address for link in self._links):
                host.spawn(self._keep(address, ours), name=f"link to output processor {address}")

        host.spawn(self._members.watch(joined), name="output processors")

    def submit(self, submit: pb.Submit, collector: Collector, index: int) -> Cancel:
        """Send a request to the next output processor in turn; its samples go to the collector, from ``index`` on.

        Returns what cancels it. Raises :class:`errors.Unavailable` when none is connected.
        """
        for _ in self._links:
            self._turn = (self._turn + 1) % len(self._links)
            link = self._links[self._turn]
            if link.stream is not None and link.address in self._members:
                return link.stream.submit(submit, collector, index)
        raise errors.Unavailable("no output processor is connected; retry")

    async def _keep(self, address: str, ours: types_pb2.Hello) -> None:
        link = OutputLink(address, ours)
        self._links.append(link)
        try:
            async with self._channels.open(address, "output_processor") as channel:
                stub = output_processor_pb2_grpc.OutputProcessorStub(channel)
                while address in self._members:  # requests that have begun continue to their end
                    await link.connect(stub)
        finally:
            self._links.remove(link)


@dataclass(slots=True)
class _Target:
    """Says where a slot's output goes: each of its samples to an index of a collector."""

    collector: Collector
    first_index: int
    num_live: int


class ProcessStream:
    """Holds one incarnation of a stream; it is not reused after it has ended."""

    def __init__(self) -> None:
        self._slots: dict[int, _Target] = {}  # bounded by the requests that the gateway admits
        self._next_slot = 1
        self._outbox: deque[pb.ProcessInput] = deque()  # bounded by the same; `write` empties it
        self._outbox_tokens = 0
        self._outbox_filled = asyncio.Event()
        self._silent_ticks = 0
        self._uncredited = 0
        self._ended = False

    def submit(self, submit: pb.Submit, collector: Collector, index: int) -> Cancel:
        """Send a request, whose slot is filled in here; its samples go to the collector, from ``index`` on."""
        assert not self._ended
        if not self._slots:
            self._silent_ticks = 0
        submit.slot = slot = self._next_slot
        self._next_slot += 1
        self._slots[slot] = _Target(collector, index, submit.num_samples or 1)
        self._message(len(submit.prompt.token_ids)).submit.append(submit)
        return partial(self.cancel, slot)

    def cancel(self, slot: int) -> None:
        """End a request if it is live; no more output reaches its collector."""
        if self._slots.pop(slot, None) is not None and not self._ended:
            self._message().cancel_slots.append(slot)

    def end(self, error: errors.TokenloomError) -> None:
        """Fail all requests: the stream is gone."""
        self._ended = True
        for target in self._slots.values():
            target.collector.fail(error)
        self._slots.clear()

    async def write(self, call: Call) -> None:
        """Send what is in the outbox, until cancelled. What is added while a write waits shares a message."""
        while True:
            await self._outbox_filled.wait()
            message = self._outbox.popleft()
            if not self._outbox:
                self._outbox_filled.clear()
                self._outbox_tokens = 0
            await call.write(message)

    async def read(self, call: Call) -> None:
        """Hand out frames, until the stream fails."""
        while True:
            self.deal(await _next(call))

    async def watch(self) -> None:
        """Raise :class:`errors.Unavailable` when the output processor owes a heartbeat for longer than its event loop
        can be busy. Counts ticks, not time: a pause of this process is one tick, however long.
        """
        while self._silent_ticks < SILENT_TICKS:
            await asyncio.sleep(hello.HEARTBEAT_SECONDS)
            self._silent_ticks = self._silent_ticks + 1 if self._slots else 0
        raise errors.Unavailable("the output processor is silent")

    def deal(self, frame: pb.ProcessFrame) -> None:
        """Hand a frame's columns to their collectors, and grant credit for it.

        Raises :class:`errors.FailedPrecondition` when the columns do not fit together.
        """
        self._silent_ticks = 0
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
        for finished in frame.finished:
            self._finish(finished)
        if n or frame.finished or frame.logprobs:  # heartbeats need no credit
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
                target.collector.put_prompt(target.first_index, each)
        return of_tokens

    def _finish(self, finished: pb.RequestFinished) -> None:
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

    def _message(self, num_tokens: int = 0) -> pb.ProcessInput:
        """Return the message under construction, with room for that many prompt tokens."""
        self._outbox_tokens += num_tokens
        if not self._outbox or self._outbox_tokens > MESSAGE_TOKENS:
            self._outbox.append(pb.ProcessInput())
            self._outbox_tokens = num_tokens
            self._outbox_filled.set()
        return self._outbox[-1]


class OutputLink:
    """Connects to one output processor, again and again.

    Attributes:
        stream: The live stream, once both sides have said hello; otherwise None.
    """

    def __init__(self, address: str, ours: types_pb2.Hello) -> None:
        """``ours``: what this gateway says hello with."""
        self.address = address
        self.stream: ProcessStream | None = None
        self._ours = ours
        self._backoff = MIN_BACKOFF

    async def connect(self, stub: "output_processor_pb2_grpc.OutputProcessorAsyncStub") -> None:
        """Keep one incarnation of the stream to its end, then back off."""
        call = stub.Process()
        stream = ProcessStream()
        greeted = False
        try:
            await self._greet(call)
            greeted, self.stream = True, stream
            log.info("connected to output processor %s", self.address)
            await first_of(stream.write(call), stream.watch(), stream.read(call))
        except (grpc.aio.AioRpcError, errors.TokenloomError, asyncio.InvalidStateError, TimeoutError) as error:
            level = logging.WARNING if greeted else logging.DEBUG
            reason = error.code().name if isinstance(error, grpc.aio.AioRpcError) else error
            log.log(level, "output processor %s: %s", self.address, reason)
        finally:
            call.cancel()  # otherwise the call and its requests would stay alive on the other side
            self.stream = None
            stream.end(errors.Unavailable("The output processor handling this request became unavailable; retry."))
        self._backoff = MIN_BACKOFF if greeted else min(self._backoff * 2, MAX_BACKOFF)
        await asyncio.sleep(self._backoff)

    async def _greet(self, call: Call) -> None:
        async with asyncio.timeout(hello.HELLO_SECONDS):
            await call.write(pb.ProcessInput(hello=self._ours))
            frame = await _next(call)
        hello.check_hello(frame.hello, fingerprint=self._ours.fingerprint)


async def _next(call: Call) -> pb.ProcessFrame:
    frame = await call.read()
    if not isinstance(frame, pb.ProcessFrame):
        raise errors.Unavailable("the output processor ended the stream")
    return frame
