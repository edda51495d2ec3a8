"""Decides how often a process asks whether its peers are there, and how long it waits for the answers."""

import asyncio
from typing import NoReturn

LINKS_PER_SECOND = 64
"""Pings that a process sends in a second, about, and as many it answers. Up to so many channels each ask every second:
as measured, they notice a dead or frozen peer within 2.6 s."""
LONGEST_SECONDS = 10.0
"""The longest interval, as long as any peer may be silent."""
_ANSWER_SECONDS = 1.5
_LATE_TURNS = 2.0
"""A process that waited for its turn answers late, and reads answers late: both may happen at the same time."""
_LOOK_SECONDS = 0.25
_HALF_LIFE_SECONDS = 30.0
"""What made a process wait is likely to come back: its patience shrinks by half in this time."""


def patient_options() -> list[tuple[str, int]]:
    """Return gRPC's options for a server of clients that are no parts of the mesh, or of thousands whose messages show
    that they are there: one that is starved for seconds is not cut off, and pings take little time. One that vanished
    without closing its connection is given up after 22 s at most."""
    return _options(LONGEST_SECONDS, LONGEST_SECONDS)


class Keepalive:
    """Follows how late this process's event loop gets its turns: its gRPC threads share the starved processor.

    A channel keeps what it was opened with, so the patience is that of channels which open from then on: those that
    starvation broke do not break again in a circle.
    """

    def __init__(self) -> None:
        self._late_seconds = 0.0

    def options(self, num_links: int) -> list[tuple[str, int]]:
        """Return gRPC's options for one more channel. ``num_links``: channels that are open."""
        # A process with a thousand links that pinged each every second would spend a part of its core on pings alone.
        interval = min(max(1.0, num_links / LINKS_PER_SECOND), LONGEST_SECONDS)
        return _options(interval, min(_LATE_TURNS * self._late_seconds, LONGEST_SECONDS))

    def was_late(self, seconds: float) -> None:
        """Note by how much a turn came later than it was due. To be called every :data:`_LOOK_SECONDS`."""
        # Without the memory, a channel that opens in a short quiet moment would again be as impatient as the one that
        # broke.
        fading = self._late_seconds * 0.5 ** (_LOOK_SECONDS / _HALF_LIFE_SECONDS)
        self._late_seconds = max(seconds if seconds > _LOOK_SECONDS else 0.0, fading if fading > 0.01 else 0.0)

    async def run(self) -> NoReturn:
        """Follow the running event loop until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + _LOOK_SECONDS
            await asyncio.sleep(_LOOK_SECONDS)
            self.was_late(loop.time() - due)


def _options(interval: float, extra: float) -> list[tuple[str, int]]:
    """Return gRPC's options for a ping every ``interval`` seconds; an answer may come ``extra`` seconds late."""
    return [
        ("grpc.keepalive_time_ms", round(1000 * interval)),
        ("grpc.keepalive_timeout_ms", round(1000 * (1.0 + extra))),
        # An idle channel must find its dead peer before the next request does, not with it.
        ("grpc.keepalive_permit_without_calls", 1),
        # By default gRPC stops to ping after two pings without data, and idle links would no longer be watched.
        ("grpc.http2.max_pings_without_data", 0),
        # Keepalive alone does not notice a stopped process; this does, within 2.6 s.
        ("grpc.http2.ping_timeout_ms", round(1000 * (_ANSWER_SECONDS + extra))),
    ]
