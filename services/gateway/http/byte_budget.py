"""Limits the bytes that request bodies hold at the same time."""

from tokenloom.request.errors import ResourceExhausted
from tokenloom.request.reservation import AdmissionLimit, Reservation

RETRY_SECONDS = 1.0
"""After this time, a request that found no room may be sent again."""


class ByteBudget(AdmissionLimit):
    """Counts the bytes that the gateway holds."""

    def reserve(self, num_bytes: int) -> Reservation:
        """Take room for so many bytes. Raises ``ResourceExhausted`` if the rest of the budget is smaller."""
        if (reserved := self.take(num_bytes)) is None:
            message = "the gateway holds as many bytes of request bodies as it may; retry"
            raise ResourceExhausted(message, retry_after=RETRY_SECONDS)
        return reserved
