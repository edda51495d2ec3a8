"""Shares the CPU time of a process out to the tenants and requests for which it works. Exists with ``--bill`` only.

What is shared out is what the kernel has counted, so the sum of all shares is the CPU time of the process.
"""

import os
import resource
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

OVERHEAD: Final = "(overhead)"
"""The tenant of CPU time that no request has caused: the start, idle times, health checks. No tenant has this name."""
OTHER: Final = "(other)"
"""The tenant under whose name those beyond :data:`MAX_TENANTS` are billed together."""
MAX_TENANTS: Final = 1000
_LOOK_NS = 1_000_000_000
"""How old a list of child processes may be."""
_SETTLE_NS = 50_000_000
"""Shares are computed anew from the work of all live requests at most this often, and a request that ends in between
pays the last price: with 1,000 live requests one computation takes 0.3 ms."""
_MOMENT_NS = 500_000_000
"""How long ago the last settlement may be for what was done since to be of the request that begins now."""
_QUIET_NS = 1_000_000_000
"""An idle time as long as this shows what the process takes without requests. In shorter ones, the ends of the requests
before them count too much."""
_SCHED_CLOCK = 2  # CPUCLOCK_SCHED of Linux


class ProcessCpu:
    """Reads the CPU time of this process and of all that it has started. On other systems than Linux, children count
    when they have ended."""

    def __init__(
        self,
        without: Callable[[], int | None] = lambda: None,
        now: Callable[[], int] = time.monotonic_ns,
        proc: Path = Path("/proc"),
    ) -> None:
        """``without``: returns the id of a child that is billed by itself, with its own children; None: there is
        none. ``now``: nanoseconds."""
        self._without = without
        self._now = now
        self._proc = proc
        self._children: list[int] = []
        self._looked_ns: int | None = None
        self._most = 0

    def read(self) -> int:
        """Return the nanoseconds so far; they never become fewer."""
        now = self._now()
        if self._looked_ns is None or now - self._looked_ns >= _LOOK_NS:
            self._looked_ns = now
            self._children = list(self._descendants(os.getpid()))
        ended = resource.getrusage(resource.RUSAGE_CHILDREN)
        total = time.process_time_ns() + round((ended.ru_utime + ended.ru_stime) * 1e9)
        for pid in self._children:
            try:
                total += time.clock_gettime_ns(_clock_of(pid))
            except OSError:
                self._looked_ns = None  # it has ended: once its parent has waited for it, it is among the ended ones
        self._most = max(self._most, total)  # between the two a child is nowhere
        return self._most

    def _descendants(self, pid: int) -> Iterator[int]:
        without = self._without()
        for listed in (self._proc / str(pid) / "task").glob("*/children"):
            try:
                children = [int(each) for each in listed.read_text().split()]
            except OSError:  # the thread has ended
                continue
            for child in children:
                if child != without:
                    yield child
                    yield from self._descendants(child)


def _clock_of(pid: int) -> int:
    """Return the clock of another process's CPU time, as glibc's ``clock_getcpuclockid`` makes it."""
    return (~pid << 3) | _SCHED_CLOCK


class CpuAccount:
    """Holds what one request has caused in this process.

    Attributes:
        spent_ns: Its CPU time so far, as of the last settlement.
    """

    __slots__ = ("_bill", "_seen", "_work", "spent_ns", "tenant")

    def __init__(self, bill: "CpuBill", tenant: str, work: Callable[[], float]) -> None:
        """``work``: returns the units of work done so far, which never become fewer."""
        self._bill = bill
        self._work = work
        self._seen = 0.0
        self.tenant = tenant
        self.spent_ns = 0

    def take_work(self) -> float:
        """Return the units since the last call."""
        work = self._work()
        units, self._seen = work - self._seen, work
        return max(units, 0.0)

    def charge(self) -> int:
        """Charge the request for its work up to now, and return its CPU time in nanoseconds."""
        return self._bill.charge(self)

    def close(self) -> int:
        """Charge the request for the last time, and return the same. Idempotent."""
        return self._bill.charge(self, closes=True)


