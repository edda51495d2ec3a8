"""An event loop whose time passes only when nothing is left to do, and whose parts can be frozen or killed."""

import asyncio
import contextvars
import heapq
import itertools
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

_MAX_CALLS_AT_ONCE = 200_000
"""More calls than that at one moment are a loop that never waits."""


_MAX_AWAITS = 20
"""As often a coroutine may await something while it is closed."""


class SimulationStuck(AssertionError):
    """Raised when nothing is due any more, or when the calls of one moment never end."""


class Process:
    """Stands for one process of the mesh. What was begun in its context runs only while the process does.

    Attributes:
        name: The part's name, which survives a restart.
        context: All its callbacks and tasks run in this context.
        is_frozen: Its callbacks wait until it is thawed.
        is_dead: None of its callbacks will ever run again.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_frozen = self.is_dead = False
        self.held: list[asyncio.Handle] = []
        self.context = contextvars.copy_context()
        self.context.run(_PROCESS.set, self)


_PROCESS: contextvars.ContextVar[Process | None] = contextvars.ContextVar("process", default=None)


def _close(coro: Any) -> None:
    """Close a coroutine, also one that awaits something on its way out."""
    for _ in range(_MAX_AWAITS):
        try:
            coro.close()
            return
        except BaseException:  # a group around the GeneratorExit, for one
            continue


class VirtualLoop(asyncio.AbstractEventLoop):
    """Runs callbacks in the order in which they became due. Threads become calls: what is given to an executor runs at
    once.

    Attributes:
        failures: What callbacks and forgotten tasks raised.
    """

    def __init__(self) -> None:
        self.failures: list[str] = []
        self._now = 1000.0
        self._ready: deque[asyncio.Handle] = deque()
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._numbers = itertools.count()
        self._any_halted = False
        self._remains: list[object] = []  # of dead processes: nothing of theirs may run, not even a finally
        self._is_running = self._is_closed = False

    # Running

    def run(self, main: Coroutine[Any, Any, T], name: str = "main") -> T:
        """Run until ``main`` has ended and return its result. Raises ``SimulationStuck``."""
        task = self.create_task(main, name=name)
        asyncio._set_running_loop(self)
        self._is_running = True
        try:
            while not task.done():
                self._advance()
                self._run_ready()
        finally:
            self._is_running = False
            asyncio._set_running_loop(None)
        return task.result()

    def freeze(self, process: Process) -> None:
        """Let no callback of ``process`` run until it is thawed."""
        process.is_frozen = self._any_halted = True

    def thaw(self, process: Process) -> None:
        """Let ``process`` run again; what became due meanwhile runs at once, in order."""
        process.is_frozen = False
        if not process.is_dead:
            self._ready.extend(process.held)
            process.held = []

    def kill(self, process: Process) -> None:
        """Let no callback of ``process`` ever run again."""
        process.is_dead = self._any_halted = True
        self._remains += asyncio.all_tasks(self)

    def close(self) -> None:
        """Drop everything that has not run. Tasks that are still pending are closed without running again; what they
        do in their last moments is of no interest."""
        self._is_closed = True
        asyncio._set_running_loop(self)  # what they begin belongs to this loop too
        try:
            for _ in range(_MAX_AWAITS):
                pending = [task for task in asyncio.all_tasks(self) if task._log_destroy_pending]  # type: ignore[attr-defined]
                if not (pending or self._ready or self._timers):
                    break
                for task in pending:
                    task._log_destroy_pending = False  # type: ignore[attr-defined]
                    _close(task.get_coro())
                self._ready.clear()
                self._timers.clear()
        finally:
            asyncio._set_running_loop(None)
        self._remains.clear()

    def _advance(self) -> None:
        """Move the time to the next timer, if nothing is ready now."""
        timers = self._timers
        while timers and timers[0][2]._cancelled:
            heapq.heappop(timers)
        if self._ready:
            return
        if not timers:
            raise SimulationStuck("nothing is due, and the simulation has not ended")
        self._now = now = timers[0][0]
        while timers and timers[0][0] <= now:
            self._ready.append(heapq.heappop(timers)[2])

    def _run_ready(self) -> None:
        ready = self._ready
        for _ in range(_MAX_CALLS_AT_ONCE):
            if not ready:
                return
            handle = ready.popleft()
            if handle._cancelled:
                continue
            if self._any_halted:
                process = handle._context.get(_PROCESS)  # type: ignore[attr-defined]
                if process is not None and (process.is_frozen or process.is_dead):
                    process.held.append(handle)
                    continue
            handle._run()
        raise SimulationStuck(f"{_MAX_CALLS_AT_ONCE} calls at {self._now}: {list(ready)[:3]}")

    # What asyncio needs of a loop

    def time(self) -> float:
        return self._now

    def call_soon(self, callback: Callable[..., object], *args: Any, context: Any = None) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    call_soon_threadsafe = call_soon

    def call_later(
        self, delay: float, callback: Callable[..., object], *args: Any, context: Any = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self._now + delay, callback, *args, context=context)

    def call_at(
        self, when: float, callback: Callable[..., object], *args: Any, context: Any = None
    ) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        heapq.heappush(self._timers, (when, next(self._numbers), handle))
        return handle

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Do nothing: cancelled timers are dropped when they are due."""

    def create_future(self) -> "asyncio.Future[Any]":
        return asyncio.Future(loop=self)

    def create_task(self, coro: Any, *, name: str | None = None, context: Any = None) -> "asyncio.Task[Any]":
        return asyncio.Task(coro, loop=self, name=name, context=context)

    def run_in_executor(self, executor: object, func: Callable[..., Any], *args: Any) -> "asyncio.Future[Any]":  # type: ignore[override]
        future = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:
            future.set_exception(error)
        return future

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        if not self._is_closed:
            self.failures.append(f"{context.get('message')}: {context.get('exception')!r}")

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return self._is_running

    def is_closed(self) -> bool:
        return self._is_closed
