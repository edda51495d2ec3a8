"""Limits the retries inside the mesh, so that they never multiply the work of a mesh that is short of capacity."""

from collections.abc import Callable
from typing import Final

from tokenloom.request.errors import TokenloomError, Unavailable

RETRIES_PER_REQUEST: Final = 0.1
"""Each request earns a tenth of a retry."""
RETRIES_PER_SECOND: Final = 1.0
"""What the budget earns without requests, so that a mesh with little traffic may retry too."""
MAX_RETRIES: Final = 10.0
"""Retries that the budget holds at most: as many may happen at once after a quiet time."""


class RetryBudget:
    """Holds the retries that one part of the mesh may still make. A part has one budget for all its requests.

    These rules apply to a failed attempt, in this order:

    1. An overload (``ResourceExhausted``, which includes a tenant's quota) is never retried: the other parts of the
       mesh have the same load, and the client's Retry-After says when there will be room.
    2. An error that every part would answer in the same way is never retried: only ``Unavailable``, which includes
       ``TryElsewhere``, says that another part may succeed.
    3. The first retry of a request is free. When a part dies, each of its requests moves once, however many there are,
       which at most doubles their work.
    4. Every further retry of the same request takes one from the budget: at most 10 % of the requests, plus a small
       reserve. When parts seem to die because they are overloaded, their requests therefore do not go around in
       circles.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        """Start with the reserve full. ``clock``: monotonic seconds."""
        self._clock = clock
        self._left = MAX_RETRIES
        self._earned_at = clock()

    @property
    def left(self) -> float:
        """Retries that the budget holds now."""
        now = self._clock()
        self._left = min(self._left + (now - self._earned_at) * RETRIES_PER_SECOND, MAX_RETRIES)
        self._earned_at = now
        return self._left

    def add_request(self) -> None:
        """Count a new request, which earns its share of a retry."""
        self._left = min(self._left + RETRIES_PER_REQUEST, MAX_RETRIES)

    def allow(self, error: TokenloomError, *, num_retries: int) -> bool:
        """Return whether a request may be tried again after ``error``, and charge the budget if this retry costs.

        ``num_retries``: how often this request was retried before, for any reason.
        """
        if not isinstance(error, Unavailable):
            return False
        if num_retries == 0:
            return True
        if self.left < 1:
            return False
        self._left -= 1
        return True
