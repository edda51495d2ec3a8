"""Decides which grammar is compiled next: tenants take turns, and the time of their compiles counts for them.

This is start-time fair queueing. Each tenant has an account of the seconds that its grammars took; the tenant that has
used the least is next. A tenant that comes back after a while starts where the tenants are that are served now, so
that it neither saves up turns nor pays for what it used while no other tenant waited.
"""

from collections import Counter
from concurrent.futures import Future

from ..data.core_sampling_params import StructuredOutput
from .compiler_process import CompilerUnavailable
from .grammar_backend import CompiledGrammar

MAX_PENDING = 1024
"""Limits the grammars of all tenants that wait for a compiler."""
# Behind 24 abandoned constraints of another tenant that take their full time, `[0-9]{4}` once took 63 s; behind 256 it
# takes 0.7 s, and 0.9 s if their clients still wait (python -m tests.soak.bombs).
MAX_PENDING_PER_TENANT = 256
"""Limits those of one tenant, so that no tenant fills the queue for the others."""


class CompileQueueFull(CompilerUnavailable):
    """Too many grammars wait already. ``is_tenants``: those of the request's own tenant."""

    def __init__(self, message: str, *, is_tenants: bool) -> None:
        super().__init__(message)
        self.is_tenants = is_tenants


class Compile:
    """Holds a constraint that waits for a compiler or is being compiled, and the requests that wait for it."""

    __slots__ = ("_num_waiters", "_waiters", "constraint", "future", "payer")

    def __init__(self, constraint: StructuredOutput) -> None:
        self.constraint = constraint
        self.future: Future[CompiledGrammar] = Future()
        self.payer: str | None = None
        """The tenant at whose turn it was begun; None until then."""
        self._waiters: dict[str, str] = {}  # tenants by request id
        self._num_waiters: Counter[str] = Counter()

    @property
    def is_wanted(self) -> bool:
        """Whether any live request waits for it."""
        return bool(self._waiters)

    def join(self, request_id: str, tenant: str) -> None:
        """Add a request that waits for the grammar."""
        self._waiters[request_id] = tenant
        self._num_waiters[tenant] += 1

    def leave(self, request_id: str) -> str | None:
        """Remove a request. Returns its tenant if no other request of that tenant waits for the grammar."""
        tenant = self._waiters.pop(request_id, None)
        if tenant is None:
            return None
        self._num_waiters[tenant] -= 1
        if self._num_waiters[tenant]:
            return None
        del self._num_waiters[tenant]
        return tenant


class CompileQueue:
    """Keeps compiles in the order of their arrival within each tenant. A compile that several tenants want waits in the
    queue of each, so that it begins at the first turn of any of them."""

    def __init__(self, max_pending: int = MAX_PENDING, max_pending_per_tenant: int = MAX_PENDING_PER_TENANT) -> None:
        self._max_pending = max_pending
        self._max_per_tenant = max_pending_per_tenant
        # By tenant; the tenant that was served last is at the end. No queue is empty.
        self._waiting: dict[str, dict[StructuredOutput, Compile]] = {}
        self._num_running: Counter[str] = Counter()
        self._accounts: dict[str, float] = {}  # seconds; of tenants that wait, run, or have used more than the present
        self._now = 0.0
        """The account of the tenant that was served last, when it was served."""

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def add(self, compile_: Compile, tenant: str) -> None:
        """Queue a compile for a tenant; do nothing if it is queued for the tenant. Raises ``CompileQueueFull``."""
        waiting = self._waiting.get(tenant, {})
        if compile_.constraint in waiting:
            return
        if len(waiting) >= self._max_per_tenant:
            raise CompileQueueFull(
                f"{len(waiting)} grammars of this tenant already wait to be compiled on this engine; the limit of a "
                f"tenant is {self._max_per_tenant}. Retry later.",
                is_tenants=True,
            )
        if len(self) >= self._max_pending:
            raise CompileQueueFull(
                f"{len(self)} grammars already wait to be compiled on this engine; its limit is {self._max_pending}. "
                "Retry later.",
                is_tenants=False,
            )
        if not waiting:
            self._waiting[tenant] = waiting
            # A tenant that was away starts beside the one served last: turns are neither saved up nor owed.
            self._accounts[tenant] = max(self._accounts.get(tenant, 0.0), self._now)
        waiting[compile_.constraint] = compile_

    def remove(self, compile_: Compile, tenant: str) -> None:
        """Take a compile out of a tenant's queue, if it is there."""
        waiting = self._waiting.get(tenant)
        if waiting is not None and waiting.pop(compile_.constraint, None) is not None and not waiting:
            del self._waiting[tenant]
            self._forget_accounts()

    def take(self) -> Compile | None:
        """Begin the next compile; None if none waits.

        It is the oldest one of the tenant that occupies the fewest compilers and, among these, has used the least time.
        So no tenant gets a second compiler while another one waits.
        """
        if not self._waiting:
            return None
        tenant = min(self._waiting, key=lambda name: (self._num_running[name], self._accounts[name]))
        self._now = self._accounts[tenant]
        self._num_running[tenant] += 1
        compile_ = next(iter(self._waiting[tenant].values()))
        # Tenants with the same constraint pay for it once: that whose turn it was.
        compile_.payer = tenant
        for name in [name for name, waiting in self._waiting.items() if compile_.constraint in waiting]:
            self.remove(compile_, name)
        if tenant in self._waiting:
            self._waiting[tenant] = self._waiting.pop(tenant)  # among equals, the next turn is another tenant's
        return compile_

    def ended(self, compile_: Compile, seconds: float) -> None:
        """Charge a compile that has ended to the tenant at whose turn it was begun."""
        tenant = compile_.payer
        assert tenant is not None
        self._num_running[tenant] -= 1
        self._accounts[tenant] += seconds
        self._forget_accounts()

    def _forget_accounts(self) -> None:
        """Drop accounts that say no more than the present does, so that their number stays small."""
        self._num_running = +self._num_running
        if not self._waiting and not self._num_running:
            self._accounts.clear()
            self._now = 0.0
            return
        for tenant in [name for name, used in self._accounts.items() if used <= self._now]:
            if tenant not in self._waiting and tenant not in self._num_running:
                del self._accounts[tenant]
