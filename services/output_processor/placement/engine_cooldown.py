"""Remembers which engines refused or failed a request of this process a moment ago. No I/O."""

from collections import OrderedDict
from collections.abc import Callable

from .last_snapshot import EngineKey

LEFT_OUT_SECONDS = 2.0
"""Long enough for a full engine to finish a few requests, short enough for one that was only cut off."""
MAX_LEFT_OUT = 1024
"""Engines remembered; the oldest are forgotten first."""


class EngineCooldown:
    """Holds the engines that requests should avoid for a while. ``clock``: monotonic seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._until: OrderedDict[EngineKey, float] = OrderedDict()  # in the order of expiry

    def __len__(self) -> int:
        return len(self._until)

    def add(self, key: EngineKey) -> None:
        """Leave out an engine for :data:`LEFT_OUT_SECONDS` from now on."""
        self._until[key] = self._clock() + LEFT_OUT_SECONDS
        self._until.move_to_end(key)
        while len(self._until) > MAX_LEFT_OUT:
            self._until.popitem(last=False)

    def now(self) -> frozenset[EngineKey]:
        """Return the engines to avoid now, and forget the others."""
        if not self._until:
            return frozenset()
        now = self._clock()
        while self._until and next(iter(self._until.values())) <= now:
            self._until.popitem(last=False)
        return frozenset(self._until)
