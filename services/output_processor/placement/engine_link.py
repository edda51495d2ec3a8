"""Holds the stream to one incarnation of an engine: sends attempts by slot, receives tokens by step."""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import grpc.aio

from tokenloom.request import errors, logprob_columns, wire_errors
from tokenloom.services.runtime.peers.channels import Channels
from tokenloom.services.runtime.peers.hello import SILENCE_SECONDS, check_hello
from tokenloom.services.runtime.peers.silence import PeerSilent, was_silent
from tokenloom.services.runtime.tasks import Tasks
from tokenloom.v1.coordinator_pb2 import EngineIdentity
from tokenloom.v1.engine_pb2 import AddRequest, EngineFrame, EngineInput, Finished, KVSource, PickId, SlotLogprobs
from tokenloom.v1.engine_pb2_grpc import EngineStub
from tokenloom.v1.types_pb2 import Hello, Logprobs, Pooled

from .last_snapshot import EngineKey

log = logging.getLogger(__name__)

INITIAL_CREDIT = 64
"""Frames in flight: over a second of steps, so that a pause of this process does not make the engine merge steps."""
CONNECT_SECONDS = 6.0
"""How long an engine may take to answer a Hello before its requests are placed elsewhere: its event loop may be busy
for 5 s."""
_TICK_SECONDS = 0.25
_SILENT_TICKS = int(SILENCE_SECONDS / _TICK_SECONDS)


class _StepHangs(errors.Unavailable):
    """The engine sends frames, but its step does not end."""


