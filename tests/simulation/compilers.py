"""The processes that compile grammars for an engine: they are killed, also while they compile, or do not start. A
grammar allows every token."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from typing import Any

from tokenloom.engine_core.data.core_params import StructuredOutput
from tokenloom.engine_core.structured_output.compiler_process import (
    CompilerDied,
    CompilerProcess,
    CompilerUnavailable,
    Setup,
)
from tokenloom.engine_core.structured_output.grammar_backend import Bitmask, CompiledGrammar
from tokenloom.engine_core.structured_output.manager import StructuredOutputManager

COMPILE_SECONDS = 0.004


class AnyToken:
    """A grammar, and the state of each output that follows it."""

    def start(self) -> "AnyToken":
        return self

    def accept_tokens(self, token_ids: Sequence[int]) -> None:
        pass

    def validate_tokens(self, token_ids: Sequence[int]) -> int:
        return len(token_ids)

    def rollback(self, num_tokens: int) -> None:
        pass

    def reset(self) -> None:
        pass

    def fill_bitmask(self, row: Bitmask) -> None:
        row[:] = -1


class Backend:
    COMPILE_BYTES = 0
    eos_token_ids = (1 << 30,)  # none of the vocabulary, so that every token may come at any time

    def prepare(self, constraint: StructuredOutput) -> str:
        return constraint.source

    def load(self, prepared: str) -> CompiledGrammar:
        return AnyToken()


class SimulatedCompiler(CompilerProcess):
    """One process."""

    def __init__(self, all_of_engine: "Compilers") -> None:
        self._all = all_of_engine
        self.lives = True

    @property
    def is_alive(self) -> bool:
        return self.lives

    def prepare(self, constraint: StructuredOutput) -> str:
        if self._all.num_dying:
            self._all.num_dying -= 1
            self.lives = False
        if not self.lives:
            raise CompilerDied("the process was killed")
        return constraint.source

    def end(self) -> None:
        self.lives = False

    def kill(self) -> None:
        self.lives = False


class Compilers:
    """Takes the place of an engine's compilers and of their threads.

    Attributes:
        may_start: Whether a process starts now.
        num_dying: So many processes die of their next compiles.
    """

    def __init__(self, manager: StructuredOutputManager) -> None:
        self.may_start = True
        self.num_dying = 0
        self._living: list[SimulatedCompiler] = []
        loop, compiler = asyncio.get_running_loop(), manager._compiler
        compiler._pool.shutdown()
        manager._masks.shutdown()
        held: Any = compiler
        held._pool, held._backend = _Later(loop), Backend()
        held._start_process, held._clock = self._start, loop.time
        manager._masks = _AtOnce()  # type: ignore[assignment]

    def crash(self) -> None:
        """Kill all of them, idle or not."""
        living, self._living = self._living, []
        for process in living:
            process.end()

    def _start(self, setup: Setup) -> SimulatedCompiler:
        if not self.may_start:
            raise CompilerUnavailable("the process that compiles does not start")
        process = SimulatedCompiler(self)
        self._living.append(process)
        return process


class _Later(Executor):
    """Does work after the time that a compile takes."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> "Future[Any]":
        self._loop.call_later(COMPILE_SECONDS, fn, *args)
        return Future()


class _AtOnce(Executor):
    """Does work in the event loop."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> "Future[Any]":
        done: Future[Any] = Future()
        done.set_result(fn(*args))
        return done
