"""Pieces of a streamed body, written to the connection at once: no task wakes for them, no ASGI message is made."""

from typing import Any, TypeAlias

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

Scope: TypeAlias = dict[str, Any]

_EXTENSION = "tokenloom.direct_writer"


class DirectWriter:
    """Writes what uvicorn's ``send`` would, while nothing stands in the way."""

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._flow = cycle.flow
        self._transport = cycle.transport

    @property
    def is_open(self) -> bool:
        """Whether :meth:`write` may be called: the response has begun, in chunks, and its client keeps up."""
        cycle = self._cycle
        return not self._flow.write_paused and not cycle.disconnected and bool(cycle.chunked_encoding)

    def write(self, body: bytes) -> None:
        """Sends a piece that is not empty."""
        self._transport.write(b"%x\r\n%b\r\n" % (len(body), body))


def offer(scope: Scope, cycle: RequestResponseCycle) -> None:
    """Gives the application of ``scope`` the writer of its response."""
    scope["extensions"] = {_EXTENSION: DirectWriter(cycle)}


def find(scope: Scope) -> DirectWriter | None:
    """The writer of the scope's response; None under another server than ours."""
    writer = scope.get("extensions", {}).get(_EXTENSION)
    assert writer is None or isinstance(writer, DirectWriter)
    return writer
