"""Compiles constraints outside the loop: each first in a process that can be killed, then in a thread of this one.

Tenants take turns, and the time of their compiles counts for them.
"""

import logging
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from tokenloom.request.limits import TenantTurns

from ..data.config import StructuredOutputConfig
from ..data.core_params import StructuredOutput
from .compiler_process import CompilerDied, CompilerProcess, CompilerUnavailable, Setup, make_backend
from .grammar_backend import CompiledGrammar, GrammarError, StructuredOutputBackend

log = logging.getLogger(__name__)

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


class CompilerKiller(CompilerUnavailable):
    """So many processes ended one after the other while they compiled the constraint that it may be what ends them."""


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

    def __init__(
        self,
        max_pending: int = MAX_PENDING,
        max_pending_per_tenant: int = MAX_PENDING_PER_TENANT,
        num_compilers: int | None = None,
    ) -> None:
        """``num_compilers``: of which a tenant leaves one free while it is not alone; None: it need not."""
        self._max_pending = max_pending
        self._max_per_tenant = max_pending_per_tenant
        # By tenant; the tenant that was served last is at the end. No queue is empty.
        self._waiting: dict[str, dict[StructuredOutput, Compile]] = {}
        self._turns = TenantTurns(num_compilers)  # costs are seconds

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
            self._turns.wait(tenant)
        waiting[compile_.constraint] = compile_

    def remove(self, compile_: Compile, tenant: str) -> None:
        """Take a compile out of a tenant's queue, if it is there."""
        waiting = self._waiting.get(tenant)
        if waiting is not None and waiting.pop(compile_.constraint, None) is not None and not waiting:
            del self._waiting[tenant]
            self._turns.forget(self._waiting)

    @property
    def can_take(self) -> bool:
        """Whether a compile may begin."""
        return any(map(self._turns.may_begin, self._waiting))

    def take(self) -> Compile | None:
        """Begin the next compile; None if none waits, or only such that leave the last compiler to other tenants.

        It is the oldest one of the tenant that occupies the fewest compilers and, among these, has used the least time.
        So no tenant gets a second compiler while another one waits.
        """
        tenant = self._turns.next(self._waiting)
        if tenant is None:
            return None
        self._turns.start(tenant)
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
        self._turns.stop(tenant, seconds)
        self._turns.forget(self._waiting)


NUM_COMPILERS = 2
"""More than one, so that a constraint that takes its full time does not delay all others."""
MAX_DEATHS = 3
"""Processes that may end, by no limit of theirs, while they compile one constraint. Each is replaced at once."""
MAX_COMPILED = 64
"""Limits the cached constraints, refused ones included. Each takes up to 64 MiB, usually a thousandth of that."""
# A process starts in 0.23 s; a regular expression or a schema of three fields compiles in 1 to 4 ms.
RESTART_SECONDS = 0.25
"""What it takes to start the process again. An unwanted compile that has run for longer is ended; a younger one may end
sooner than a new process starts, and nearly all constraints take a hundredth of this."""


class _Running:
    """Holds a compile in progress."""

    __slots__ = ("began", "compile", "is_dropped", "process")

    def __init__(self, compile_: Compile, process: CompilerProcess, began: float) -> None:
        self.compile = compile_
        self.process = process
        self.began = began
        self.is_dropped = False


