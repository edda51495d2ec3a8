"""Limits the bytes that request bodies hold at the same time."""

from tokenloom.request.errors import ResourceExhausted

RETRY_SECONDS = 1.0
"""After this time, a request that found no room may be sent again."""


class ByteBudget:
    """Counts the bytes that are reserved at present.

    Attributes:
        limit: How many bytes may be reserved at the same time.
        reserved: How many bytes are reserved.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.reserved = 0

    def reserve(self, n: int) -> None:
        """Reserve ``n`` more bytes, which :meth:`release` must return. Raises ``ResourceExhausted`` if the rest of the
        budget is smaller; then nothing is reserved."""
        if self.reserved + n > self.limit:
            message = "the gateway holds as many bytes of request bodies as it may; retry"
            raise ResourceExhausted(message, retry_after=RETRY_SECONDS)
        self.reserved += n

    def release(self, n: int) -> None:
        """Return ``n`` bytes that were reserved."""
        self.reserved -= n
