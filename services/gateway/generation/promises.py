"""Promises of first tokens: a request with a deadline for its first token is admitted only if it will keep it. How
wrong a forecast may be is learned from the forecasts before it."""

import math
from bisect import insort
from collections import deque
from collections.abc import Callable
from random import Random
from typing import Final

from tokenloom.request import errors
from tokenloom.request.limits import TTFT_DEADLINE

from ..metrics.gateway_metrics import PromiseOutcome

_REMEMBERED: Final = 512
"""Forecasts of which it is remembered how wrong they were."""
_ENOUGH: Final = 200
_QUANTILE: Final = 0.995
"""The part of the forecasts that the margin must have covered: 99 % of the promises are to be kept."""
_BASE_SECONDS: Final = 0.1
"""Errors are measured against the forecast and this: the smallest forecasts are wrong by what no queue explains."""
_UNKNOWN: Final = 1.0
"""The relative error that is possible while fewer than :data:`_ENOUGH` forecasts are remembered, at least."""


class Forecast:
    """What is expected of an admitted request, until it has its first token.

    Attributes:
        seconds: Until the first token.
        deadline: The seconds that were promised; None: nothing was.
        begun_at: When it was made.
    """

    __slots__ = ("_owner", "begun_at", "deadline", "seconds")

    def __init__(self, owner: "Promises", seconds: float, deadline: float | None, begun_at: float) -> None:
        self._owner = owner
        self.seconds = seconds
        self.deadline = deadline
        self.begun_at = begun_at

    def begin(self) -> None:
        """Note that the first token has come."""
        self._owner.begun(self)

    def end(self) -> None:
        """Note that the request has ended without one."""
        self._owner.ended(self)


class Promises:
    """Decides which deadlines can be promised, and counts which promises are kept."""

    def __init__(self, clock: Callable[[], float], draw: Random, count: Callable[[PromiseOutcome], None]) -> None:
        """``clock``: monotonic seconds. ``draw``: spreads the times of retries. ``count``: called once for each request
        that has a deadline."""
        self._clock = clock
        self._draw = draw
        self._count = count
        self._errors: deque[float] = deque()  # relative ones, in the order in which they came
        self._sorted: list[float] = []

    def open(self, seconds: float | None, deadline: float | None) -> Forecast:
        """Return the forecast of a request that begins now. ``seconds``: those until its first token, as estimated;
        None: no engine serves. ``deadline``: those that it may take; None: the request only teaches how wrong forecasts
        are.

        Raises ``ResourceExhausted``, with the time after which a retry may succeed, if the deadline may be missed.
        """
        if seconds is None:  # one may take minutes to start, and no part knows whether one does
            self._count("refused")
            message = f"{TTFT_DEADLINE}: no engine serves now, and no first token can be promised. Retry later."
            raise errors.ResourceExhausted(message, TTFT_DEADLINE, retry_after=self._draw.uniform(0.5, 1.5))
        if deadline is not None and (latest := seconds + self.margin(seconds)) > deadline:
            self._count("refused")
            retry_after = max(latest - deadline, 1.0) * self._draw.uniform(0.5, 1.5)
            raise errors.ResourceExhausted(
                f"{TTFT_DEADLINE}: the first token would come after about {seconds:.3g} s, and {latest:.3g} s at the "
                f"latest; {deadline:.3g} s cannot be promised. Retry later.",
                TTFT_DEADLINE,
                retry_after=retry_after,
            )
        return Forecast(self, seconds, deadline, self._clock())

    def margin(self, seconds: float) -> float:
        """Return how much longer than a forecast of ``seconds`` the first token may take."""
        count = len(self._sorted)
        if count < _ENOUGH:
            error = max(self._sorted[-1], _UNKNOWN) if count else _UNKNOWN
        else:  # one more is about to come, which may be worse than all of them
            error = self._sorted[min(math.ceil((count + 1) * _QUANTILE), count) - 1]
        return max(error, 0.0) * (seconds + _BASE_SECONDS)

    def begun(self, forecast: Forecast) -> None:
        """Learn from a request that has its first token."""
        seconds = self._clock() - forecast.begun_at
        if forecast.deadline is not None:
            self._count("kept" if seconds <= forecast.deadline else "broken")
        error = (seconds - forecast.seconds) / (forecast.seconds + _BASE_SECONDS)
        self._errors.append(error)
        insort(self._sorted, error)
        if len(self._errors) > _REMEMBERED:
            self._sorted.remove(self._errors.popleft())

    def ended(self, forecast: Forecast) -> None:
        """Count a promise that was not kept when its request ended; a client that left sooner gets nothing counted."""
        if forecast.deadline is not None and self._clock() - forecast.begun_at > forecast.deadline:
            self._count("broken")
