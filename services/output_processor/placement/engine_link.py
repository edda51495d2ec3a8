"""The stream to one incarnation of an engine: attempts go out by slot, tokens come back by step."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Protocol

import grpc.aio

from tokenloom.request import errors, logprob_columns
from tokenloom.services.runtime.host.tasks import Tasks
from tokenloom.services.runtime.peers.channels import Channels
from tokenloom.services.runtime.peers.hello import SILENCE_SECONDS, check_hello
from tokenloom.v1.coordinator_pb2 import EngineIdentity
from tokenloom.v1.engine_pb2 import AddRequest, EngineFrame, EngineInput, Finished, KVSource, SlotLogprobs
from tokenloom.v1.engine_pb2_grpc import EngineStub
from tokenloom.v1.types_pb2 import Hello, Logprobs

log = logging.getLogger(__name__)

INITIAL_CREDIT = 64
"""Frames in flight: over a second of steps, so that a pause of this process does not make the engine merge."""
CONNECT_SECONDS = 2.0
_TICK_SECONDS = 0.25
_SILENT_TICKS = int(SILENCE_SECONDS / _TICK_SECONDS)


class AttemptSink(Protocol):
    """Takes what an engine says of one attempt. Never called again after ``on_finished`` or ``on_lost``."""

    def on_kv_granted(self, kv: KVSource) -> None:
        """The prefill takes more steps; its KV may be read meanwhile."""

    def on_prompt_logprobs(self, token_index: int, logprobs: Logprobs) -> None:
        """Log probabilities of prompt tokens from this position on."""

    def on_tokens(self, token_index: int, token_ids: Sequence[int], logprobs: Logprobs | None = None) -> None:
        """New tokens; ``token_index`` counts from the first of the whole output. ``logprobs``: theirs, if asked for."""

    def on_finished(self, finished: Finished) -> None:
        """The attempt ended."""

    def on_lost(self) -> None:
        """The engine is gone, or silent, or stands still."""


class EngineLink:
    """Opened by ``run``; dead as soon as ``run`` returns, and then never used again."""

    def __init__(self, identity: EngineIdentity, hello: Hello, channels: Channels, *, hang_seconds: float) -> None:
        """``hello``: ours, naming this engine as the peer. ``hang_seconds``: how long its step may stand still."""
        self.identity = identity
        self._hello = hello
        self._channels = channels
        self._hang_ticks = max(1, round(hang_seconds / _TICK_SECONDS))
        self._opened = asyncio.Event()
        self._error: errors.TokenloomError | None = None
        self._call: grpc.aio.StreamStreamCall[EngineInput, EngineFrame] | None = None
        self._sinks: dict[int, AttemptSink] = {}  # live attempts: as many as this process admits requests
        self._last_slot = 0
        self._outgoing = EngineInput()  # bounded likewise: the writer takes it whole
        self._wake = asyncio.Event()
        self._ungranted = 0
        self._step = 0
        self._silent_ticks = 0
        self._still_ticks = 0

    @property
    def is_dead(self) -> bool:
        return self._error is not None

    @property
    def num_live(self) -> int:
        return len(self._sinks)

    async def opened(self) -> None:
        """Returns once both sides said hello; raises ``Unavailable`` if that fails."""
        await self._opened.wait()
        if self._error is not None:
            raise self._error

    def add(self, request: AddRequest, sink: AttemptSink) -> int:
        """Sends an attempt and returns its slot, which is filled in here; ``Unavailable`` if the engine just died."""
        if self._error is not None:
            raise self._error
        if not self._sinks:
            self._silent_ticks = self._still_ticks = 0
        self._last_slot += 1
        request.slot = self._last_slot
        self._sinks[self._last_slot] = sink
        self._outgoing.add.append(request)
        self._wake.set()
        return self._last_slot

    def accept(self, slot: int, token_ids: Sequence[int]) -> None:
        """The first tokens of an attempt that was added ahead of them: it may go on from there."""
        self._outgoing.accept.add(slot=slot, token_ids=token_ids)
        self._wake.set()

    def stop_at(self, slot: int, num_tokens: int) -> None:
        """A stop string was found: the attempt ends with so many output tokens, which its ``on_finished`` confirms."""
        self._outgoing.stop_at.add(slot=slot, num_tokens=num_tokens)
        self._wake.set()

    def abort(self, slot: int) -> None:
        """Ends an attempt; its sink hears no more of it."""
        if self._sinks.pop(slot, None) is not None:
            self._outgoing.abort_slots.append(slot)
            self._wake.set()

    def drop_kv(self, slot: int) -> None:
        """Nobody will read the KV that a finished prefill left; without effect once somebody does."""
        self._outgoing.abort_slots.append(slot)
        self._wake.set()

    async def run(self) -> None:
        """Connects and serves until either side ends; every live attempt is then lost. Raises nothing of the peer's."""
        helpers = Tasks(self._end)
        async with self._channels.open(self.identity.address, "engine") as channel:
            self._call = EngineStub(channel).Connect()
            try:
                await self._greet(self._call)
                helpers.spawn(self._write(self._call), name="engine-link-write")
                helpers.spawn(self._watch(), name="engine-link-watch")
                await self._read(self._call)
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError, TimeoutError, errors.TokenloomError) as error:
                self._end(error)
            except asyncio.CancelledError:
                # Reading from a call that _end cancelled ends like this too.
                if self._error is None or _is_cancelling():
                    raise
            finally:
                self._end(errors.Unavailable("the stream was closed"))
                await helpers.close()

    async def _greet(self, call: "grpc.aio.StreamStreamCall[EngineInput, EngineFrame]") -> None:
        async with asyncio.timeout(CONNECT_SECONDS):
            await call.write(EngineInput(hello=self._hello))
            frame = await call.read()
        if not isinstance(frame, EngineFrame):
            raise errors.Unavailable("the engine closed the stream before its hello")
        check_hello(
            frame.hello,
            expected_peer=self.identity.engine_id,
            expected_epoch=self.identity.epoch,
            fingerprint=self._hello.fingerprint,
        )
        self._opened.set()

    async def _write(self, call: "grpc.aio.StreamStreamCall[EngineInput, EngineFrame]") -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            message, self._outgoing = self._outgoing, EngineInput()
            await call.write(message)

    async def _read(self, call: "grpc.aio.StreamStreamCall[EngineInput, EngineFrame]") -> None:
        while isinstance(frame := await call.read(), EngineFrame):
            self._receive(frame)
        raise errors.Unavailable("the engine ended the stream")

    async def _watch(self) -> None:
        """Counts ticks rather than time: a pause of this process is one tick, however long."""
        while True:
            await asyncio.sleep(_TICK_SECONDS)
            if not self._sinks:
                continue
            self._silent_ticks += 1
            self._still_ticks += 1
            if self._silent_ticks > _SILENT_TICKS:
                raise errors.Unavailable(f"no frame for {SILENCE_SECONDS:g} s")
            if self._still_ticks > self._hang_ticks:
                raise errors.Unavailable(f"step {self._step} stands still with work to do")

    def _receive(self, frame: EngineFrame) -> None:
        self._silent_ticks = 0
        if frame.step != self._step or frame.paused:
            self._step = frame.step
            self._still_ticks = 0
        for grant in frame.kv_granted:
            if (sink := self._sinks.get(grant.slot)) is not None:
                sink.on_kv_granted(grant.kv)
        self._deal(frame)
        for finished in frame.finished:
            if (sink := self._sinks.pop(finished.slot, None)) is not None:
                sink.on_finished(finished)
        self._grant()

    def _deal(self, frame: EngineFrame) -> None:
        """Hands the columns out; columns that do not fit together end the stream."""
        slots, token_ids = list(frame.slot), list(frame.token_ids)
        counts = frame.num_tokens or [1] * len(slots)
        if not len(slots) == len(frame.token_index) == len(counts) or sum(counts) != len(token_ids):
            raise errors.Unavailable("a frame's columns do not fit together")
        told = self._deal_prompts(frame.logprobs) if frame.logprobs else {}
        start = 0
        for slot, index, count in zip(slots, frame.token_index, counts, strict=True):
            if (sink := self._sinks.get(slot)) is not None:
                if told and slot in told:
                    sink.on_tokens(index, token_ids[start : start + count], _of_tokens(told[slot], index, count))
                else:
                    sink.on_tokens(index, token_ids[start : start + count])
            start += count

    def _deal_prompts(self, logprobs: Sequence[SlotLogprobs]) -> dict[int, SlotLogprobs]:
        """Hands out what is told of prompts; returns what is told of tokens, by slot."""
        told: dict[int, SlotLogprobs] = {}
        for each in logprobs:
            if not logprob_columns.fit_together(each.logprobs):
                raise errors.Unavailable("a frame's log probabilities do not fit together")
            if not each.prompt:
                told[each.slot] = each
            elif (sink := self._sinks.get(each.slot)) is not None:
                sink.on_prompt_logprobs(each.token_index, each.logprobs)
        return told

    def _grant(self) -> None:
        """Grants what was used up, a quarter at a time; heartbeats too, which cost nothing: the excess is harmless."""
        self._ungranted += 1
        if self._ungranted >= INITIAL_CREDIT // 4:
            self._outgoing.credit += self._ungranted
            self._ungranted = 0
            self._wake.set()

    def _end(self, cause: BaseException) -> None:
        """Ends once: all attempts are lost, whoever waits for the hello hears of it."""
        if self._error is not None:
            return
        log.log(
            logging.WARNING if self._sinks else logging.INFO, "engine %s: %s", self.identity.engine_id, _tell(cause)
        )
        self._error = errors.Unavailable("the engine is gone; try again")
        self._opened.set()
        sinks, self._sinks = self._sinks, {}
        for sink in sinks.values():
            sink.on_lost()
        if self._call is not None:
            self._call.cancel()  # dropping a call does not end it


