"""Limits the tokens that a tenant uses per second."""

import time
from collections.abc import Callable


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

    def reserve(self, num_tokens: int) -> float:
        """Take tokens and return 0, or take none and return the seconds after which the bucket will hold enough.

        ``num_tokens`` must be at most :attr:`burst`.
        """
        missing = num_tokens - self.level
        if missing > 0:
            return missing / self.rate
        self._level -= num_tokens
        return 0.0

    def settle(self, reserved: int, used: int) -> None:
        """Replace a reservation by what was used."""
        self._level = min(self.level + reserved - used, self.burst)
