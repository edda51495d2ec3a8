"""Decides when a failed call is retried."""

import random
import threading

from tokenloom.request.errors import TokenloomError

_MAX_WAIT = 10.0
_JITTER = 0.2


class Retries:
    """Holds the retry policy of one client. A call is retried only if the mesh asks for it (RetryInfo: full, down or
    shutting down), and only before the caller has received a part of the answer. Continuing an answer whose connection
    was cut is no retry: it gives the mesh no work.

    A budget for all calls keeps an overloaded mesh from receiving every request several times: each failure of the mesh
    costs one, each success restores a tenth, and below half of the budget failures are final. A failed connection costs
    nothing: many streams that lose one gateway together must not use up each other's retries.
    """

    def __init__(self, max_retries: int = 4, budget: float = 10.0) -> None:
        """``max_retries``: limit for one call; 0: none. ``budget``: twice the number of failures in a row, of
        all calls, that are retried."""
        self._max_retries = max_retries
        self._budget = budget
        self._left = budget
        self._lock = threading.Lock()  # a blocking client may be shared by threads

    @property
    def are_allowed(self) -> bool:
        """Whether a call may be made again at all."""
        return self._max_retries > 0

    def succeeded(self) -> None:
        with self._lock:
            self._left = min(self._left + 0.1, self._budget)

    def wait(
        self, error: TokenloomError, failures: int, seconds_left: float, *, reached_mesh: bool = True
    ) -> float | None:
        """Return the seconds until the next try, at least as many as the mesh requested; None: ``error`` is final.

        ``failures``: earlier failures of this call. ``seconds_left``: time until its deadline. ``reached_mesh``: False
        where the connection failed, which costs none of the budget: the mesh had no work with the call.
        """
        if error.retry_after is None:
            return None
        with self._lock:
            # Eight streams that lost one gateway together spent half of the budget on second attempts to connect, and
            # the last three of them failed while the gateway restarted.
            if reached_mesh:
                self._left = max(self._left - 1, 0.0)
            if failures >= self._max_retries or (reached_mesh and self._left < self._budget / 2):
                return None
        # Clients that were refused at the same time must not retry at the same time.
        wait = min(error.retry_after * 2**failures, max(_MAX_WAIT, error.retry_after))
        wait *= 1 + random.uniform(0, _JITTER)
        return wait if wait < seconds_left else None
