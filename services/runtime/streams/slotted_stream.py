"""Both ends of a slotted stream: the hello, slots, messages from the client, frames from the server within credit, and
liveness."""

import asyncio
import logging
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

import grpc.aio

from tokenloom.request import errors
from tokenloom.request.errors import Unavailable
from tokenloom.services.runtime.local_streams.channel import SILENT
from tokenloom.v1.types_pb2 import Hello

from ..liveness import LivenessTimer
from ..peers.hello import HEARTBEAT_SECONDS, HELLO_SECONDS, NO_CREDIT_SECONDS, SILENCE_SECONDS, check_hello
from ..tasks import first_of

_SILENCES = ("keepalive", "ping timeout", "ping_timeout")
"""Are in the details that gRPC gives when a peer did not answer its pings, or says that this side did not."""


class PeerSilent(Unavailable):
    """A stream is given up because its peer owes it a sign of life for too long. It stays on this side of the stream:
    callers get another error."""


class WrongFrame(Unavailable):
    """A stream is given up because its peer sent what no such peer may send. It stays on this side of the stream."""

    reason = Unavailable.reason


ANY_TOKEN = 1 << 32
"""Is above every token of a model that is not known yet."""
MAX_WRONG_FRAMES = 2
"""After so many, a peer gets no requests that another one can run, until it is restarted."""


def was_silent(error: BaseException) -> bool:
    """Return whether a stream ended because its peer sent nothing for too long, though nothing closed the connection:
    the stream counted it, or the transport below."""
    if isinstance(error, PeerSilent):
        return True
    if not isinstance(error, grpc.aio.AioRpcError) or error.code() is not grpc.StatusCode.UNAVAILABLE:
        return False
    details = error.details() or ""
    return details == SILENT or any(words in details for words in _SILENCES)


def _is_unreadable(error: BaseException) -> bool:
    """Return whether gRPC ended a stream because it could not decode a frame, as one with text that is no UTF-8."""
    is_internal = isinstance(error, grpc.aio.AioRpcError) and error.code() is grpc.StatusCode.INTERNAL
    return is_internal and "deserializing" in str(getattr(error, "details", str)() or "")


def describe(error: BaseException) -> str:
    """Return why a stream ended, for the log."""
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name}: {error.details()}"
    return str(error) or type(error).__name__


log = logging.getLogger(__name__)

INITIAL_CREDIT = 64
"""Frames in flight. A frame holds the tokens of one step, so this is over a second of decoding, and a pause of this
process does not make the server merge steps."""
MESSAGE_BYTES = 4 << 20
"""Limit on the requests that share one message, below every message limit. A larger one has a message of its own."""
LOOK_SECONDS = 0.25
"""Time between two looks at what the server owes."""


class OutgoingMessage(Protocol):
    """What a client sends. Only the first message has a hello."""

    credit: int


class ServerFrame(Protocol):
    """What a server sends. Only the first frame has a hello."""

    @property
    def hello(self) -> Hello: ...


Message = TypeVar("Message", bound=OutgoingMessage)
Frame = TypeVar("Frame", bound=ServerFrame)
Item = TypeVar("Item")

Call: TypeAlias = "grpc.aio.StreamStreamCall[Message, Frame]"