class EngineLinks:
    """The links of this process, one for each incarnation of an engine, opened when first needed."""

    def __init__(
        self,
        make_hello: Callable[[EngineIdentity], Hello],
        on_failure: Callable[[BaseException], None],
        channels: Channels,
        *,
        hang_seconds: float,
    ) -> None:
        """``on_failure``: a link ended by a bug of ours, so that nobody may hear of its requests any more."""
        self._make_hello = make_hello
        self._channels = channels
        self._hang_seconds = hang_seconds
        self._links: dict[tuple[str, int], EngineLink] = {}  # as many as engines in the registry; the dead leave
        self._tasks = Tasks(on_failure)

    @property
    def num_open(self) -> int:
        return len(self._links)

    async def get(self, identity: EngineIdentity) -> EngineLink:
        """An open link; ``Unavailable`` when the engine does not answer or is another than expected."""
        key = (identity.engine_id, identity.epoch)
        link = self._links.get(key)
        if link is None or link.is_dead:
            link = EngineLink(identity, self._make_hello(identity), self._channels, hang_seconds=self._hang_seconds)
            self._links[key] = link
            self._tasks.spawn(self._run(key, link), name=f"engine-link {identity.engine_id}")
        await link.opened()
        return link

    async def close(self) -> None:
        """Ends every link; the engines abort what was live on them."""
        await self._tasks.close()

    async def _run(self, key: tuple[str, int], link: EngineLink) -> None:
        try:
            await link.run()
        finally:
            if self._links.get(key) is link:
                del self._links[key]


def _of_tokens(told: SlotLogprobs, token_index: int, count: int) -> Logprobs:
    if told.token_index != token_index or logprob_columns.num_positions(told.logprobs) != count:
        raise errors.Unavailable("a frame's log probabilities are not those of its tokens")
    return told.logprobs


def _is_cancelling() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _tell(cause: BaseException) -> str:
    if isinstance(cause, grpc.aio.AioRpcError):
        return f"{cause.code().name}: {cause.details()}"
    return str(cause) or type(cause).__name__
