"""Serves the stream of one gateway: its slots, its credit and its frames. Holds the streams of all gateways, so that a
drain reaches each of them."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from operator import attrgetter

from tokenloom.request import errors, wire_errors
from tokenloom.services.runtime.streams.slotted_stream import ServerStream, receive_hello
from tokenloom.services.runtime.tasks import Tasks
from tokenloom.v1.output_processor_pb2 import (
    ProcessFrame,
    ProcessInput,
    RequestFinished,
    Resume,
    SamplePosition,
    Submit,
)
from tokenloom.v1.types_pb2 import FinishReason, Hello

from .placement.placement import FirstPick, PendingPick
from .request.kept_requests import Peer
from .request.outbox import Outbox
from .request.pooled_request import PooledRequest
from .request.requests import Requests, SampleGroup

_SHARED_TOKENS = 1024
"""A prompt of so many tokens is worth a copy of its own."""
_FLUSH_SECONDS = 1.0
"""How long the gateways may take to read the last frames."""
SUBMITS_PER_TURN = 8
"""So many requests of a message are made before the event loop serves those that run. Making one takes about 1 ms."""


class GatewayStream(ServerStream[ProcessInput, ProcessFrame]):
    """Serves one ``Process`` stream. At its end, requests that can be resumed continue; all others are aborted."""

    def __init__(self, hello: Hello, requests: Requests) -> None:
        """``hello``: what this process sends first."""
        super().__init__()
        self._hello = hello
        self._requests = requests
        self._live: dict[int, SampleGroup | PooledRequest] = {}  # by slot; bounded by the requests that may be live
        # The writer runs after the first tokens of an engine's frame and after the whole of it, so that one step is one
        # frame here, or two.
        self._outbox = Outbox(self._changed.set)
        self._leaving = self._has_left = False
        self._peer: Peer = "", 0
        self._tasks = Tasks(self.abort)

    async def run(
        self, messages: AsyncIterator[ProcessInput], write: Callable[[ProcessFrame], Awaitable[object]]
    ) -> None:
        """Write our hello, then a frame for each step of an engine, until the gateway has closed its side and no
        request is live.

        Raises what ends the stream: a wrong hello, a reused slot, no credit for too long.
        """
        messages = aiter(messages)
        kept = self._requests.kept
        first = await receive_hello(messages, self._hello)
        self._peer = peer = first.hello.peer_id, first.hello.epoch
        kept.copies.connect(peer)
        kept.connect(peer)
        self._has_left = self._leaving
        try:
            await self.serve(first, messages, write, ProcessFrame(hello=self._hello, leaving=self._leaving))
        finally:
            # Before the loop below, which keeps a request only if its gateway has no other stream here.
            kept.disconnect(peer)
            kept.copies.lose(self, peer)
            for group in list(self._live.values()):
                if not isinstance(group, SampleGroup) or not kept.lose(group, peer):
                    group.cancel()
            await self._tasks.close()

    @property
    def has_data(self) -> bool:
        return bool(self._outbox)

    @property
    def is_idle(self) -> bool:
        return not self._live and not self._outbox

    def leave(self) -> None:
        """Report to the gateway that this output processor takes no new requests. What is refused comes after that."""
        self._leaving = True
        self._changed.set()

    def move(self, error: errors.TokenloomError) -> None:
        """End the live requests with an error that makes the gateway send them to another output processor."""
        for group in list(self._live.values()):
            group.fail(error)

    async def _receive(self, message: ProcessInput) -> None:
        if message.HasField("journal_copies"):
            self._requests.kept.copies.receive(self, message.journal_copies)
        for moved in message.moved:
            self._requests.kept.moved(moved.request_id, moved.tenant, self._peer)
        # In the order of their numbers. Read in the order of the message's fields, all new requests came first: a
        # resumed one with a lower number ended the whole stream, and the gateway sent the same message again on the
        # next stream, without end.
        begun: Iterable[Submit | Resume] = message.submit
        for one in sorted((*begun, *message.resume), key=attrgetter("slot")) if message.resume else begun:
            self._take_slot(one.slot)
        for start in range(0, len(message.submit), SUBMITS_PER_TURN):
            if start:
                await asyncio.sleep(0)
            # Engines are asked for first, so that the requests are made while the coordinator answers.
            picked: list[tuple[Submit, FirstPick]] = []
            is_asked = False
            for each in message.submit[start : start + SUBMITS_PER_TURN]:
                prompt = each.prompt
                is_large = prompt.embeds or len(prompt.token_ids) >= _SHARED_TOKENS or prompt.packed_token_ids
                submit = own_copy(each) if is_large else each
                pick = self._requests.ask(submit)
                picked.append((submit, pick))
                is_asked = is_asked or isinstance(pick, PendingPick)
            if is_asked:
                await asyncio.sleep(0)  # the picks are written now
            for submit, pick in picked:
                self._submit(submit, pick)
                if submit.journals:
                    await asyncio.sleep(0)  # replaying many tokens must not hold up the requests that run
        for resume in message.resume:
            self._resume(resume)
        for slot in message.cancel_slots:
            # A slot that has ended is no error: its end and the gateway's cancellation may have crossed on the way.
            if (group := self._live.get(slot)) is not None:
                group.cancel()
        for withdrawal in message.withdraw:
            self._requests.kept.withdraw(withdrawal.request_id, withdrawal.tenant)

    def _submit(self, submit: Submit, pick: FirstPick) -> None:
        group: SampleGroup | PooledRequest
        try:
            # A client that repeats its call with the same idempotency key joins the request that still runs. It is not
            # begun a second time, and costs no budget of retries.
            if submit.take_over and (known := self._find(submit)) is not None:
                self._attach(known, submit.slot)
                return
            if submit.HasField("pooling_params"):
                group = self._requests.make_pooled(submit, self._outbox, self._tasks, self._live.pop)
            else:
                group = self._requests.make(submit, self._outbox, self._tasks, self._live.pop, self._peer)
                group.on_taken = self._taken
        except Exception as error:  # a fault of one request never ends the stream of all
            self._refuse(submit.slot, error)
            return
        self._begin(submit.slot, group)
        try:
            group.start(pick)
        except Exception as error:  # as above, and the request has its slot now
            group.fail(error)

    def _resume(self, resume: Resume) -> None:
        try:
            group = self._find(resume)
            if group is None and resume.from_copy:
                group = self._requests.revive(resume)
            if group is None:
                raise errors.RequestLost("The request is not known, or not any more; send it again as a new request.")
            self._attach(group, resume.slot, resume.positions)
            self._requests.kept.prolong(group)
        except Exception as error:  # a fault of one request never ends the stream of all
            copy = self._requests.kept.copies.any_of(resume.request_id, resume.tenant)
            is_awaited = copy is not None and copy.lost_by is None
            self._refuse(resume.slot, error, is_copied=is_awaited and isinstance(error, errors.RequestLost))

    def _find(self, wanted: Submit | Resume) -> SampleGroup | None:
        """Return a request that runs here, or ran; one whose output cannot be sent again begins anew. None: there is
        none."""
        return self._requests.kept.find(wanted) or self._requests.restart(wanted)

    def _attach(self, group: SampleGroup, slot: int, positions: Iterable[SamplePosition] = ()) -> None:
        """Send a request's output from the positions on."""
        group.attach(self._outbox, slot, positions, self._live.pop, self._taken)
        self._requests.kept.attached(group)
        if not group.is_over:
            self._begin(slot, group)
            if not group.has_tokens:
                self._outbox.found(slot)

    def _begin(self, slot: int, group: SampleGroup | PooledRequest) -> None:
        if not self._live:
            self._written_at = self._loop.time()  # beats are due from the first request on
        self._live[slot] = group

    def _taken(self, slot: int) -> None:
        """End a slot whose request moves to another one."""
        if self._live.pop(slot, None) is not None:
            self._refuse(slot, errors.Aborted("The answer continues in another call, which has resumed it."))

    def _refuse(self, slot: int, error: BaseException, *, is_copied: bool = False) -> None:
        reason, proto = FinishReason.FINISH_REASON_ERROR, wire_errors.to_proto(error)
        self._outbox.finish(RequestFinished(slot=slot, reason=reason, error=proto, is_copied=is_copied))

    def _next_frame(self) -> ProcessFrame | None:
        if self._leaving and not self._has_left:  # like a heartbeat, it needs no credit
            self._has_left = True
            return ProcessFrame(leaving=True)
        return self._outbox.take() if self._outbox and self._credit.take() else None

    def _beat(self) -> ProcessFrame:
        return ProcessFrame()


