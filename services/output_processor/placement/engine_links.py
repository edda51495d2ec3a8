"""Holds the streams to engines: opens them when they are needed, and closes those that have been idle for long."""

import asyncio
from collections.abc import Callable

from tokenloom.services.runtime.peers.channels import Channels
from tokenloom.services.runtime.tasks import Tasks
from tokenloom.v1.coordinator_pb2 import EngineIdentity
from tokenloom.v1.types_pb2 import Hello

from .engine_link import EngineLink
from .last_snapshot import EngineKey

IDLE_SECONDS = 60.0
"""How long a link that is one too many stays open without requests: opening one costs a request some milliseconds,
keeping one costs both sides a few pings a second."""


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
    ) -> None:
        """Args:
        on_failure: Called when a bug ended a link, because its requests may then never end.
        num_kept: Links that stay open, however long they are idle.
        """
        self._make_hello = make_hello
        self._channels = channels
        self._hang_seconds = hang_seconds
        self._num_kept = num_kept
        self._links: dict[EngineKey, EngineLink] = {}  # one for each live engine; dead links are removed
        self._timer: asyncio.TimerHandle | None = None
        self._tasks = Tasks(on_failure)

    @property
    def num_open(self) -> int:
        return len(self._links)

    def find_open(self, key: EngineKey) -> EngineLink | None:
        """Return the link to an engine if it is open."""
        link = self._links.get(key)
        if link is None or not link.is_open:
            return None
        link.touch()
        return link

    async def get(self, identity: EngineIdentity) -> EngineLink:
        """Return an open link. Raises ``Unavailable`` when the engine does not answer or is not the one expected."""
        key = EngineKey(identity.engine_id, identity.epoch)
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
