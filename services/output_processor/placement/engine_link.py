"""The stream to one incarnation of an engine: attempts go out by slot, tokens come back by step."""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import grpc.aio

from tokenloom.request import errors, logprob_columns
from tokenloom.services.runtime.host.tasks import Tasks
from tokenloom.services.runtime.peers.channels import Channels
from tokenloom.services.runtime.peers.hello import SILENCE_SECONDS, check_hello
from tokenloom.v1.coordinator_pb2 import EngineIdentity
from tokenloom.v1.engine_pb2 import AddRequest, EngineFrame, EngineInput, Finished, KVSource, PickId, SlotLogprobs
from tokenloom.v1.engine_pb2_grpc import EngineStub
from tokenloom.v1.types_pb2 import Hello, Logprobs

from .last_snapshot import EngineKey

log = logging.getLogger(__name__)

INITIAL_CREDIT = 64
"""Frames in flight: over a second of steps, so that a pause of this process does not make the engine merge."""
CONNECT_SECONDS = 2.0
_TICK_SECONDS = 0.25
_SILENT_TICKS = int(SILENCE_SECONDS / _TICK_SECONDS)


class AttemptOwner(Protocol):
    """Receives what an engine reports of its attempts. No call follows ``on_finished`` or ``on_lost``."""

    def on_kv_granted(self, attempt: "Attempt", kv: KVSource) -> None:
        """The prefill takes more steps; its KV may be read meanwhile."""

    def on_prompt_logprobs(self, attempt: "Attempt", token_index: int, logprobs: Logprobs) -> None:
        """The log probabilities of prompt tokens from this position on have arrived."""

    def on_tokens(
        self, attempt: "Attempt", token_index: int, token_ids: Sequence[int], logprobs: Logprobs | None
    ) -> None:
        """New tokens have arrived; ``token_index`` counts from the first of the whole output."""

    def on_finished(self, attempt: "Attempt", finished: Finished) -> None:
        """The attempt has ended."""

    def on_lost(self, attempt: "Attempt") -> None:
        """The engine died, fell silent or hangs."""


@dataclass(slots=True, eq=False)
class Attempt:
    """Describes one attempt at a request, or at its beginning, on one engine.

    Attributes:
        link: The open stream to the engine.
        pick: The coordinator's pick, which the engine acknowledges; None when the coordinator was away.
        whole_request: Whether the engine does the whole request rather than only the leg that was asked for.
        is_counted: Whether the last snapshot counts it, until it is released.
        num_accepted: Output tokens that the engine was given with it.
        has_output: Whether the engine has sent any.
        slot: Its number on the link; 0 until it is sent.
        owner: Set when it is sent.
    """

    link: "EngineLink"
    pick: PickId | None = None
    whole_request: bool = True
    is_counted: bool = False
    num_accepted: int = 0
    has_output: bool = False
    slot: int = 0
    owner: AttemptOwner = field(init=False)


class EngineLink:
    """Opened by ``run``; dead as soon as ``run`` returns, and then never used again."""

    def __init__(self, identity: EngineIdentity, hello: Hello, channels: Channels, *, hang_seconds: float) -> None:
        """``hello``: ours, naming this engine as the peer. ``hang_seconds``: how long its step may stand still."""
        self.identity = identity
        self.key = EngineKey(identity.engine_id, identity.epoch)
        self._hello = hello
        self._channels = channels
        self._hang_ticks = max(1, round(hang_seconds / _TICK_SECONDS))
        self._opened = asyncio.Event()
        self.error: errors.TokenloomError | None = None
        """Why the link is dead; None while it is not."""
        self._call: grpc.aio.StreamStreamCall[EngineInput, EngineFrame] | None = None
        self._attempts: dict[int, Attempt] = {}  # live attempts: as many as this process admits requests
        self._last_slot = 0
        self._outgoing = EngineInput()  # bounded likewise: the writer takes it whole
        self._wake = asyncio.Event()
        self._ungranted = 0
        self._step = 0
        self._silent_ticks = 0
        self._still_ticks = 0

    async def opened(self) -> None:
        """Returns once both sides said hello; raises ``Unavailable`` if that fails."""
        await self._opened.wait()
        if self.error is not None:
            raise self.error

    def add(self, request: AddRequest, attempt: Attempt, owner: AttemptOwner) -> None:
        """Send an attempt; its slot is filled in here. Raises ``Unavailable`` if the engine just died."""
        if self.error is not None:
            raise self.error
        if not self._attempts:
            self._silent_ticks = self._still_ticks = 0
        self._last_slot += 1
        request.slot = attempt.slot = self._last_slot
        attempt.owner = owner
        self._attempts[self._last_slot] = attempt
        self._outgoing.add.append(request)
        self._wake.set()

    def accept(self, attempt: Attempt, token_ids: Sequence[int]) -> None:
        """Send the first tokens of an attempt that was added ahead of them: it may continue from there."""
        if attempt.slot in self._attempts:
            self._outgoing.accept.add(slot=attempt.slot, token_ids=token_ids)
            self._wake.set()

    def stop_at(self, attempt: Attempt, num_tokens: int) -> None:
        """A stop string was found: let the attempt end with so many output tokens, and confirm it as finished."""
        if attempt.slot in self._attempts:
            self._outgoing.stop_at.add(slot=attempt.slot, num_tokens=num_tokens)
            self._wake.set()

    def abort(self, attempt: Attempt) -> None:
        """End an attempt, if it is live; its owner receives no more of it."""
        if self._attempts.pop(attempt.slot, None) is not None:
            self.drop_kv(attempt)

    def drop_kv(self, attempt: Attempt) -> None:
        """Release the KV that a finished prefill left; without effect once another engine reads it."""
        self._outgoing.abort_slots.append(attempt.slot)
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
                if self.error is None or _is_cancelling():
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
            if not self._attempts:
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
            if (attempt := self._attempts.get(grant.slot)) is not None:
                attempt.owner.on_kv_granted(attempt, grant.kv)
        self._deal(frame)
        for finished in frame.finished:
            if (attempt := self._attempts.pop(finished.slot, None)) is not None:
                attempt.owner.on_finished(attempt, finished)
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
            if (attempt := self._attempts.get(slot)) is not None:
                logprobs = _of_tokens(told[slot], index, count) if told and slot in told else None
                attempt.owner.on_tokens(attempt, index, token_ids[start : start + count], logprobs)
            start += count

    def _deal_prompts(self, logprobs: Sequence[SlotLogprobs]) -> dict[int, SlotLogprobs]:
        """Hands out what is told of prompts; returns what is told of tokens, by slot."""
        told: dict[int, SlotLogprobs] = {}
        for each in logprobs:
            if not logprob_columns.fit_together(each.logprobs):
                raise errors.Unavailable("a frame's log probabilities do not fit together")
            if not each.prompt:
                told[each.slot] = each
            elif (attempt := self._attempts.get(each.slot)) is not None:
                attempt.owner.on_prompt_logprobs(attempt, each.token_index, each.logprobs)
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
        if self.error is not None:
            return
        log.log(
            logging.WARNING if self._attempts else logging.INFO, "engine %s: %s", self.identity.engine_id, _tell(cause)
        )
        self.error = errors.Unavailable("the engine is gone; try again")
        self._opened.set()
        attempts, self._attempts = self._attempts, {}
        for attempt in attempts.values():
            attempt.owner.on_lost(attempt)
        if self._call is not None:
            self._call.cancel()  # dropping a call does not end it


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
