"""How many requests this process takes, and when it takes no more."""

import asyncio

from tokenloom.request import errors


class Admission:
    """Counts live requests. The bound keeps every table and queue here bounded; engines have bounds of their own."""

    def __init__(self, max_requests: int) -> None:
        self._max_requests = max_requests
        self._draining = False
        self._idle = asyncio.Event()
        self._idle.set()
        self.num_live = 0

    def has_room(self, count: int = 1) -> bool:
        """Whether so many may come in now."""
        return not self._draining and self.num_live + count <= self._max_requests

    def enter(self, count: int = 1) -> None:
        """So many requests come in; raises ``ResourceExhausted`` or, while draining, ``Unavailable``."""
        if self._draining:
            raise errors.Unavailable("this part is shutting down; try again")
        if self.num_live + count > self._max_requests:
            raise errors.ResourceExhausted(f"{self._max_requests} requests are live already; try again")
        self.num_live += count
        self._idle.clear()

    def leave(self) -> None:
        """A request ended."""
        self.num_live -= 1
        if self.num_live == 0:
            self._idle.set()

    async def drain(self) -> None:
        """Takes no new requests; returns when the live ones ended."""
        self._draining = True
        await self._idle.wait()
