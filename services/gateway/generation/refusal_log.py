"""Logs refusals for lack of capacity, a line for many."""

import logging
from collections.abc import Callable
from typing import Final

log = logging.getLogger(__name__)

LOG_SECONDS: Final = 10.0
"""Refusals for lack of capacity are logged at most once in this time: a line for each costs more than the refusal."""


class RefusalLog:
    """Counts refused requests between two lines."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """``clock``: monotonic seconds."""
        self._clock = clock
        self._logged_at = -LOG_SECONDS
        self._num_refused = 0

    def add(self, message: str) -> None:
        """Count a refusal, and log it with those since the last line if that is old enough."""
        self._num_refused += 1
        now = self._clock()
        if now - self._logged_at >= LOG_SECONDS:
            log.warning("requests refused since the last such line: %d; %s", self._num_refused, message)
            self._logged_at, self._num_refused = now, 0
