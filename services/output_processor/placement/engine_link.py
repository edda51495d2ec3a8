"""Holds the streams to engines: each to one incarnation, which gets attempts by slot and sends tokens by step; opened
when it is needed, and closed when it has been idle for long.

A dead engine is noticed here first: its connection ends, it sends no frame for some seconds, or its step does not end.
The link then reports its attempts as lost, and each request goes on at another engine (``RequestStages.on_lost``). The
coordinator finds out on its own, when the engine's reports end (``CoordinatorServicer.Join``) or are missing
(``EngineRecord.refresh``), and places no further request there.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import grpc.aio

from tokenloom.process.fall_backs import FallBacks
from tokenloom.request import errors, logprob_columns, packed_ids, wire_errors
from tokenloom.services.runtime.liveness import LivenessTimer
from tokenloom.services.runtime.peers.channels import Channels
from tokenloom.services.runtime.peers.hello import LIVE_MOVES, PACKED_IDS, QUARANTINE, check_hello
from tokenloom.services.runtime.placement.pool import longest_request
from tokenloom.services.runtime.registry.registry_view import RegistryView
from tokenloom.services.runtime.streams.slotted_stream import (
    ANY_TOKEN,
    MAX_WRONG_FRAMES,
    ClientStream,
    WrongFrame,
    describe,
    was_silent,
)
from tokenloom.services.runtime.tasks import Tasks
from tokenloom.v1.coordinator_pb2 import EngineIdentity
from tokenloom.v1.engine_pb2 import (
    AddRequest,
    EngineFrame,
    EngineInput,
    Finished,
    KVGrant,
    KVSource,
    PickId,
    Quarantine,
    SessionTurn,
    SlotLogprobs,
)
from tokenloom.v1.engine_pb2_grpc import EngineStub
from tokenloom.v1.types_pb2 import Hello, Logprobs, Pooled

from .last_snapshot import EngineKey

log = logging.getLogger(__name__)

CONNECT_SECONDS = 6.0
"""How long an engine may take to answer a Hello before its requests are placed elsewhere: its event loop may be busy
for 5 s."""


IDLE_SECONDS = 60.0
"""How long a link that is one too many stays open without requests: opening one costs a request some milliseconds,
keeping one costs both sides a few pings a second."""


FEWEST_OTHERS = 16
"""In a frame of no more rows, first tokens wait for the others: a frame of their own costs the gateway as much as so
many rows."""


_MAX_WRONG_ENGINES = 256
"""Limits the incarnations whose wrong frames are remembered."""


class _StepHangs(errors.Unavailable):
    """The engine sends frames, but its step does not end."""


class EngineLeft(errors.Unavailable):
    """The engine sent :data:`MAX_WRONG_FRAMES` wrong frames, so it gets no requests that another one can run."""


class AttemptOwner(Protocol):
    """Receives what an engine reports of its attempts. No call follows ``on_finished`` or ``on_lost``.

    Each method raises ``WrongFrame``, before it changes anything, for what cannot be of this attempt.
    """

    def on_kv_granted(self, attempt: "EngineAttempt", kv: KVSource) -> None:
        """Called when the prefill takes more steps: its KV may be read meanwhile."""

    def on_moving(self, attempt: "EngineAttempt", grant: KVGrant) -> None:
        """Called when the engine hands the running attempt over to another one, or does not do so any more."""

    def on_prompt_logprobs(self, attempt: "EngineAttempt", token_index: int, logprobs: Logprobs) -> None:
        """Called with log probabilities of prompt tokens, from this position on."""

    def on_tokens(
        self, attempt: "EngineAttempt", token_index: int, token_ids: Sequence[int], logprobs: Logprobs | None
    ) -> None:
        """Called with new tokens; ``token_index`` is the position of the first of them in the whole output."""

    def on_pooled(self, attempt: "EngineAttempt", part: Pooled) -> None:
        """Called with the result of a pooling request, or the next part of it."""

    def on_finished(self, attempt: "EngineAttempt", finished: Finished) -> None:
        """Called when the attempt has ended."""

    def on_lost(self, attempt: "EngineAttempt", *, is_alone: bool) -> None:
        """Called when the engine died, fell silent or hangs, or its connection ended. ``is_alone``: this link carried
        no other request, and the engine did not just fall silent, as one does that is frozen or cut off."""


@dataclass(slots=True, eq=False)
class EngineAttempt:
    """Describes one attempt at a request, or at its beginning, on one engine.

    Attributes:
        link: The open stream to the engine.
        pick: The coordinator's pick, which the engine acknowledges; None when the coordinator was away.
        whole_request: Whether the engine does the whole request rather than only the leg that was asked for.
        is_counted: Whether the last snapshot counts it, until it is released.
        num_accepted: Output tokens that the engine was given with it.
        has_output: Whether the engine has sent any.
        was_wrong: Whether it is lost because the engine sent what no engine may send.
        session: Which turn of which session the request is; None: of none that the coordinator knows.
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
    was_wrong: bool = False
    session: SessionTurn | None = None
    request_id: str = ""
    slot: int = 0
    owner: AttemptOwner = field(init=False)