class ClientStream(ABC, Generic[Message, Frame, Item]):
    """Holds one incarnation of a stream; it is not used again after its end.

    Attributes:
        slots: What runs on the stream, by slot; bounded by the requests that this process admits.
    """

    def __init__(self, make_message: Callable[[], Message]) -> None:
        """``make_message``: returns an empty message."""
        self.slots: dict[int, Item] = {}
        self._make_message = make_message
        self._last_slot = 0
        self._outbox: deque[Message] = deque()  # bounded as the slots are; the writer empties it
        self._outbox_bytes = 0
        self._outbox_filled = asyncio.Event()
        self._uncredited = 0
        self._silence = LivenessTimer()

    @abstractmethod
    def receive(self, frame: Frame) -> Iterable[None]:
        """Hand out a frame. Each item returned lets the event loop serve other tasks before the rest of the frame."""

    def _look(self) -> None:
        """Raise what else ends the stream. Called every :data:`LOOK_SECONDS`."""

    async def serve(
        self,
        call: "Call[Message, Frame]",
        hello: Message,
        on_hello: Callable[[Frame], object],
        hello_seconds: float = HELLO_SECONDS,
    ) -> Exception:
        """Exchange hellos, then send and receive until the stream ends; return why. Raises only ``CancelledError``.

        ``on_hello`` gets the server's first frame, and raises if it is not the server expected. A server that does not
        send it within ``hello_seconds`` is given up.
        """
        try:
            async with asyncio.timeout(hello_seconds):
                await call.write(hello)
                frame: Any = await call.read()
            if frame is grpc.aio.EOF:
                raise errors.Unavailable("the server ended the stream")
            on_hello(frame)
            await first_of(self._read(call), self._watch(), self._write(call))
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError, TimeoutError, errors.TokenloomError) as error:
            return WrongFrame("a frame cannot be read") if _is_unreadable(error) else error
        except asyncio.CancelledError:
            # A call that its owner cancels ends like this too.
            if (task := asyncio.current_task()) is None or task.cancelling():
                raise
        except Exception:  # of a frame that cannot be: it ends this stream, and not the process
            log.exception("a frame ended its stream")
            return WrongFrame("a frame cannot be read")
        finally:
            call.cancel()  # dropping a call does not end it, nor its requests on the other side
        return errors.Unavailable("the stream was closed")

    def detach(self) -> list[Item]:
        """Return what was live. Its output in late frames reaches nothing any more."""
        items = list(self.slots.values())
        self.slots.clear()
        return items

    def _take_slot(self, item: Item) -> int:
        """Return the slot of a request that begins."""
        if not self.slots:
            self._silence.owed = 0.0  # without requests a server owes no frame
        self._last_slot += 1
        self.slots[self._last_slot] = item
        return self._last_slot

    def _message(self, num_bytes: int = 0, *, is_new: bool = False) -> Message:
        """Return the message under construction, with room for so much of a request. ``is_new``: a further message."""
        # Messages are cut by bytes and not by requests: two large prompts of embeddings in one message exceeded gRPC's
        # limit, which ended the stream of all requests.
        self._outbox_bytes += num_bytes
        if is_new or not self._outbox or self._outbox_bytes > MESSAGE_BYTES:
            self._outbox.append(self._make_message())
            self._outbox_bytes = num_bytes
            self._outbox_filled.set()
        return self._outbox[-1]

    def _grant(self) -> None:
        """Grant the credit of a frame, with that of others: each grant is a message of its own. A quarter at a time
        leaves the server 48 frames while one is on its way."""
        self._uncredited += 1
        if self._uncredited >= INITIAL_CREDIT // 4:
            self._message().credit += self._uncredited
            self._uncredited = 0

    async def _write(self, call: "Call[Message, Frame]") -> None:
        """Send what is in the outbox, until cancelled. What is added while a write waits shares a message."""
        while True:
            await self._outbox_filled.wait()
            message = self._outbox.popleft()
            if not self._outbox:
                self._outbox_filled.clear()
                self._outbox_bytes = 0
            await call.write(message)

    async def _read(self, call: "Call[Message, Frame]") -> None:
        while True:
            # Its end is looked for here, so that one coroutine waits and not two: this runs for every frame.
            frame: Any = await call.read()
            if frame is grpc.aio.EOF:
                raise errors.Unavailable("the server ended the stream")
            self._silence.owed = 0.0
            for _ in self.receive(frame):
                await asyncio.sleep(0)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            if self._silence.look(owes=bool(self.slots)) >= SILENCE_SECONDS:
                raise PeerSilent(f"no frame for {SILENCE_SECONDS:g} s")
            self._look()


class IncomingMessage(Protocol):
    """What a client sends. Only the first message has a hello."""

    @property
    def hello(self) -> Hello: ...
    @property
    def credit(self) -> int: ...
    def HasField(self, name: str, /) -> bool: ...  # protobuf's


Incoming = TypeVar("Incoming", bound=IncomingMessage)
OutFrame = TypeVar("OutFrame")


async def receive_hello(messages: AsyncIterator[Incoming], ours: Hello) -> Incoming:
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


class ServerStream(ABC, Generic[Incoming, OutFrame]):
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
    async def _receive(self, message: Incoming) -> None:
        """Take what the client sent, credit excepted. What it raises ends the stream."""

    @abstractmethod
    def _next_frame(self) -> OutFrame | None:
        """Return what is to be sent now, or None. Takes the credit for it."""

    @abstractmethod
    def _beat(self) -> OutFrame:
        """Return a frame without data, which needs no credit."""

    async def serve(
        self,
        first: Incoming,
        messages: AsyncIterator[Incoming],
        write: Callable[[OutFrame], Awaitable[object]],
        hello: OutFrame,
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

    async def _read(self, first: Incoming, messages: AsyncIterator[Incoming]) -> None:
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

    async def _write(self, write: Callable[[OutFrame], Awaitable[object]]) -> None:
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