class CpuBill:
    """Shares CPU time out by work: a request pays for its part of the units that all requests together have done since
    the last settlement. Usable from several threads: a scrape settles too."""

    def __init__(self, read_cpu: Callable[[], int], now: Callable[[], int] = time.monotonic_ns) -> None:
        """``read_cpu``: returns the nanoseconds of CPU time so far. ``now``: nanoseconds."""
        self._read_cpu = read_cpu
        self._now = now
        self._lock = threading.Lock()
        self._live: dict[CpuAccount, None] = {}  # bounded by the live requests
        self._calls: dict[str, float] = {}  # work without an account since the last settlement, by tenant
        self._spent: dict[str, int] = {OVERHEAD: 0}
        self._cpu_ns = 0
        self._pool_ns = 0  # read, and not shared out yet
        self._read_ns = self._settled_ns = now()
        self._price = 0.0  # nanoseconds of a unit at the last settlement
        self._idle_share = 0.0  # cores that an idle process takes, once that is known
        self._quiet_ns = self._quiet_cpu_ns = 0  # of the idle time so far, and of what it took
        self._has_served = False

    def open(self, tenant: str, work: Callable[[], float]) -> CpuAccount:
        """Return the account of a request that begins; its owner closes it. ``work``: as of :class:`CpuAccount`."""
        account = CpuAccount(self, tenant, work)
        with self._lock:
            is_idle = not self._live and not self._calls
            # What was done since requests lived a moment ago, beyond what an idle process takes, was the end of those
            # and the arrival of this one: at a few requests a second most of what they cost would be overhead.
            if is_idle and self._has_served and self._now() - self._settled_ns <= _MOMENT_NS:
                self._collect()
            elif is_idle or self._is_due():
                self._settle()
            self._live[account] = None
        return account

    def add(self, tenant: str, units: float) -> None:
        """Bill work of a call that does not learn what it has cost."""
        with self._lock:
            self._calls[tenant] = self._calls.get(tenant, 0.0) + units
            if self._is_due():
                self._settle()

    def charge(self, account: CpuAccount, *, closes: bool = False) -> int:
        """Charge one request up to now. ``closes``: it has ended."""
        with self._lock:
            if account in self._live:
                if self._is_due() or len(self._live) == 1 or not self._price:
                    self._settle()
                else:
                    self._collect()
                    self._pay(account, self._price * account.take_work())
                if closes:
                    del self._live[account]
            return account.spent_ns

    def settle(self) -> None:
        """Share out what was not yet. To be called a few times a second: work is then paid at the price of its time."""
        with self._lock:
            self._settle()

    def totals(self) -> dict[str, int]:
        """Return the nanoseconds of each tenant, :data:`OVERHEAD` included. Together they are the CPU time up to now,
        without what waits for the first work of a request."""
        with self._lock:
            self._settle()
            return dict(self._spent)

    def _is_due(self) -> bool:
        return self._now() - self._settled_ns >= _SETTLE_NS

    def _settle(self) -> None:
        """Share out what was read since the last settlement. Without work it waits for some while requests live."""
        is_idle = not self._live and not self._calls
        elapsed = self._collect(is_idle=is_idle)
        self._settled_ns = self._read_ns
        if is_idle:
            self._note_idle(elapsed)
            return
        self._has_served = True
        self._quiet_ns = self._quiet_cpu_ns = 0
        works = [(account, account.take_work()) for account in self._live]
        total = sum(units for _, units in works) + sum(self._calls.values())
        if not total:
            return
        self._price = price = self._pool_ns / total
        for account, units in works:
            self._pay(account, price * units)
        calls, self._calls = self._calls, {}
        for tenant, units in calls.items():
            share = min(int(price * units), self._pool_ns)
            self._pool_ns -= share
            self._add(tenant, share)

    def _note_idle(self, elapsed: int) -> None:
        """Bill an idle time to no tenant, and learn from it what the process takes without requests."""
        if self._has_served:  # the start takes more
            self._quiet_ns += elapsed
            self._quiet_cpu_ns += self._pool_ns
            if self._quiet_ns >= _QUIET_NS:
                self._idle_share = self._quiet_cpu_ns / self._quiet_ns
                self._quiet_ns = self._quiet_cpu_ns = 0
        self._add(OVERHEAD, self._pool_ns)
        self._pool_ns = 0

    def _collect(self, *, is_idle: bool = False) -> int:
        """Read the CPU time, and return the nanoseconds since the reading before. While requests live, what an idle
        process takes in such a time is overhead."""
        cpu, now = self._read_cpu(), self._now()
        spent, elapsed = cpu - self._cpu_ns, now - self._read_ns
        self._cpu_ns, self._read_ns = cpu, now
        if self._idle_share and not is_idle:
            idle = min(int(self._idle_share * elapsed), spent)
            self._add(OVERHEAD, idle)
            spent -= idle
        self._pool_ns += spent
        return elapsed

    def _pay(self, account: CpuAccount, nanoseconds: float) -> None:
        share = min(int(nanoseconds), self._pool_ns)
        self._pool_ns -= share
        account.spent_ns += share
        self._add(account.tenant, share)

    def _add(self, tenant: str, nanoseconds: int) -> None:
        if tenant not in self._spent and len(self._spent) > MAX_TENANTS:
            tenant = OTHER
        self._spent[tenant] = self._spent.get(tenant, 0) + nanoseconds
