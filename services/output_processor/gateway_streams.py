"""Holds the streams of all gateways, so that a drain reaches each of them."""

import asyncio
import contextlib
from collections.abc import Iterator
from contextlib import contextmanager

from tokenloom.request import errors

from .gateway_stream import GatewayStream

_FLUSH_SECONDS = 1.0
"""How long the gateways may take to read the last frames."""


class GatewayStreams:
    """Knows the sessions that run."""

    def __init__(self) -> None:
        self._sessions: dict[GatewayStream, None] = {}  # one for each gateway's stream
        self._leaving = False
        self._empty = asyncio.Event()
        self._empty.set()

    @contextmanager
    def joined(self, session: GatewayStream) -> Iterator[None]:
        """Hold a session while it runs."""
        self._sessions[session] = None
        self._empty.clear()
        if self._leaving:
            session.leave()
        try:
            yield
        finally:
            del self._sessions[session]
            if not self._sessions:
                self._empty.set()

    def leave(self) -> None:
        """Report to every gateway that this output processor drains. To be called before a request is refused."""
        self._leaving = True
        for session in self._sessions:
            session.leave()

    def move(self) -> None:
        """End all live requests, so that their gateways send them to other output processors."""
        for session in self._sessions:
            session.move(errors.TryElsewhere("The output processor is shutting down; retry."))

    async def close(self) -> None:
        """End all streams: after :meth:`leave` once the gateways have read what is left of them, otherwise (the service
        has failed) at once, before the end of the streams to engines looks like the engines' own."""
        for session in self._sessions:
            if self._leaving:
                session.half_close()
            else:
                session.abort(errors.Unavailable("The output processor is shutting down; retry."))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_FLUSH_SECONDS):
                await self._empty.wait()
