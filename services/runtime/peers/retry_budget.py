"""Limits the retries inside the mesh, so that they never multiply the work of a mesh that is short of capacity."""

from collections.abc import Callable
from enum import Enum, auto
from typing import Final

from tokenloom.request.errors import EngineLacks, ResourceExhausted, TokenloomError, TryElsewhere, Unavailable

RETRIES_PER_REQUEST: Final = 0.1
"""Each request earns a tenth of a retry."""
RETRIES_PER_SECOND: Final = 1.0
"""What the budget earns without requests, so that a mesh with little traffic may retry too."""
MAX_RETRIES: Final = 10.0
"""Retries that the budget holds at most: as many may happen at once after a quiet time."""


class Cause(Enum):
    """Says why a part of the mesh does not run a request, or the rest of it."""

    GONE = auto()
    """It died, its connection ended, or it leaves: none of its work continues there."""
    SILENT = auto()
    """It does not answer in time, or failed. It may be overloaded, and may still compute."""
    FULL = auto()
    """It has no room; another one may."""
    UNFIT = auto()
    """It does not do what the request needs; one of another kind may. It has computed nothing."""


def cause_of(error: TokenloomError) -> Cause | None:
    """Return why another part may succeed where one ended a request with ``error``; None: every part would answer in
    the same way, or the request ran into a limit of its tenant."""
    if isinstance(error, TryElsewhere):
        return Cause.GONE
    if isinstance(error, EngineLacks):
        return Cause.UNFIT
    if isinstance(error, Unavailable):
        return Cause.SILENT
    return Cause.FULL if type(error) is ResourceExhausted else None


class RetryBudget:
    """Holds the retries that one part of the mesh may still make. A part has one budget for all its requests.

    1. A request moves for free when the part that had it is gone: its work is gone too, so nothing is multiplied,
       however many requests move, and however often.
    2. When the part may still compute, the first retry of a request is free, and each further one takes one from the
       budget until the request has made progress: at most 10 % of the requests, plus a small reserve. When parts seem
       to die because they are overloaded, their requests therefore do not go around in circles. One that was silent
       and is connected again ends what it still computes, so that its requests move for free as well.
    3. A request that a full part refused may take the room that another one has. This always takes one from the budget:
       when all parts are full, requests end with the overload instead of asking each of them.

    When the budget is empty, a request that no part has accepted ends with the error. One that was accepted waits until
    the budget has earned a retry: it is never lost for lack of it.
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

    def take(self) -> bool:
        """Take one retry. Returns False if the budget holds none."""
        if self.left < 1:
            return False
        self._left -= 1
        return True


def _is_gone() -> bool:
    return False


class RetryDebt:
    """Says whether the next attempt at one request has to be paid from the budget first.

    Attributes:
        is_back: Returns whether the part that has just fallen silent with the request is connected again.
    """

    __slots__ = ("_budget", "_num_failures", "_owes", "is_back")

    def __init__(self, budget: RetryBudget) -> None:
        self._budget = budget
        self._num_failures = 0  # in a row, without progress between them
        self._owes = False
        self.is_back = _is_gone

    def failed(self, cause: Cause, *, made_progress: bool = False, is_back: Callable[[], bool] | None = None) -> None:
        """Note that an attempt has failed. ``made_progress``: after output of the request. ``is_back``: as the
        attribute; None: the part was not silent."""
        self.is_back = is_back or _is_gone
        if made_progress:
            self._num_failures = 0
        # A lost part frees all of its requests at once, so moving them multiplies nothing. A full part always costs,
        # because otherwise each request of an overloaded mesh would ask every part in turn.
        self._owes = cause is Cause.FULL or (cause is Cause.SILENT and self._num_failures > 0)
        self._num_failures += 1

    def pay(self) -> bool:
        """Return whether the next attempt may be made now. A second call for the same attempt takes nothing more."""
        # Where a whole mesh had been starved twice in 12 s, requests went on one a second although all links were open
        # again, and the calls that sought them meanwhile got 404.
        if self._owes and (self.is_back() or self._budget.take()):
            self._owes = False
        return not self._owes
