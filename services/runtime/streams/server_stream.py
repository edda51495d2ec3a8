"""The server's end of a slotted stream: the hello, slots, messages in, frames out within credit, and heartbeats."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Generic, Protocol, TypeVar

from tokenloom.request import errors
from tokenloom.v1.types_pb2 import Hello

from ..liveness import LivenessTimer
from ..peers.hello import HEARTBEAT_SECONDS, HELLO_SECONDS, NO_CREDIT_SECONDS, check_hello
from ..tasks import first_of


class IncomingMessage(Protocol):
    """What a client sends. Only the first message has a hello."""

    @property
    def hello(self) -> Hello: ...
    @property
    def credit(self) -> int: ...
    def HasField(self, name: str, /) -> bool: ...  # protobuf's


Message = TypeVar("Message", bound=IncomingMessage)
Frame = TypeVar("Frame")


async def receive_hello(messages: AsyncIterator[Message], ours: Hello) -> Message:
    """Return the first message of a stream, whose hello fits to ours. Raises ``FailedPrecondition`` otherwise, and when
    none comes."""
    try:
        async with asyncio.timeout(HELLO_SECONDS):
            first = await anext(messages)
    except (TimeoutError, StopAsyncIteration):
        raise errors.FailedPrecondition(f"hello: none arrived within {HELLO_SECONDS:g} s") from None
    if not first.HasField("hello"):
        raise errors.FailedPrecondition("hello: the first message of a stream must carry one")
    # Checked before any request: at the address of a pod another engine, or a later incarnation of this one, may
    # answer.
    check_hello(first.hello, peer_id=ours.peer_id, epoch=ours.epoch, fingerprint=ours.fingerprint)
    return first


class Credit:
    """Counts the frames that the client is ready to receive."""

    def __init__(self, initial: int = 0, read: Callable[[], float] | None = None) -> None:
        """``read`` returns seconds; None for the time of the running event loop."""
        self.left = initial
        self._has_granted = False  # since the last call of `is_withheld`
        self._debt = LivenessTimer(read)

    def grant(self, frames: int) -> None:
        """Add ``frames`` that the client granted."""
        self.left += frames
        self._has_granted = True

    def take(self) -> bool:
        """Take one; return False when none is left: the server then merges what it has with what comes."""
        if self.left <= 0:
            return False
        self.left -= 1
        return True

    def is_withheld(self, *, wanted: bool) -> bool:
        """Return whether the client has granted nothing for :data:`NO_CREDIT_SECONDS` while frames waited for it.

        To be called at every heartbeat. ``wanted``: whether frames wait now.
        """
        # A grant in the meantime counts even if it was used up at once: a slow reader is not a hung one.
        owes = wanted and self.left <= 0 and not self._has_granted
        self._has_granted = False
        return self._debt.look(owes=owes) >= NO_CREDIT_SECONDS


class ServerStream(ABC, Generic[Message, Frame]):
    """Serves one stream to its end: until the client has closed its side and every request is answered."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._credit = Credit()
        self._changed = asyncio.Event()  # wakes the writer: there is data, credit or an end
        self._idle = asyncio.Event()
        self._last_slot = 0
        self._half_closed = False
        self._failure: BaseException | None = None
        self._closing: errors.TokenloomError | None = None
        self._written_at = self._loop.time()  # or since when a frame is due

    @property
    @abstractmethod
    def has_data(self) -> bool:
        """Whether something waits to be sent."""

    @property
    @abstractmethod
    def is_idle(self) -> bool:
        """Whether every request has been answered and the answers were sent."""

    @abstractmethod
    async def _receive(self, message: Message) -> None:
        """Take what the client sent, credit excepted. What it raises ends the stream."""

    @abstractmethod
    def _next_frame(self) -> Frame | None:
        """Return what is to be sent now, or None. Takes the credit for it."""

    @abstractmethod
    def _beat(self) -> Frame:
        """Return a frame without data, which needs no credit."""

    async def serve(
        self,
        first: Message,
        messages: AsyncIterator[Message],
        write: Callable[[Frame], Awaitable[object]],
        hello: Frame,
    ) -> None:
        """Write our hello, then frames. ``first``: what :func:`receive_hello` returned.

        Raises what ends the stream: what :meth:`close` or :meth:`abort` got, a reused slot, no credit for too long.
        """
        self._credit.grant(first.hello.initial_credit + first.credit)
        try:
            # Written before anything can end the stream: gRPC sends the initial metadata with the first message, and a
            # status behind a first write that was cancelled fails with TOO_MANY_OPERATIONS; the client then waits for
            # its own deadline. Later writes may be cancelled.
            await write(hello)
            await first_of(self._write(write), self._read(first, messages), self._keep_alive())
        finally:
            self._idle.set()

    async def wait_idle(self) -> None:
        """Wait until the stream is idle or has ended."""
        self._idle.clear()
        self._changed.set()  # the writer checks and sets the event
        await self._idle.wait()

    def half_close(self) -> None:
        """End the stream when every request is answered, as if the client had closed its side."""
        self._half_closed = True
        self._changed.set()

    def close(self, error: errors.TokenloomError) -> None:
        """Send what credit allows, and end the stream with ``error``."""
        self._closing = error
        self._changed.set()

    def abort(self, error: BaseException) -> None:
        """End the stream with an error at once, whatever is live."""
        self._failure = error
        self._changed.set()

    def _take_slot(self, slot: int) -> None:
        """Check that a slot is new. Raises ``InvalidArgument``."""
        if slot <= self._last_slot:
            raise errors.InvalidArgument(f"slot {slot} follows slot {self._last_slot}; slots must increase", "slot")
        self._last_slot = slot

    async def _read(self, first: Message, messages: AsyncIterator[Message]) -> None:
        await self._receive(first)
        async for message in messages:
            if message.HasField("hello"):
                raise errors.FailedPrecondition("hello: only the first message of a stream may carry one")
            if message.credit:
                self._credit.grant(message.credit)
                self._changed.set()
            await self._receive(message)
        self.half_close()
        await asyncio.Event().wait()  # the writer ends the stream once everything is answered

    async def _write(self, write: Callable[[Frame], Awaitable[object]]) -> None:
        while True:
            if self._failure is not None:
                raise self._failure
            if self._closing is not None and not (self._credit.left and self.has_data):
                raise self._closing
            if self._half_closed and self.is_idle:
                return
            if (frame := self._next_frame()) is None and self._is_beat_due():
                frame = self._beat()
            if frame is not None:
                self._written_at = self._loop.time()
                await write(frame)
            else:
                if self.is_idle:
                    self._idle.set()
                await self._changed.wait()
                self._changed.clear()

    def _is_beat_due(self) -> bool:
        return not self.is_idle and self._loop.time() - self._written_at >= HEARTBEAT_SECONDS

    async def _keep_alive(self) -> None:
        """Wake the writer for heartbeats, and end the stream of a client that grants no credit."""
        while True:
            due = self._written_at + HEARTBEAT_SECONDS - self._loop.time()
            await asyncio.sleep(due if due > 0 else HEARTBEAT_SECONDS)
            if self._credit.is_withheld(wanted=self.has_data):
                reason = f"no credit for {NO_CREDIT_SECONDS:g} s while frames wait"
                raise errors.ResourceExhausted(reason, retry_after=None)
            if self._is_beat_due():
                self._changed.set()
