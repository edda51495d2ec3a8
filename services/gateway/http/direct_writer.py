"""What ASGI would need a message, and a task that waits for it, for: a body that is here already, a client that leaves,
pieces of a streamed answer."""

from collections.abc import Callable
from typing import Any, TypeAlias

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

Scope: TypeAlias = dict[str, Any]

_EXTENSION = "tokenloom.direct_writer"


Watchers: TypeAlias = set[Callable[[], None]]
"""Of one connection: called when it is lost. As many as its requests that are answered, one but for pipelining."""


class DirectWriter:
    """Does what uvicorn's ``receive`` and ``send`` would, while nothing stands in the way."""

    def __init__(self, cycle: RequestResponseCycle, watchers: Watchers) -> None:
        self._cycle = cycle
        self._flow = cycle.flow
        self._transport = cycle.transport
        self._watchers = watchers

    @property
    def is_disconnected(self) -> bool:
        """Whether the client has left."""
        return bool(self._cycle.disconnected)

    def take_body(self) -> bytes | None:
        """The request's body, once, if all of it is here."""
        cycle = self._cycle
        if cycle.more_body or cycle.disconnected:
            return None
        body, cycle.body = bytes(cycle.body), bytearray()
        return body

    def watch(self, on_lost: Callable[[], None]) -> None:
        """Has ``on_lost`` called when the client leaves, until :meth:`unwatch`."""
        self._flow.resume_reading()  # who does not read does not hear of it
        self._watchers.add(on_lost)

    def unwatch(self, on_lost: Callable[[], None]) -> None:
        self._watchers.discard(on_lost)

    @property
    def is_open(self) -> bool:
        """Whether :meth:`write` may be called: the response has begun, in chunks, and its client keeps up."""
        cycle = self._cycle
        return not self._flow.write_paused and not cycle.disconnected and bool(cycle.chunked_encoding)

    def write(self, body: bytes) -> None:
        """Sends a piece that is not empty."""
        self._transport.write(b"%x\r\n%b\r\n" % (len(body), body))


def offer(scope: Scope, cycle: RequestResponseCycle, watchers: Watchers) -> None:
    """Gives the application of ``scope`` the writer of its response."""
    scope["extensions"] = {_EXTENSION: DirectWriter(cycle, watchers)}


def find(scope: Scope) -> DirectWriter | None:
    """The writer of the scope's response; None under another server than ours."""
    writer = scope.get("extensions", {}).get(_EXTENSION)
    assert writer is None or isinstance(writer, DirectWriter)
    return writer
