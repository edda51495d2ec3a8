"""When a call that failed is made again."""

import random
import threading

from tokenloom.request.errors import TokenloomError

_MAX_WAIT = 10.0
_JITTER = 0.2


class Retries:
    """Of one client. Only what the mesh calls worth another try (RetryInfo: full, gone, going) is tried again, and only
    while nothing of the answer has been handed out.

    A budget for all calls together keeps a mesh in trouble from getting every request several times: each failure
    costs one, each success gives a tenth back, and below half of it failures are final.
    """

    def __init__(self, max_retries: int = 4, budget: float = 10.0) -> None:
        """``max_retries``: of one call; 0 is none. ``budget``: failures in a row, of all calls, twice the number of
        those that are tried again."""
        self._max_retries = max_retries
        self._budget = budget
        self._left = budget
        self._lock = threading.Lock()  # a blocking client may be shared by threads

    def succeeded(self) -> None:
        with self._lock:
            self._left = min(self._left + 0.1, self._budget)

    def wait(self, error: TokenloomError, failures: int, seconds_left: float) -> float | None:
        """Seconds until the next try, at least as many as the mesh said; None: ``error`` is final.

        ``failures``: of this call before this one. ``seconds_left``: of its deadline.
        """
        if error.retry_after is None:
            return None
        with self._lock:
            self._left = max(self._left - 1, 0.0)
            if failures >= self._max_retries or self._left < self._budget / 2:
                return None
        # Clients that were refused together must not come back together.
        wait = min(error.retry_after * 2**failures, max(_MAX_WAIT, error.retry_after))
        wait *= 1 + random.uniform(0, _JITTER)
        return wait if wait < seconds_left else None
