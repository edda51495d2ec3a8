"""Compiles constraints outside the loop: each first in a process that can be killed, then in a thread of this one."""

import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from ..config import StructuredOutputConfig
from ..wire.core_sampling_params import StructuredOutput
from .compiler_process import CompilerProcess, CompilerUnavailable, Setup, make_backend
from .grammar_backend import CompiledGrammar, StructuredOutputBackend

NUM_COMPILERS = 2
"""More than one, so that a constraint that takes its full time does not delay all others."""
MAX_PENDING = 256
"""Limits the constraints that wait for a compiler; further ones are refused."""
MAX_COMPILED = 64
"""Limits the cached constraints, refused ones included. Each takes up to 64 MiB, usually a thousandth of that."""


class GrammarCompiler:
    """Compiles each constraint once for all its requests. :meth:`compile` and :meth:`close` belong to one thread."""

    def __init__(self, config: StructuredOutputConfig, vocab_size: int) -> None:
        self._config = config
        self._vocab_size = vocab_size
        self._backend: StructuredOutputBackend | None = None
        self._lock = threading.Lock()  # guards the processes and the creation of the backend
        self._idle: list[CompilerProcess] = []
        self._busy: set[CompilerProcess] = set()
        self._closed = False
        self._known: OrderedDict[StructuredOutput, Future[CompiledGrammar]] = OrderedDict()
        self._pool = ThreadPoolExecutor(NUM_COMPILERS, "grammar-compiler")

    @property
    def backend(self) -> StructuredOutputBackend:
        """The backend, which is loaded at the first access. Raises ``GrammarError`` if that fails."""
        with self._lock:
            if self._backend is None:
                self._backend = make_backend(self._config, self._vocab_size)
            return self._backend

    def compile(self, constraint: StructuredOutput, done: Callable[[Future[CompiledGrammar]], None]) -> None:
        """Call ``done``, from any thread, with a future that holds the grammar or a ``GrammarError``.

        Raises ``CompilerUnavailable`` if too many constraints wait.
        """
        future = self._known.get(constraint)
        if future is None or (future.done() and isinstance(future.exception(), CompilerUnavailable)):
            if sum(not known.done() for known in self._known.values()) >= MAX_PENDING:
                raise CompilerUnavailable("too many grammars are waiting to be compiled; retry")
            future = self._known[constraint] = self._pool.submit(self._compile, constraint)
            self._evict()
        self._known.move_to_end(constraint)
        future.add_done_callback(done)

    def close(self) -> None:
        """End the processes and threads. Idempotent."""
        with self._lock:
            self._closed = True
            processes = [*self._idle, *self._busy]
        self._pool.shutdown(wait=False, cancel_futures=True)
        for process in processes:
            process.kill()
        self._pool.shutdown(wait=True)

    def _evict(self) -> None:
        for constraint in list(self._known):
            if len(self._known) <= MAX_COMPILED:
                return
            if self._known[constraint].done():
                del self._known[constraint]

    def _compile(self, constraint: StructuredOutput) -> CompiledGrammar:
        process = self._take_process()
        try:
            prepared = process.prepare(constraint)
        finally:
            self._give_back(process)
        return self.backend.load(prepared)

    def _take_process(self) -> CompilerProcess:
        with self._lock:
            if self._closed:
                raise CompilerUnavailable("the engine is shutting down")
            process = self._idle.pop() if self._idle else None
            if process is not None:
                self._busy.add(process)
                return process
        process = CompilerProcess(Setup(self._config, self._vocab_size))
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
