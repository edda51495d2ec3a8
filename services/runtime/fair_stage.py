"""A stage that tenants share: what all requests need and only a few can have at a time, such as a tokenizer.

One request may cost a thousand times as much as another one, so turns in the order of arrival would not be fair.
"""

import asyncio
from collections import Counter, deque
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final

from tokenloom.request import errors
from tokenloom.request.limits import TenantTurns

if TYPE_CHECKING:
    from tokenloom.process.cpu_bill import CpuAccount, CpuBill


class FairStage(TenantTurns):
    """Lets a limited number of calls run at a time; the others wait for their tenants' turns.

    The cost of what runs and waits is limited too, so that a call is refused before anything is spent on it: a tenant
    may hold at most as much as is free. It belongs to one event loop.
    """

    def __init__(
        self, num_places: int, what: str, *, max_waiting: int, max_cost: int, leaves_spare: bool = False
    ) -> None:
        """Args:
        what: What waits, for errors.
        max_waiting: Calls that may wait; more are refused.
        max_cost: Of all calls that run and wait.
        leaves_spare: Whether a tenant leaves one place free; see :class:`TenantTurns`.
        """
        super().__init__(num_places if leaves_spare else None)
        self._num_free = num_places
        self.num_kept = 0
        """Places that stay free now."""
        self._what = what
        self._max_waiting = max_waiting
        self._max_cost = self._cost_left = max_cost
        self._held: Counter[str] = Counter()  # costs; without tenants that hold nothing
        self._waiting: dict[str, deque[tuple[asyncio.Future[None], int]]] = {}  # no queue is empty
        self.num_waiting = 0
        """Calls that wait."""

    async def begin(self, tenant: str, cost: int) -> None:
        """Wait for a turn, which the caller ends by :meth:`end` with the same arguments, unless this raises.

        ``cost``: in the unit of ``max_cost``, at least 1. Raises ``ResourceExhausted`` at once if there is no room for
        the call.
        """
        is_idle = self._cost_left == self._max_cost
        # A call that exceeds the whole limit runs alone.
        if self._held[tenant] + cost > self._cost_left and not is_idle:
            raise errors.ResourceExhausted(f"Too many or too large {self._what} already wait; retry.")
        self._cost_left -= cost
        self._held[tenant] += cost
        if not is_idle and (self.num_waiting or self._num_free <= self.num_kept or self._most is not None):
            await self._wait(tenant, cost)
            return
        # As `start`, written out: nearly all turns begin at once.
        self._num_free -= 1
        self._num_running[tenant] += 1
        self._now = max(self._used.get(tenant, 0.0), self._now)
        self._used[tenant] = self._now + cost
        if tenant == self._last:
            self._num_in_row += 1
        else:
            self._change(tenant)

    def end(self, tenant: str, cost: int) -> None:
        """End a turn, and begin those that have become possible."""
        self._num_free += 1
        self._num_running[tenant] -= 1
        self._cost_left += cost
        self._held[tenant] -= cost
        if self.num_waiting:
            self._start_next()
        elif self._cost_left == self._max_cost:  # as `forget`: nothing runs any more
            self._used.clear()
            self._held.clear()
            self._now = 0.0

    async def _wait(self, tenant: str, cost: int) -> None:
        """Wait in the tenant's queue. What was taken for the call is given back if this raises."""
        begun: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        try:
            if self.num_waiting >= self._max_waiting:
                raise errors.ResourceExhausted(f"{self.num_waiting} {self._what} already wait; retry.")
            if tenant not in self._waiting:
                self.wait(tenant)
            self._waiting.setdefault(tenant, deque()).append((begun, cost))
            self.num_waiting += 1
            self._start_next()
            if not begun.done():
                await begun
        except BaseException:
            if begun.done() and not begun.cancelled():  # its turn has begun in the same moment
                self.end(tenant, cost)
            else:
                self._cost_left += cost
                self._held[tenant] -= cost
                self._leave(tenant, begun, cost)
            raise

    def _start_next(self) -> None:
        """Begin the turns that are possible now."""
        while self._num_free > self.num_kept and (tenant := self.next(self._waiting)) is not None:
            begun, cost = self._waiting[tenant][0]
            if begun.cancelled():  # its task has not run since
                self._leave(tenant, begun, cost)
                continue
            self._num_free -= 1
            self.start(tenant, cost)
            self._leave(tenant, begun, cost)
            if tenant in self._waiting:
                self._waiting[tenant] = self._waiting.pop(tenant)  # among equals, the next turn is another tenant's
            begun.set_result(None)

    def _leave(self, tenant: str, begun: "asyncio.Future[None]", cost: int) -> None:
        """Take a call out of its queue, if it is there."""
        queue = self._waiting.get(tenant)
        if queue is None or (begun, cost) not in queue:
            return
        queue.remove((begun, cost))
        self.num_waiting -= 1
        if not queue:
            del self._waiting[tenant]
            self.forget(self._waiting)


TURN_CPU_NS: Final[ContextVar[int]] = ContextVar("TURN_CPU_NS", default=0)
"""CPU time of the last turn of this task at a stage that bills its turns."""


class BilledStage(FairStage):
    """A stage that bills the turns of each tenant by their costs, while they last. A task has one turn at a time."""

    def __init__(self, bill: "CpuBill", turn_cost: int, *args: Any, **limits: Any) -> None:
        """``turn_cost``: what a turn takes of the processor whatever its own cost is, in the same unit. ``args``,
        ``limits``: as of :class:`FairStage`."""
        super().__init__(*args, **limits)
        self._bill = bill
        self._turn_cost = turn_cost
        self._accounts: dict[asyncio.Task[Any] | None, CpuAccount] = {}  # of turns that have begun

    async def begin(self, tenant: str, cost: int) -> None:
        await super().begin(tenant, cost)
        self._accounts[asyncio.current_task()] = self._bill.open(tenant, lambda: cost + self._turn_cost)

    def end(self, tenant: str, cost: int) -> None:
        # Without an account the turn has begun in the moment in which its task was cancelled: nothing was done in it.
        if (account := self._accounts.pop(asyncio.current_task(), None)) is not None:
            TURN_CPU_NS.set(account.close())
        super().end(tenant, cost)
