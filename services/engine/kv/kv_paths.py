"""Which transports to ask an owner of KV for, by what is known of the path to it."""

import time
from collections.abc import Callable, Sequence

from .kv_peers import Owner

RETRY_SECONDS = 60.0
"""After which a transport that failed may be asked for again: whatever stood in its way may be gone."""
_SAME_HOST = ("shm",)
"""Transports that reach no further than the host."""


class KVPaths:
    """Whether two engines can share memory, say, is known when it failed: equal hosts prove nothing in containers."""

    def __init__(self, transports: Sequence[str], host: str, clock: Callable[[], float] = time.monotonic) -> None:
        """``transports``: this engine's, best first; ``host``: its own, as in ``EngineIdentity``."""
        self._transports = tuple(transports)
        self._host = host
        self._clock = clock
        self._failed: dict[tuple[str, int, str], float] = {}
        """Engine, epoch and transport → until when it is avoided. What is past goes with the next failure."""

    def to(self, owner: Owner) -> list[str]:
        """Transports for this owner, best first; those that failed only when no other is left."""
        near = [name for name in self._transports if owner.host == self._host or name not in _SAME_HOST]
        now = self._clock()
        return [name for name in near if self._failed.get((owner.engine_id, owner.epoch, name), now) <= now] or near

    def note_failure(self, owner: Owner, transport: str) -> None:
        """Blocks of this owner could not be read that way."""
        now = self._clock()
        self._failed = {key: until for key, until in self._failed.items() if until > now}
        self._failed[owner.engine_id, owner.epoch, transport] = now + RETRY_SECONDS
