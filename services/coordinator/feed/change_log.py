"""Keeps the messages that the watchers of one kind get. No I/O."""

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

MAX_KEPT = 16
"""Changes kept for watchers that are late by a few; one that is later gets everything again."""
_WOKEN_TOGETHER = 4
"""Watchers that a change wakes in one turn of the event loop. A message to two hundred takes 10 to 60 ms to write,
in which no pick would be answered otherwise; 16 took up to 7 ms where other programs wanted the cores too."""


class Published(NamedTuple):
    """Holds a serialized ``Snapshot``."""

    revision: int
    data: bytes


class ChangeLog:
    """Keeps the latest changes, each of which begins at the revision where the one before ended.

    Attributes:
        revision: The one at which the last change ended.
    """

    def __init__(self, revision: int, whole: Callable[[int], bytes], *, max_kept: int = MAX_KEPT) -> None:
        """``whole`` returns a message with everything there is now, under the given revision. ``max_kept``: changes
        kept; 0 for watchers that get everything each time."""
        self.revision = revision
        self._waiting: dict[asyncio.Future[None], None] = {}
        self._whole = whole
        self._kept: deque[tuple[int, Published]] = deque(maxlen=max_kept)  # with the revision that each one changes

    def add(self, revision: int, data: bytes) -> None:
        """Publish a change of the last revision."""
        self._kept.append((self.revision, Published(revision, data)))
        self.revision = revision
        waiting, self._waiting = self._waiting, {}
        if waiting:
            self._wake(iter(waiting))

    async def changed(self) -> None:
        """Wait for the next change."""
        waiter = asyncio.get_running_loop().create_future()
        self._waiting[waiter] = None
        try:
            await waiter
        finally:
            self._waiting.pop(waiter, None)

    def after(self, revision: int | None) -> Sequence[Published]:
        """Return what a watcher at ``revision`` lacks: changes, or everything if it has nothing or lacks too much."""
        if revision == self.revision:
            return ()
        # The kept changes must begin at exactly the watcher's revision: applied to another one, absolute values would
        # still leave out the engines that changed between the two.
        changes = [published for base, published in self._kept if revision is not None and base >= revision]
        if changes and self._kept[-len(changes)][0] == revision:
            return changes
        return (Published(self.revision, self._whole(self.revision)),)

    def _wake(self, waiting: Iterator["asyncio.Future[None]"]) -> None:
        """Wake some of those that wait now, and the others in later turns of the event loop."""
        woken = list(islice(waiting, _WOKEN_TOGETHER))
        for waiter in woken:
            if not waiter.done():  # otherwise its watcher is gone
                waiter.set_result(None)
        if len(woken) == _WOKEN_TOGETHER:
            # With all of 200 watchers woken at once, turns of the loop were late by 0.19 s in 5 s of 10,000 picks a
            # second; spread over turns it was 0.04 to 0.06 s.
            asyncio.get_running_loop().call_soon(self._wake, waiting)
