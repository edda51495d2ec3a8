"""Stands in for the processes that compile: each compile takes until the test lets it end."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from tests.engine_core.structured_output.helpers import VOCAB_SIZE, backend, config
from tokenloom.engine_core.data.core_params import GrammarKind, StructuredOutput
from tokenloom.engine_core.structured_output.compiler import GrammarCompiler
from tokenloom.engine_core.structured_output.compiler_process import (
    CompilerDied,
    CompilerProcess,
    CompilerUnavailable,
    Setup,
)

SOON = 20.0


class FakeProcess(CompilerProcess):
    """Compiles what the test releases."""

    def __init__(self, fakes: "FakeCompilers") -> None:
        self._fakes = fakes
        self._alive = True
        self.was_stopped = fakes.stops

    def prepare(self, constraint: StructuredOutput) -> str:
        return self._fakes.prepare(self, constraint)

    @property
    def is_alive(self) -> bool:
        return self._alive

    def end(self) -> None:
        self._fakes.end(self)

    def kill(self) -> None:
        self._fakes.end(self)

    def died(self) -> None:
        self._alive = False


class FakeCompilers:
    """Holds what all processes do. Its clock moves only by hand."""

    def __init__(self) -> None:
        self.now = 0.0
        self.num_started = 0
        self.may_start = True
        self.stops = False
        """Whether processes that die have been stopped."""
        self.begun: list[str] = []
        """All compiles so far, by their regular expressions."""
        self.running: dict[str, FakeProcess] = {}
        self.failures: dict[str, Exception] = {}
        """Errors of compiles, by their regular expressions: each is raised once."""
        self.deaths: dict[str, int] = {}
        """How many processes die of a compile, by its regular expression."""
        self.started: list[FakeProcess] = []
        self.start_failure: Exception | None = None
        """The error of the next process that starts."""
        self._released: set[str] = set()
        self._changed = threading.Condition()

    @contextmanager
    def compiler(self) -> Iterator[GrammarCompiler]:
        compiler = GrammarCompiler(config(), VOCAB_SIZE, self._start, lambda: self.now)
        try:
            yield compiler
        finally:
            compiler.close()

    def release(self, name: str) -> None:
        """Let a compile end, now or when it begins."""
        with self._changed:
            self._released.add(name)
            self._changed.notify_all()

    def until_begun(self, *names: str) -> None:
        """Wait until exactly these compiles run."""
        with self._changed:
            assert self._changed.wait_for(lambda: set(self.running) == set(names), SOON), (self.running, names)

    def prepare(self, process: FakeProcess, constraint: StructuredOutput) -> str:
        name = constraint.source
        with self._changed:
            self.begun.append(name)
            self.running[name] = process
            self._changed.notify_all()
            self._changed.wait_for(lambda: name in self._released or not process.is_alive)
            del self.running[name]
            self._changed.notify_all()
            if self.deaths.get(name, 0):
                self.deaths[name] -= 1
                process.died()
            if (failure := self.failures.pop(name, None)) is not None:
                raise failure
            if not process.is_alive:
                raise CompilerDied("the process that compiles grammars was ended; retry")
        return backend().prepare(constraint)

    def end(self, process: FakeProcess) -> None:
        with self._changed:
            process.died()
            self._changed.notify_all()

    def _start(self, setup: Setup) -> FakeProcess:
        if not self.may_start:
            raise CompilerUnavailable("the process that compiles grammars did not start")
        if (failure := self.start_failure) is not None:
            self.start_failure = None
            raise failure
        self.num_started += 1
        self.started.append(FakeProcess(self))
        return self.started[-1]


def regex(name: str) -> StructuredOutput:
    return StructuredOutput(GrammarKind.REGEX, name)
