"""Keeps streams alive whose clients have received nothing for a while, with one timer for all of them."""

import asyncio
from typing import Protocol

LOOK_SECONDS = 1.0
"""Between two looks at the streams."""
REPEAT_SECONDS = 10.0
"""A client whose stream has begun gets something to skip after so long a silence, and again after each further one."""


class LiveStream(Protocol):
    """Describes what is looked at."""

    def look(self, head_after: float) -> None:
        """Note whether anything was written since the last look, and write what the client skips if it is time.

        ``head_after``: seconds after which the head of the response is sent.
        """


class SilentStreams:
    """Looks at every live stream once a second.

    The client of a prompt that waited in an engine's queue received nothing for as long as it waited, and proxies and
    SDKs gave up. Nothing is measured for each token: a stream only notes that it has written.
    """

    def __init__(self, head_after: float) -> None:
        """``head_after``: seconds without output after which the head of a response is sent; 0: it waits for output."""
        self._head_after = head_after
        self._streams: set[LiveStream] = set()  # at most those of the gateway's connections
        self._timer: asyncio.TimerHandle | None = None

    def add(self, stream: LiveStream) -> None:
        """Look at a stream from now on."""
        self._streams.add(stream)
        if self._timer is None and self._head_after:
            self._timer = asyncio.get_running_loop().call_later(LOOK_SECONDS, self._look)

    def remove(self, stream: LiveStream) -> None:
        """Look at it no more."""
        self._streams.discard(stream)

    def _look(self) -> None:
        self._timer = None
        if self._streams:
            self._timer = asyncio.get_running_loop().call_later(LOOK_SECONDS, self._look)
        for stream in tuple(self._streams):
            stream.look(self._head_after)
