"""Limits the tokens that a tenant uses per second."""

import time
from collections.abc import Callable

from tokenloom.request.reservation import Reservation


class TokenBucket:
    """Holds tokens: it fills at a constant rate up to its size, and a request takes what it may need at most.

    What a request did not need returns to the bucket; what it needed beyond its reservation is subtracted, which may
    leave a debt that refuses further requests until the bucket has filled again.
    """

    def __init__(self, rate: float, burst: int, clock: Callable[[], float] = time.monotonic) -> None:
        """Start full. ``rate``: tokens per second, above 0. ``burst``: size in tokens. ``clock``: seconds."""
        self.rate = rate
        self.burst = burst
        self._clock = clock
        self._level: float = burst
        self._filled_at = clock()

    @property
    def level(self) -> float:
        """Tokens in the bucket; negative: a debt."""
        now = self._clock()
        self._level = min(self._level + (now - self._filled_at) * self.rate, self.burst)
        self._filled_at = now
        return self._level

    def wait_seconds(self, num_tokens: int) -> float:
        """Return the seconds after which the bucket will hold so many tokens; 0: it holds them now.

        ``num_tokens`` must be at most :attr:`burst`.
        """
        return max(num_tokens - self.level, 0.0) / self.rate

    def take(self, num_tokens: int) -> Reservation | None:
        """Take tokens, or return None and take none if the bucket holds less. What was taken returns to the bucket
        unless :meth:`spend` has subtracted it for good."""
        if num_tokens > self.level:
            return None
        # Reserved at admission: charged at the end, a tenant could begin any number of long outputs at once.
        self._level -= num_tokens
        return Reservation(self._take_back, num_tokens)

    def spend(self, num_tokens: int) -> None:
        """Subtract tokens that were used. To be called before the reservation for them is released: a bucket that is
        full in between would lose what returns to it."""
        self._level = self.level - num_tokens

    def _take_back(self, num_tokens: int) -> None:
        self._level = min(self.level + num_tokens, self.burst)