class EngineLink(ClientStream[EngineInput, EngineFrame, EngineAttempt]):
    """Connects to an engine in ``run``. When ``run`` returns the link is dead, and is never used again."""

    def __init__(self, identity: EngineIdentity, hello: Hello, channels: Channels, *, hang_seconds: float) -> None:
        """``hello`` names this engine as the peer. ``hang_seconds``: how long a step may last while there is work."""
        super().__init__(EngineInput)
        self.identity = identity
        self.serves = identity.fingerprint
        """What the engine serves, by its own hello once there is one: weights may be newer than the pick."""
        self.key = EngineKey(identity.engine_id, identity.epoch)
        self.longest_request = longest_request(identity)
        """Tokens of one request that the engine holds at most."""
        self._vocab_size = identity.limits.vocab_size or ANY_TOKEN
        self.error: errors.TokenloomError | None = None
        """Why the link is dead; None while it is not."""
        self.fell_silent = self.may_compute = False
        """Whether it is dead because the engine fell silent; and because it did so or hangs, so that the engine may
        still compute."""
        self.num_wrong = 0
        """What came of the engine that no engine may send: once it costs the request alone that it is of."""
        self._hello = hello
        self._channels = channels
        self._hang_seconds = hang_seconds
        self._opened = asyncio.Event()
        self._call: grpc.aio.StreamStreamCall[EngineInput, EngineFrame] | None = None
        self._step = 0
        self._same_step = LivenessTimer()
        self._used_at = asyncio.get_running_loop().time()
        self.is_open = False
        """Whether both sides have said hello and neither has ended."""
        self._takes_packed_ids = False
        self.moves_requests = False
        """Whether running requests can move to this engine."""
        self.can_be_quarantined = False
        """Whether :meth:`quarantine` has an effect: on an engine whose options say that requests are verified."""

    @property
    def idle_seconds(self) -> float:
        """How long it has carried no request."""
        return 0.0 if self.slots else asyncio.get_running_loop().time() - self._used_at

    def touch(self) -> None:
        """Count as used now, because a request is about to be sent."""
        self._used_at = asyncio.get_running_loop().time()

    def close(self) -> None:
        """End the link, which must carry no request."""
        assert not self.slots
        self._end(errors.Unavailable("the stream was idle"))

    async def opened(self) -> None:
        """Return when both sides have said hello. Raises ``Unavailable`` if that fails."""
        await self._opened.wait()
        if self.error is not None:
            raise self.error

    def add(self, request: AddRequest, attempt: EngineAttempt, owner: AttemptOwner) -> None:
        """Send an attempt; its slot is filled in here. Raises ``Unavailable`` if the engine just died."""
        if self.error is not None:
            raise self.error
        if not self.slots:
            self._same_step.owed = 0.0  # without requests an engine takes no steps
        request.slot = attempt.slot = self._take_slot(attempt)
        attempt.request_id = request.request_id
        attempt.owner = owner
        if not self._takes_packed_ids:
            packed_ids.unpack(request.prompt)
        # append would take twice the memory for a long prompt
        self._message(request.ByteSize()).add.add().CopyFrom(request)

    def accept(self, attempt: EngineAttempt, token_ids: Sequence[int]) -> None:
        """Send the first tokens of an attempt that was added ahead of them: it may continue from there."""
        if attempt.slot in self.slots:
            self._message().accept.add(slot=attempt.slot, token_ids=token_ids)

    def stop_at(self, attempt: EngineAttempt, num_tokens: int) -> None:
        """Make the attempt end with so many output tokens, because a stop string was found; the engine confirms it."""
        if attempt.slot in self.slots:
            self._message().stop_at.add(slot=attempt.slot, num_tokens=num_tokens)

    def abort(self, attempt: EngineAttempt) -> None:
        """End an attempt, if it is live; its owner receives no more of it."""
        if self.slots.pop(attempt.slot, None) is not None:
            self.touch()
            self.drop_kv(attempt)

    def keep(self, attempt: EngineAttempt) -> None:
        """Let an attempt that the engine hands over go on there, unless its end is on its way."""
        if attempt.slot in self.slots:
            self._message().keep_slots.append(attempt.slot)

    def quarantine(self, reason: str) -> None:
        """Let the engine end, because it computes wrong tokens. Its requests go on at other engines."""
        self._message().quarantine.CopyFrom(Quarantine(engine_epoch=self.key.epoch, reason=reason))

    def drop_kv(self, attempt: EngineAttempt) -> None:
        """Release the KV that a finished prefill left. This has no effect once another engine reads it."""
        self._message().abort_slots.append(attempt.slot)

    async def run(self) -> None:
        """Serve until either side ends, then report live attempts as lost. The engine's failure is only logged."""
        async with self._channels.open(self.identity.address, "engine") as channel:
            self._call = EngineStub(channel).Connect()
            try:
                cause = await self.serve(self._call, EngineInput(hello=self._hello), self._greet, CONNECT_SECONDS)
                self._end(cause)
            finally:
                self._end(errors.Unavailable("the stream was closed"))

    def _greet(self, frame: EngineFrame) -> None:
        # The hello names the engine and its incarnation: at the address of a pod that moved, another engine may answer.
        check_hello(
            frame.hello,
            expected_peer=self.identity.engine_id,
            expected_epoch=self.identity.epoch,
            fingerprint=self._hello.fingerprint,
        )
        if frame.hello.fingerprint.ByteSize():
            self.serves = frame.hello.fingerprint
        self._takes_packed_ids = PACKED_IDS in frame.hello.features
        self.moves_requests = LIVE_MOVES in frame.hello.features
        self.can_be_quarantined = QUARANTINE in frame.hello.features
        self.is_open = True
        self._opened.set()

    def _look(self) -> None:
        if self._same_step.look(owes=bool(self.slots)) > self._hang_seconds:
            raise _StepHangs(f"step {self._step} lasts too long")

    def receive(self, frame: EngineFrame) -> Iterator[None]:
        """Pass a frame to the attempts. Yields after first tokens, which are at the beginning of a frame, so that the
        gateway has them before the tokens of others, of this frame or of the next one, become text."""
        # The number of the step shows that the core works, and a frame only that its front does: heartbeats go on while
        # the core hangs. A paused engine takes no steps on purpose.
        if frame.step != self._step or frame.paused:
            self._step = frame.step
            self._same_step.owed = 0.0
        for grant in frame.kv_granted:
            if (attempt := self.slots.get(grant.slot)) is None:
                continue
            if grant.moves:
                attempt.owner.on_moving(attempt, grant)
            else:
                attempt.owner.on_kv_granted(attempt, grant.kv)
        # Tokens before ends: an end compares the number of tokens that have arrived with the engine's.
        yield from self._deal(frame)
        for part in frame.pooled:
            if (attempt := self.slots.get(part.slot)) is not None:
                try:
                    attempt.owner.on_pooled(attempt, part)
                except WrongFrame as wrong:
                    self._drop(attempt, wrong)
        for finished in frame.finished:
            if (attempt := self.slots.pop(finished.slot, None)) is not None:
                self.touch()
                try:
                    attempt.owner.on_finished(attempt, finished)
                except WrongFrame as wrong:
                    self.slots[finished.slot] = attempt  # it has not ended: another engine continues it
                    self._drop(attempt, wrong)
        self._grant()  # heartbeats use no credit but count too, which is harmless

    def _deal(self, frame: EngineFrame) -> Iterator[None]:
        """Pass the frame's columns to the attempts, and yield where :meth:`receive` does. Raises ``WrongFrame`` for
        columns that do not fit together, and for tokens that the model does not have."""
        slots, token_ids = list(frame.slot), list(frame.token_ids)
        counts = frame.num_tokens or [1] * len(slots)
        if not len(slots) == len(frame.token_index) == len(counts) or sum(counts) != len(token_ids):
            raise WrongFrame("the columns of a frame differ in length")
        if token_ids and max(token_ids) >= self._vocab_size:
            raise WrongFrame(f"token {max(token_ids)} is not below {self._vocab_size}")
        logprobs = self._deal_prompts(frame.logprobs) if frame.logprobs else {}
        start, has_begun = 0, False
        for slot, index, count in zip(slots, frame.token_index, counts, strict=True):
            if has_begun and index and len(slots) > FEWEST_OTHERS:
                yield
            has_begun = not index
            if (attempt := self.slots.get(slot)) is not None:
                try:
                    columns = _of_tokens(logprobs[slot], index, count) if logprobs and slot in logprobs else None
                    attempt.owner.on_tokens(attempt, index, token_ids[start : start + count], columns)
                except WrongFrame as wrong:
                    self._drop(attempt, wrong)
            start += count
        if has_begun and not frame.finished:  # an end and the tokens before it share a frame
            yield

    def _deal_prompts(self, logprobs: Sequence[SlotLogprobs]) -> dict[int, SlotLogprobs]:
        """Pass the log probabilities of prompts to the attempts, and return those of output tokens by slot."""
        of_tokens: dict[int, SlotLogprobs] = {}
        for each in logprobs:
            if not logprob_columns.fit_together(each.logprobs):
                raise WrongFrame("the log probabilities of a frame differ in length")
            if not logprob_columns.are_probable(each.logprobs, self._vocab_size):
                raise WrongFrame("the log probabilities of a frame are of no model")
            if not each.prompt:
                of_tokens[each.slot] = each
            elif (attempt := self.slots.get(each.slot)) is not None:
                try:
                    attempt.owner.on_prompt_logprobs(attempt, each.token_index, each.logprobs)
                except WrongFrame as wrong:
                    self._drop(attempt, wrong)
        return of_tokens

    def _drop(self, attempt: EngineAttempt, wrong: WrongFrame) -> None:
        """Give up an attempt of which the engine sent what cannot be. Raises ``wrong``, which ends the link and so all
        attempts, when it is not the first time."""
        # Not all at once: a request that brings out a bug of the engine would disturb all others.
        if self.num_wrong + 1 >= MAX_WRONG_FRAMES:
            raise wrong
        self.num_wrong += 1
        log.warning("engine %s: %s", self.identity.engine_id, wrong.message)
        self.abort(attempt)
        attempt.was_wrong = True
        attempt.owner.on_lost(attempt, is_alone=False)

    def _end(self, cause: BaseException) -> None:
        """End the link, once: all attempts are lost, and placements that wait for the hello fail."""
        if self.error is not None:
            return
        level = logging.WARNING if self.slots else logging.INFO
        log.log(level, "engine %s: %s", self.identity.engine_id, describe(cause))
        self.error = errors.Unavailable("The engine became unavailable; retry.")
        self.is_open = False
        self._opened.set()
        attempts = self.detach()
        self.fell_silent = was_silent(cause)
        self.may_compute = self.fell_silent or isinstance(cause, _StepHangs)
        # A request that kills engines is alone on each of them. Silence is left out: a frozen host or a cut link is not
        # the request's doing, and blaming it would end a harmless request after two such links.
        # So is a wrong frame, and the end of an engine that drains, or whose core died with other requests: it has
        # never read of what is left here.
        was_wrong = isinstance(cause, WrongFrame)
        self.num_wrong += was_wrong
        is_alone = len({attempt.request_id for attempt in attempts}) == 1 and not (
            self.fell_silent or was_wrong or _has_said_why(cause)
        )
        for attempt in attempts:
            attempt.was_wrong = was_wrong
            # After the link was marked as dead: the owner places the request again at once, and must not find this link
            # open.
            attempt.owner.on_lost(attempt, is_alone=is_alone)
        if self._call is not None:
            self._call.cancel()  # dropping a call does not end it


