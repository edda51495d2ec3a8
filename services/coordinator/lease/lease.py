"""What all leases have in common."""

from typing import Protocol


class LeaderLease(Protocol):
    """Is held by one process at a time."""

    async def acquire(self) -> None:
        """Return when this process holds the lease, however long that takes."""

    async def keep(self) -> None:
        """Keep the lease until cancelled. Raises ``FailedPrecondition`` when another process may have it."""

    async def release(self) -> None:
        """Let another process have the lease at once. Idempotent."""