class AttemptOwner(Protocol):
    """Receives what an engine reports of its attempts. No call follows ``on_finished`` or ``on_lost``."""

    def on_kv_granted(self, attempt: "Attempt", kv: KVSource) -> None:
        """Called when the prefill takes more steps: its KV may be read meanwhile."""

    def on_prompt_logprobs(self, attempt: "Attempt", token_index: int, logprobs: Logprobs) -> None:
        """Called with log probabilities of prompt tokens, from this position on."""

    def on_tokens(
        self, attempt: "Attempt", token_index: int, token_ids: Sequence[int], logprobs: Logprobs | None
    ) -> None:
        """Called with new tokens; ``token_index`` is the position of the first of them in the whole output."""

    def on_pooled(self, attempt: "Attempt", part: Pooled) -> None:
        """Called with the result of a pooling request, or the next part of it."""

    def on_finished(self, attempt: "Attempt", finished: Finished) -> None:
        """Called when the attempt has ended."""

    def on_lost(self, attempt: "Attempt", *, is_alone: bool) -> None:
        """Called when the engine died, fell silent or hangs. ``is_alone``: this link carried no other request, and the
        engine did not just fall silent, as one does that is frozen or cut off."""


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
        request_id: The request's id in the mesh, which its samples share; empty until it is sent.
        slot: Its number on the link; 0 until it is sent.
        owner: Set when it is sent.
    """

    link: "EngineLink"
    pick: PickId | None = None
    whole_request: bool = True
    is_counted: bool = False
    num_accepted: int = 0
    has_output: bool = False
    request_id: str = ""
    slot: int = 0
    owner: AttemptOwner = field(init=False)


class EngineLink:
    """Connects to an engine in ``run``. When ``run`` returns the link is dead, and is never used again."""

    def __init__(self, identity: EngineIdentity, hello: Hello, channels: Channels, *, hang_seconds: float) -> None:
        """``hello`` names this engine as the peer. ``hang_seconds``: how long a step may last while there is work."""
        self.identity = identity
        self.serves = identity.fingerprint
        """What the engine serves, by its own hello once there is one: weights may be newer than the pick."""
        self.key = EngineKey(identity.engine_id, identity.epoch)
        self._hello = hello
        self._channels = channels
        self._hang_ticks = max(1, round(hang_seconds / _TICK_SECONDS))
        self._opened = asyncio.Event()
        self.error: errors.TokenloomError | None = None
        """Why the link is dead; None while it is not."""
        self.may_compute = False
        """Whether it is dead because the engine fell silent or hangs, so that the engine may still compute."""
        self._call: grpc.aio.StreamStreamCall[EngineInput, EngineFrame] | None = None
        self._attempts: dict[int, Attempt] = {}  # live attempts: as many as this process admits requests
        self._last_slot = 0
        self._outgoing = EngineInput()  # bounded by the same number: the writer takes it whole
        self._wake = asyncio.Event()
        self._ungranted = 0
        self._step = 0
        self._silent_ticks = 0
        self._still_ticks = 0
        self._used_at = asyncio.get_running_loop().time()

    @property
    def is_open(self) -> bool:
        """Whether both sides have said hello and neither has ended."""
        return self._opened.is_set() and self.error is None

    @property
    def idle_seconds(self) -> float:
        """How long it has carried no request."""
        return 0.0 if self._attempts else asyncio.get_running_loop().time() - self._used_at

    def touch(self) -> None:
        """Count as used now, because a request is about to be sent."""
        self._used_at = asyncio.get_running_loop().time()

    def close(self) -> None:
        """End the link, which must carry no request."""
        assert not self._attempts
        self._end(errors.Unavailable("the stream was idle"))

    async def opened(self) -> None:
        """Return when both sides have said hello. Raises ``Unavailable`` if that fails."""
        await self._opened.wait()
        if self.error is not None:
            raise self.error

    def add(self, request: AddRequest, attempt: Attempt, owner: AttemptOwner) -> None:
        """Send an attempt; its slot is filled in here. Raises ``Unavailable`` if the engine just died."""
        if self.error is not None:
            raise self.error
        if not self._attempts:
            # Without requests an engine owes no frame, so what passed before this one says nothing.
            self._silent_ticks = self._still_ticks = 0
        self._last_slot += 1
        request.slot = attempt.slot = self._last_slot
        attempt.request_id = request.request_id
        attempt.owner = owner
        self._attempts[self._last_slot] = attempt
        self._outgoing.add.add().CopyFrom(request)  # append would take twice the memory for a long prompt
        self._wake.set()

    def accept(self, attempt: Attempt, token_ids: Sequence[int]) -> None:
        """Send the first tokens of an attempt that was added ahead of them: it may continue from there."""
        if attempt.slot in self._attempts:
            self._outgoing.accept.add(slot=attempt.slot, token_ids=token_ids)
            self._wake.set()

    def stop_at(self, attempt: Attempt, num_tokens: int) -> None:
        """Make the attempt end with so many output tokens, because a stop string was found; the engine confirms it."""
        if attempt.slot in self._attempts:
            self._outgoing.stop_at.add(slot=attempt.slot, num_tokens=num_tokens)
            self._wake.set()

    def abort(self, attempt: Attempt) -> None:
        """End an attempt, if it is live; its owner receives no more of it."""
        if self._attempts.pop(attempt.slot, None) is not None:
            self.touch()
            self.drop_kv(attempt)

    def drop_kv(self, attempt: Attempt) -> None:
        """Release the KV that a finished prefill left. This has no effect once another engine reads it."""
        self._outgoing.abort_slots.append(attempt.slot)
        self._wake.set()

    async def run(self) -> None:
        """Serve until either side ends, then report live attempts as lost. The engine's failure is only logged."""
        helpers = Tasks(self._end)
        async with self._channels.open(self.identity.address, "engine") as channel:
            self._call = EngineStub(channel).Connect()
            try:
                # The hello names the engine and its incarnation: at the address of a pod that moved, another engine may
                # answer.
                await self._greet(self._call)
                helpers.spawn(self._write(self._call), name="engine-link-write")
                helpers.spawn(self._watch(), name="engine-link-watch")
                await self._read(self._call)
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError, TimeoutError, errors.TokenloomError) as error:
                self._end(error)
            except Exception as error:  # of a frame that cannot be: it ends this link and not the output processor
                self._end(errors.Unavailable(f"the stream ended: {wire_errors.of_exception(error).message}"))
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
        if frame.hello.fingerprint.ByteSize():
            self.serves = frame.hello.fingerprint
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
        """End the link when the engine is silent or hangs. Ticks are counted rather than time, so that a pause of this
        process counts as one tick, however long it was."""
        while True:
            await asyncio.sleep(_TICK_SECONDS)
            if not self._attempts:
                continue
            self._silent_ticks += 1
            self._still_ticks += 1
            if self._silent_ticks > _SILENT_TICKS:
                raise PeerSilent(f"no frame for {SILENCE_SECONDS:g} s")
            if self._still_ticks > self._hang_ticks:
                raise _StepHangs(f"step {self._step} lasts too long")

    def _receive(self, frame: EngineFrame) -> None:
        self._silent_ticks = 0
        # The number of the step shows that the core works, and a frame only that its front does: heartbeats go on while
        # the core hangs. A paused engine takes no steps on purpose.
        if frame.step != self._step or frame.paused:
            self._step = frame.step
            self._still_ticks = 0
        for grant in frame.kv_granted:
            if (attempt := self._attempts.get(grant.slot)) is not None:
                attempt.owner.on_kv_granted(attempt, grant.kv)
        # Tokens before ends: an end compares the number of tokens that have arrived with the engine's.
        self._deal(frame)
        for part in frame.pooled:
            if (attempt := self._attempts.get(part.slot)) is not None:
                attempt.owner.on_pooled(attempt, part)
        for finished in frame.finished:
            if (attempt := self._attempts.pop(finished.slot, None)) is not None:
                self.touch()
                attempt.owner.on_finished(attempt, finished)
        self._grant()

    def _deal(self, frame: EngineFrame) -> None:
        """Pass the frame's columns to the attempts. Columns whose lengths do not match end the stream."""
        slots, token_ids = list(frame.slot), list(frame.token_ids)
        counts = frame.num_tokens or [1] * len(slots)
        if not len(slots) == len(frame.token_index) == len(counts) or sum(counts) != len(token_ids):
            raise errors.Unavailable("the columns of a frame differ in length")
        logprobs = self._deal_prompts(frame.logprobs) if frame.logprobs else {}
        start = 0
        for slot, index, count in zip(slots, frame.token_index, counts, strict=True):
            if (attempt := self._attempts.get(slot)) is not None:
                columns = _of_tokens(logprobs[slot], index, count) if logprobs and slot in logprobs else None
                attempt.owner.on_tokens(attempt, index, token_ids[start : start + count], columns)
            start += count

    def _deal_prompts(self, logprobs: Sequence[SlotLogprobs]) -> dict[int, SlotLogprobs]:
        """Pass the log probabilities of prompts to the attempts, and return those of output tokens by slot."""
        of_tokens: dict[int, SlotLogprobs] = {}
        for each in logprobs:
            if not logprob_columns.fit_together(each.logprobs):
                raise errors.Unavailable("the log probabilities of a frame differ in length")
            if not each.prompt:
                of_tokens[each.slot] = each
            elif (attempt := self._attempts.get(each.slot)) is not None:
                attempt.owner.on_prompt_logprobs(attempt, each.token_index, each.logprobs)
        return of_tokens

    def _grant(self) -> None:
        """Grant the credit that was used, a quarter at a time. Heartbeats use none but count too, which is harmless."""
        self._ungranted += 1
        # Each grant is a message of its own. A quarter keeps them few, and leaves the engine 48 frames while one is on
        # its way.
        if self._ungranted >= INITIAL_CREDIT // 4:
            self._outgoing.credit += self._ungranted
            self._ungranted = 0
            self._wake.set()

    def _end(self, cause: BaseException) -> None:
        """End the link, once: all attempts are lost, and placements that wait for the hello fail."""
        if self.error is not None:
            return
        level = logging.WARNING if self._attempts else logging.INFO
        log.log(level, "engine %s: %s", self.identity.engine_id, _describe(cause))
        self.error = errors.Unavailable("The engine became unavailable; retry.")
        self._opened.set()
        attempts, self._attempts = self._attempts, {}
        fell_silent = was_silent(cause)
        self.may_compute = fell_silent or isinstance(cause, _StepHangs)
        # A request that kills engines is alone on each of them. Silence is left out: a frozen host or a cut link is not
        # the request's doing, and blaming it would end a harmless request after two such links.
        is_alone = len({attempt.request_id for attempt in attempts.values()}) == 1 and not fell_silent
        for attempt in attempts.values():
            # After the link was marked as dead: the owner places the request again at once, and must not find this link
            # open.
            attempt.owner.on_lost(attempt, is_alone=is_alone)
        if self._call is not None:
            self._call.cancel()  # dropping a call does not end it


def _of_tokens(columns: SlotLogprobs, token_index: int, count: int) -> Logprobs:
    if columns.token_index != token_index or logprob_columns.num_positions(columns.logprobs) != count:
        raise errors.Unavailable("the log probabilities of a frame are not those of its tokens")
    return columns.logprobs


def _is_cancelling() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _describe(cause: BaseException) -> str:
    if isinstance(cause, grpc.aio.AioRpcError):
        return f"{cause.code().name}: {cause.details()}"
    return str(cause) or type(cause).__name__
