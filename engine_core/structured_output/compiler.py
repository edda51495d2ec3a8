"""Compiles constraints outside the loop: each first in a process that can be killed, then in a thread of this one."""

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from ..data.config import StructuredOutputConfig
from ..data.core_sampling_params import StructuredOutput
from .compile_queue import Compile, CompileQueue
from .compiler_process import CompilerProcess, CompilerUnavailable, Setup, make_backend
from .grammar_backend import CompiledGrammar, GrammarError, StructuredOutputBackend

log = logging.getLogger(__name__)

NUM_COMPILERS = 2
"""More than one, so that a constraint that takes its full time does not delay all others."""
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
        self._queue = CompileQueue()
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
            processes = [*self._idle, *self._busy]
        # Twice: threads wait in their processes' pipes, so the first call only stops new work, and the kills end the
        # waiting.
        self._pool.shutdown(wait=False, cancel_futures=True)
        for process in processes:
            process.kill()
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
        for constraint in list(self._known):
            if len(self._known) <= MAX_COMPILED:
                return
            if self._known[constraint].future.done():
                del self._known[constraint]

    # In the pool

    def _compile_next(self) -> None:
        """Compile the constraint whose turn it is, if one waits.

        The process comes first: it may have to start, and which constraint is next may change meanwhile.
        """
        with self._lock:
            if not self._queue:
                self._num_due -= 1
                return
        try:
            process = self._take_process()
        except Exception as error:  # starting a process fails in ways of the system's own, too
            self._fail_next(_for_clients(error))
            return
        if (running := self._begin(process)) is None:
            self._give_back(process)
        else:
            self._finish(running)

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
            prepared = running.process.prepare(compile_.constraint)
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

    def _take_process(self) -> CompilerProcess:
        """Return a process that is ready. Raises as :class:`CompilerProcess`."""
        with self._lock:
            if self._closed:
                raise CompilerUnavailable("the engine is shutting down")
            process = self._idle.pop() if self._idle else None
            if process is not None:
                self._busy.add(process)
                return process
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
