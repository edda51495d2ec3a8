"""The client's end of a slotted stream: the hello, slots, messages out, frames in, credit and liveness."""

import asyncio
import logging
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

import grpc.aio

from tokenloom.request import errors, wire_errors
from tokenloom.request.errors import Unavailable
from tokenloom.services.runtime.local_streams.channel import SILENT
from tokenloom.v1.types_pb2 import Hello

from ..liveness import LivenessTimer
from ..peers.hello import HELLO_SECONDS, SILENCE_SECONDS
from ..tasks import first_of

_KEEPALIVE = "keepalive"
"""Is in the details that gRPC gives when a peer did not answer its pings."""


class PeerSilent(Unavailable):
    """A stream is given up because its peer owes it a sign of life for too long. It stays on this side of the stream:
    callers get another error."""


def was_silent(error: BaseException) -> bool:
    """Return whether a stream ended because its peer sent nothing for too long, though nothing closed the connection:
    the stream counted it, or the transport below."""
    if isinstance(error, PeerSilent):
        return True
    if not isinstance(error, grpc.aio.AioRpcError) or error.code() is not grpc.StatusCode.UNAVAILABLE:
        return False
    details = error.details() or ""
    return details == SILENT or _KEEPALIVE in details


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
            return error
        except asyncio.CancelledError:
            # A call that its owner cancels ends like this too.
            if (task := asyncio.current_task()) is None or task.cancelling():
                raise
        except Exception as error:  # of a frame that cannot be: it ends this stream, and not the process
            log.exception("a frame ended its stream")
            return errors.Unavailable(f"the stream ended: {wire_errors.of_exception(error).message}")
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