class GatewayStreams:
    """Holds the streams of gateways that run."""

    def __init__(self) -> None:
        self._streams: dict[GatewayStream, None] = {}  # one for each gateway's stream
        self._leaving = False
        self._empty = asyncio.Event()
        self._empty.set()

    @contextmanager
    def joined(self, stream: GatewayStream) -> Iterator[None]:
        """Hold a stream while it runs."""
        self._streams[stream] = None
        self._empty.clear()
        if self._leaving:
            stream.leave()
        try:
            yield
        finally:
            del self._streams[stream]
            if not self._streams:
                self._empty.set()

    def leave(self) -> None:
        """Report to every gateway that this output processor drains. To be called before a request is refused."""
        self._leaving = True
        for stream in self._streams:
            stream.leave()

    def move(self) -> None:
        """End all live requests, so that their gateways send them to other output processors."""
        for stream in self._streams:
            stream.move(errors.TryElsewhere("The output processor is shutting down; retry."))

    async def close(self) -> None:
        """End all streams: after :meth:`leave` once the gateways have read what is left of them, otherwise (the service
        has failed) at once, before the end of the streams to engines looks like the engines' own."""
        for stream in self._streams:
            if self._leaving:
                stream.half_close()
            else:
                stream.abort(errors.Unavailable("The output processor is shutting down; retry."))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_FLUSH_SECONDS):
                await self._empty.wait()


def own_copy(submit: Submit) -> Submit:
    """Return a request apart from the message that brought it. Requests of one message share its memory, so the
    last of them to end would hold all of it; and an array that was parsed takes up to twice the room of a copy."""
    copy = Submit()
    copy.CopyFrom(submit)
    return copy