class GrammarCompiler:
    """Compiles each constraint once for all the requests that want it at a time, and caches the results.

    :meth:`compile`, :meth:`forget` and :meth:`close` belong to one thread; they never wait for a compiler.
    """

    def __init__(
        self,
        config: StructuredOutputConfig,
        vocab_size: int,
        start_process: Callable[[Setup], CompilerProcess] = CompilerProcess,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``clock`` returns seconds."""
        self._config = config
        self._vocab_size = vocab_size
        self._start_process = start_process
        self._clock = clock
        self._backend: StructuredOutputBackend | None = None
        self._backend_lock = threading.Lock()  # is held while the backend is loaded
        self._lock = threading.Lock()  # guards what follows, never for long
        self._queue = CompileQueue(num_compilers=NUM_COMPILERS)
        self._known: OrderedDict[StructuredOutput, Compile] = OrderedDict()
        self._running: set[_Running] = set()
        self._idle: list[CompilerProcess] = []
        self._busy: set[CompilerProcess] = set()
        self._closed = False
        self._num_due = 0  # calls of the pool that have not begun a compile: at least as many as compiles wait
        self._pool = ThreadPoolExecutor(NUM_COMPILERS, "grammar-compiler")

    @property
    def backend(self) -> StructuredOutputBackend:
        """The backend, which is loaded at the first access. Raises ``GrammarError`` if that fails."""
        with self._backend_lock:
            if self._backend is None:
                self._backend = make_backend(self._config, self._vocab_size)
            return self._backend

    def compile(
        self,
        constraint: StructuredOutput,
        request_id: str,
        tenant: str,
        done: Callable[[Future[CompiledGrammar]], None],
    ) -> None:
        """Call ``done``, from any thread, with a future that holds the grammar or a ``GrammarError``: a
        ``CompilerUnavailable`` if the constraint was not judged, which the next call tries again.

        It is not called after :meth:`forget`, unless the grammar was ready before. Raises ``CompileQueueFull``,
        and ``RuntimeError`` if the system has no thread for the compiler.
        """
        with self._lock:
            self._end_unwanted()
            known = self._known.get(constraint)
            # A killed compiler or a busy machine says nothing about the schema; kept, it was refused with 400 for ever.
            if known is None or (known.future.done() and isinstance(known.future.exception(), CompilerUnavailable)):
                known = Compile(constraint)
            if not known.future.done():
                if known.payer is None:  # it has not begun
                    self._call_pool()  # first: if the system has no thread to give, nothing is queued
                    self._queue.add(known, tenant)
                known.join(request_id, tenant)
            self._known[constraint] = known
            self._known.move_to_end(constraint)
            self._evict()
        known.future.add_done_callback(done)

    def forget(self, constraint: StructuredOutput, request_id: str) -> None:
        """Note that a request no longer waits for its grammar. A compile that no request wants is dropped."""
        with self._lock:
            known = self._known.get(constraint)
            if known is None or known.future.done() or (tenant := known.leave(request_id)) is None:
                return
            self._queue.remove(known, tenant)
            if known.is_wanted:
                return
            if known.payer is None:
                del self._known[constraint]
            else:
                self._end_unwanted()

    def close(self) -> None:
        """End the processes and threads. Idempotent."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
            busy = list(self._busy)
        # Twice: threads wait in their processes' pipes, so the first call only stops new work, and the signals end the
        # waiting.
        self._pool.shutdown(wait=False, cancel_futures=True)
        for process in idle:
            process.kill()
        for process in busy:
            process.end()
        self._pool.shutdown(wait=True)

    # With the lock

    def _call_pool(self) -> None:
        """See to it that one compile more than those that wait would begin. Raises ``RuntimeError``."""
        if self._num_due <= len(self._queue):
            self._pool.submit(self._compile_next)
            self._num_due += 1

    def _take(self) -> Compile | None:
        """Begin the next compile in a call of the pool; None if none waits any more, or the engine is shutting down."""
        self._num_due -= 1
        return None if self._closed else self._queue.take()

    def _end_unwanted(self) -> None:
        """End the compiles that no request wants, except those that may end before a new process would be ready."""
        for running in self._running:
            if running.compile.is_wanted or running.is_dropped or self._clock() - running.began < RESTART_SECONDS:
                continue
            running.is_dropped = True
            running.process.end()
            del self._known[running.compile.constraint]

    def _evict(self) -> None:
        if len(self._known) <= MAX_COMPILED:
            return
        # Those that wait do not count: 64 of one tenant drove out the grammar that another one used all the time.
        done = [constraint for constraint, known in self._known.items() if known.future.done()]
        for constraint in done[: max(len(done) - MAX_COMPILED, 0)]:
            del self._known[constraint]

    # In the pool

    def _compile_next(self) -> None:
        """Compile the constraint whose turn it is, if any may begin, and those that had to leave it a compiler."""
        while self._compile_one():
            with self._lock:
                if self._closed or self._num_due or not self._queue:
                    return
                self._num_due += 1

    def _compile_one(self) -> bool:
        """Return whether a constraint was compiled.

        The process comes first: it may have to start, and which constraint is next may change meanwhile.
        """
        with self._lock:
            if not self._queue.can_take:
                self._num_due -= 1
                return False
        try:
            process = self._take_process()
        except Exception as error:  # starting a process fails in ways of the system's own, too
            self._fail_next(_for_clients(error))
            return True
        if (running := self._begin(process)) is None:
            self._give_back(process)
            return False
        self._finish(running)
        return True

    def _fail_next(self, error: GrammarError) -> None:
        with self._lock:
            if (compile_ := self._take()) is None:
                return
            self._queue.ended(compile_, 0.0)
        compile_.future.set_exception(error)

    def _begin(self, process: CompilerProcess) -> _Running | None:
        with self._lock:
            if (compile_ := self._take()) is None:
                return None
            running = _Running(compile_, process, self._clock())
            self._running.add(running)
            return running

    def _finish(self, running: _Running) -> None:
        compile_ = running.compile
        prepared, failure = "", None
        try:
            prepared = self._prepare(running)
        except Exception as error:
            failure = _for_clients(error)
        with self._lock:
            self._running.remove(running)
            # Also for a compile that was ended unwanted: a tenant that sends and cancels pays for the time all the
            # same.
            self._queue.ended(compile_, self._clock() - running.began)
        if running.is_dropped:
            running.process.kill()  # the signal may not have reached it yet
        self._give_back(running.process)
        try:
            if failure is not None:
                raise failure
            # Outside of the process: llguidance's grammars cannot move between processes, so a constraint that is known
            # to be short is compiled here once more.
            compile_.future.set_result(self.backend.load(prepared))
        except BaseException as error:
            compile_.future.set_exception(_for_clients(error))

    def _prepare(self, running: _Running) -> str:
        """Compile in a process, and in another one if that dies. Raises as :meth:`CompilerProcess.prepare`."""
        for _ in range(MAX_DEATHS):
            try:
                return running.process.prepare(running.compile.constraint)
            except CompilerDied:
                if running.is_dropped:
                    raise
            died, successor = running.process, self._take_process()
            with self._lock:
                self._busy.discard(died)
                running.process = successor
                if running.is_dropped:  # meanwhile: the signal went to the one that died
                    raise CompilerDied("no request waits for the grammar any more")
        if died.was_stopped:
            raise CompilerUnavailable("the machine stops the processes that compile grammars; retry later")
        raise CompilerKiller(f"{MAX_DEATHS} processes ended while they compiled the grammar")

    def _take_process(self) -> CompilerProcess:
        """Return a process that is ready. Raises as :class:`CompilerProcess`."""
        dead: list[CompilerProcess] = []
        try:
            with self._lock:
                if self._closed:
                    raise CompilerUnavailable("the engine is shutting down")
                while self._idle:
                    process = self._idle.pop()
                    # One that the OOM killer had ended while it was idle failed the next request.
                    if process.is_alive:
                        self._busy.add(process)
                        return process
                    dead.append(process)
        finally:
            for each in dead:
                each.kill()
        process = self._start_process(Setup(self._config, self._vocab_size))
        with self._lock:
            self._busy.add(process)
        return process

    def _give_back(self, process: CompilerProcess) -> None:
        with self._lock:
            self._busy.discard(process)
            if process.is_alive and not self._closed:
                self._idle.append(process)
                return
        process.kill()


def _for_clients(error: BaseException) -> GrammarError:
    """Return an error that requests may get. What is no verdict on the constraint is not kept: see :meth:`compile`."""
    if isinstance(error, GrammarError):
        return error
    log.error("a grammar could not be compiled", exc_info=error)
    return CompilerUnavailable("the engine could not compile the grammar; retry")