def _has_said_why(cause: BaseException) -> bool:
    """Return whether an engine has ended a link itself, for a reason other than that a single request has ended its
    core."""
    said = wire_errors.from_rpc(cause) if isinstance(cause, grpc.aio.AioRpcError) else cause
    return isinstance(said, errors.TryElsewhere) and not isinstance(said, errors.EngineDied)


class EngineLinks:
    """Holds the links of this process: one for each incarnation of an engine, opened when it is first needed.

    Links to engines outside of this process's subset, or that were in it before, are closed when they have been idle
    for :data:`IDLE_SECONDS`. As many links as the subset has engines stay open.
    """

    def __init__(
        self,
        make_hello: Callable[[EngineIdentity], Hello],
        on_failure: Callable[[BaseException], None],
        channels: Channels,
        *,
        hang_seconds: float,
        num_kept: int,
        fall_backs: FallBacks | None = None,
    ) -> None:
        """Args:
        on_failure: Called when a bug ended a link, because its requests may then never end.
        num_kept: Links that stay open, however long they are idle.
        fall_backs: Where it is noted that an engine is left; None: nowhere.
        """
        self._make_hello = make_hello
        self._channels = channels
        self._hang_seconds = hang_seconds
        self._num_kept = num_kept
        self._links: dict[EngineKey, EngineLink] = {}  # one for each live engine; dead links are removed
        self._timer: asyncio.TimerHandle | None = None
        self._tasks = Tasks(on_failure)
        self._fall_backs = fall_backs or FallBacks()
        self.num_wrong: dict[EngineKey, int] = {}
        """Wrong frames by incarnation; the oldest make room."""

    @property
    def num_open(self) -> int:
        return len(self._links)

    def find_open(self, key: EngineKey) -> EngineLink | None:
        """Return the link to an engine if it is open."""
        link = self._links.get(key)
        return link if link is not None and link.is_open else None

    async def get(self, identity: EngineIdentity, *, even_left: bool = False) -> EngineLink:
        """Return an open link. Raises ``Unavailable`` when the engine does not answer or is not the one expected,
        ``EngineLeft`` when it has sent wrong frames, unless ``even_left``."""
        key = EngineKey(identity.engine_id, identity.epoch)
        if self.num_wrong and not even_left and self.num_wrong.get(key, 0) >= MAX_WRONG_FRAMES:
            raise EngineLeft("The engine sends what no engine may send.")
        link = self._links.get(key)
        # A dead link may still be in the table, because its task ends a turn later than the link.
        if link is None or link.error is not None:
            link = EngineLink(identity, self._make_hello(identity), self._channels, hang_seconds=self._hang_seconds)
            self._links[key] = link
            self._tasks.spawn(self._run(link), name=f"engine-link {identity.engine_id}")
            self._look_later()
        link.touch()
        await link.opened()
        return link

    def check(self, link: EngineLink, found: Callable[[bool], None]) -> None:
        """Find out whether the engine of a link that has ended still runs, and call ``found`` with the answer: within
        :data:`CONNECT_SECONDS`, unless this process ends."""
        self._tasks.spawn(self._check(link.identity, found), name=f"check {link.key.engine_id}")

    async def _check(self, identity: EngineIdentity, found: Callable[[bool], None]) -> None:
        try:
            await self.get(identity, even_left=True)  # its hello names the incarnation
        except Exception:  # whatever keeps it from saying hello: its request must not wait for ever
            found(False)
        else:
            found(True)

    async def close(self) -> None:
        """End every link; the engines abort the requests that were live on them."""
        if self._timer is not None:
            self._timer.cancel()
        await self._tasks.close()

    def _look_later(self) -> None:
        if self._timer is None and len(self._links) > self._num_kept:
            self._timer = asyncio.get_running_loop().call_later(IDLE_SECONDS / 4, self._close_idle)

    def _close_idle(self) -> None:
        """Close the links that have been idle for longest, as long as there are too many."""
        self._timer = None
        idle = [link for link in self._links.values() if link.idle_seconds >= IDLE_SECONDS]
        idle.sort(key=lambda link: -link.idle_seconds)
        for link in idle[: max(len(self._links) - self._num_kept, 0)]:
            link.close()
        self._look_later()

    async def _run(self, link: EngineLink) -> None:
        try:
            await link.run()
        finally:
            if self._links.get(link.key) is link:
                del self._links[link.key]
            if link.num_wrong:
                self._note_wrong(link.key, link.num_wrong)

    def forget_gone(self, view: RegistryView) -> None:
        """Forget the wrong frames of incarnations that a view does not have: they were restarted, or have left."""
        for key in list(self.num_wrong):
            if (identity := view.identity(key.engine_id)) is None or identity.epoch != key.epoch:
                self._forget_wrong(key)

    def _forget_wrong(self, key: EngineKey) -> None:
        del self.num_wrong[key]
        self._fall_backs.end("wrong_peer", key.engine_id)

    def _note_wrong(self, key: EngineKey, num_wrong: int) -> None:
        self.num_wrong[key] = self.num_wrong.pop(key, 0) + num_wrong
        if self.num_wrong[key] >= MAX_WRONG_FRAMES:
            detail = f"{MAX_WRONG_FRAMES} of its messages were invalid"
            self._fall_backs.begin("wrong_peer", detail, key.engine_id)
        if len(self.num_wrong) > _MAX_WRONG_ENGINES:
            self._forget_wrong(next(iter(self.num_wrong)))


def _of_tokens(columns: SlotLogprobs, token_index: int, count: int) -> Logprobs:
    if columns.token_index != token_index or logprob_columns.num_positions(columns.logprobs) != count:
        raise WrongFrame("the log probabilities of a frame are not those of its tokens")
    return columns.logprobs
