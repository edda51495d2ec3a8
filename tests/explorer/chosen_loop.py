"""An event loop that chooses which task runs next, from a seed, and cancels tasks at chosen awaits."""

import asyncio
import heapq
import select
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial, partialmethod
from itertools import count
from pathlib import Path
from random import Random
from typing import Any, TypeVar

from tests.simulation.virtual_loop import SimulationStuck, VirtualLoop

from .plan import Plan
from .thread_calls import Crashed, ThreadCall

T = TypeVar("T")

_MAX_STEPS = 50_000
"""More steps than that are a run that never ends."""
_SOON = 1.0
"""A timer that is due within so many seconds may run although tasks are ready: a busy process is late."""
_EARLY_TIMER = 1 / 24
_CHANGE_PRIORITY = 1 / 16
_LIBRARY = str(Path(asyncio.__file__).parent.parent)
_DEFAULT_THREADS = 4
"""Threads of the loop's default executor."""


class NumberedTask(asyncio.Task[Any]):
    """Has the same place in a set in each run: a TaskGroup cancels its tasks in the order of a set."""

    def __new__(cls, *_: Any, loop: "ChosenLoop", **__: Any) -> "NumberedTask":
        task = super().__new__(cls)
        task.number = next(loop.task_numbers)
        return task

    number: int

    def __hash__(self) -> int:
        return self.number


class ChosenLoop(VirtualLoop):
    """Runs plain callbacks in order, as asyncio does, and chooses among the tasks and the threads that can go on.

    Of two ready tasks either may run first, and a function that was given to an executor runs in between, as one step
    or, if the plan says so, in steps from one access of the disk to the next. What asyncio promises holds: the
    callbacks of one future run in the order in which they were added.

    Attributes:
        num_awaits: How often tasks that may be cancelled have begun to wait.
        has_crashed: The process has ended; nothing more runs.
        is_traced: Whether :attr:`trace` is kept.
        trace: What ran.
        task_numbers: Those of the tasks that are still to be made.
        on_idle: Called when nothing is ready, before the time moves on.
    """

    def __init__(self, plan: Plan, *, is_traced: bool = False) -> None:
        super().__init__()
        self._plan = plan
        self.task_numbers = count()
        self._random = Random(f"order {plan.seed}")
        self._by_priority = plan.by_priority
        self._priorities: dict[str, float] = {}
        self._steps: list[asyncio.Handle] = []
        self._threads: dict[object, list[ThreadCall]] = {}
        self._thread_numbers = count(1)
        self._actors: dict[asyncio.Task[Any], Callable[[], object]] = {}  # with what cancels each
        self._due: dict[asyncio.Task[Any], Callable[[], object]] = {}  # to be cancelled when their await has ended
        self._readers: dict[int, asyncio.Handle] = {}
        self._writers: dict[int, asyncio.Handle] = {}
        self._idle: list[asyncio.Future[None]] = []
        self._num_steps = 0
        self.has_crashed = False
        self.num_awaits = 0
        self.is_traced = is_traced
        self.trace: list[str] = []
        self.on_idle: Callable[[], object] = lambda: None

    def actor(self, task: "asyncio.Task[Any]", cancel: Callable[[], object] | None = None) -> None:
        """Let the plan cancel ``task`` at its awaits. ``cancel``: does it; None: as ``asyncio`` does."""
        self._actors[task] = cancel or task.cancel

    def crash(self) -> None:
        """End the run after the present step: the process has ended."""
        self.has_crashed = True

    async def idle(self) -> None:
        """Return when nothing can go on without the time moving on."""
        future = self.create_future()
        self._idle.append(future)
        await future

    def note(self, text: str) -> None:
        """Add a line to the trace."""
        if self.is_traced:
            self.trace.append(text)

    def create_task(self, coro: Any, *, name: str | None = None, context: Any = None) -> "asyncio.Task[Any]":
        return NumberedTask(coro, loop=self, name=name or getattr(coro, "__qualname__", "task"), context=context)

    # Choosing

    def call_soon(self, callback: Callable[..., object], *args: Any, context: Any = None) -> asyncio.Handle:
        if not isinstance(getattr(callback, "__self__", None), asyncio.Task):
            return super().call_soon(callback, *args, context=context)
        handle = asyncio.Handle(callback, args, self, context)
        self._steps.append(handle)
        return handle

    call_soon_threadsafe = call_soon  # everything runs in one thread at a time

    def _advance(self) -> None:
        if self._ready or self._steps or self._poll() or any(self._startable()):
            return
        self.on_idle()
        if self._ready or self._steps:
            return
        if self._idle:
            futures, self._idle = self._idle, []
            for future in futures:
                if not future.done():
                    future.set_result(None)
            return
        try:
            super()._advance()
        except SimulationStuck:
            waiting = sorted(f"{task.get_name()} at {place_of(task)}" for task in asyncio.all_tasks(self))
            raise SimulationStuck(f"nothing can go on; these wait: {'; '.join(waiting)}") from None

    def _run_ready(self) -> None:
        while True:
            while self._ready:
                handle = self._ready.popleft()
                if not handle._cancelled:  # type: ignore[attr-defined]
                    handle._run()  # type: ignore[attr-defined]
            if self.has_crashed:
                raise Crashed
            self._num_steps += 1
            if self._num_steps > _MAX_STEPS:
                raise SimulationStuck(f"{_MAX_STEPS} steps, and no end")
            if self._readers or self._writers:
                self._poll()
            if not self._run_one():
                return

    def _run_one(self) -> bool:
        """Run one step of a task or of a thread. Returns False if none can run."""
        self._steps = [handle for handle in self._steps if not handle._cancelled]  # type: ignore[attr-defined]
        choices: list[asyncio.Handle | ThreadCall] = [*self._steps, *self._startable()]
        if not choices:
            return bool(self._ready)
        if self._timers and self._random.random() < _EARLY_TIMER and self._timers[0][0] - self._now < _SOON:
            self._now, _, timer = heapq.heappop(self._timers)
            self._ready.append(timer)
            return True
        chosen = self._choose(choices)
        if isinstance(chosen, ThreadCall):
            self.note(f"thread {chosen.name}")
            chosen.step()
            return True
        self._steps.remove(chosen)
        self._step(chosen)
        return True

    def _choose(self, choices: "list[asyncio.Handle | ThreadCall]") -> "asyncio.Handle | ThreadCall":
        if len(choices) == 1:
            return choices[0]
        if not self._by_priority:
            return choices[self._random.randrange(len(choices))]
        best = max(choices, key=lambda each: self._priority(_name(each)))
        if self._random.random() < _CHANGE_PRIORITY:
            self._priorities[_name(best)] = self._random.random()
        return best

    def _priority(self, name: str) -> float:
        if name not in self._priorities:
            self._priorities[name] = self._random.random()
        return self._priorities[name]

    def _step(self, handle: asyncio.Handle) -> None:
        task: asyncio.Task[Any] = handle._callback.__self__  # type: ignore[attr-defined]
        if (cancel := self._due.pop(task, None)) is not None:
            self.note(f"cancel {task.get_name()}, whose await has ended, at {place_of(task)}")
            cancel()
        handle._run()  # type: ignore[attr-defined]
        if task.done():
            self._actors.pop(task, None)
            self.note(f"{task.get_name()} ends")
            return
        if self.is_traced:
            self.note(f"{task.get_name()} waits at {place_of(task)}")
        if task in self._actors:
            self._cancel_here(task)

    def _cancel_here(self, task: "asyncio.Task[Any]") -> None:
        number, self.num_awaits = self.num_awaits, self.num_awaits + 1
        if (is_late := self._plan.cancels.get(number)) is None:
            return
        if is_late:
            self._due[task] = self._actors[task]
            return
        self.note(f"cancel {task.get_name()} at {place_of(task)}")
        self._actors[task]()

    # Threads

    @contextmanager
    def owns_threads(self) -> Iterator[None]:
        """Run what is given to the threads of any executor as steps of this loop, for the length of the ``with``."""
        submit = ThreadPoolExecutor.submit
        ThreadPoolExecutor.submit = partialmethod(_submit, self)  # type: ignore[assignment, method-assign]
        try:
            yield
        finally:
            ThreadPoolExecutor.submit = submit  # type: ignore[method-assign]

    def run_in_executor(self, executor: object, func: Callable[..., Any], *args: Any) -> "asyncio.Future[Any]":  # type: ignore[override]
        return asyncio.wrap_future(self.submit(executor, func, *args), loop=self)

    def submit(self, executor: object, func: Callable[..., T], /, *args: Any, **options: Any) -> "Future[T]":
        """Let a function run when it is chosen, as ``executor.submit`` lets it run in a thread."""
        if isinstance(executor, ThreadPoolExecutor) and executor._shutdown:
            raise RuntimeError("cannot schedule new futures after shutdown")
        pool = _pool_of(func, args)
        name = f"{next(self._thread_numbers)} {_called(func, args)}"
        call = ThreadCall(name, partial(func, *args, **options), is_whole=not self._plan.in_pieces)
        call.waits_for_others = pool is not None
        self._threads.setdefault(pool or executor, []).append(call)
        return call.future

    def begin_thread(self, func: Callable[[], Any], name: str) -> "Future[Any]":
        """Run a function in a thread of its own, in steps: see :func:`.wait_in_thread`."""
        call = ThreadCall(name, func, is_whole=False)
        self._threads[call] = [call]
        return call.future

    def _startable(self) -> Iterator[ThreadCall]:
        """Yield the calls that have a thread of their executor, and can go on."""
        for pool, calls in self._threads.items():
            calls[:] = [call for call in calls if not call.is_over]
            size = pool._max_workers if isinstance(pool, ThreadPoolExecutor) else _DEFAULT_THREADS
            for call in calls[:size]:
                is_waiting = call.waits_for_others and calls[0] is not call
                if not is_waiting and (call.may_go_on is None or call.may_go_on()):
                    yield call

    def end_threads(self) -> None:
        """End the threads that are in the middle of something."""
        for calls in self._threads.values():
            for call in calls:
                call.kill()
        self._threads.clear()

    # Sockets

    def add_reader(self, fd: Any, callback: Callable[..., Any], *args: Any) -> None:
        self._readers[fd] = asyncio.Handle(callback, args, self)

    def remove_reader(self, fd: Any) -> bool:
        return self._readers.pop(fd, None) is not None

    def add_writer(self, fd: Any, callback: Callable[..., Any], *args: Any) -> None:
        self._writers[fd] = asyncio.Handle(callback, args, self)

    def remove_writer(self, fd: Any) -> bool:
        return self._writers.pop(fd, None) is not None

    def _poll(self) -> bool:
        """Let what waits for a socket go on, if the socket is ready."""
        if not (self._readers or self._writers):
            return False
        readable, writable, _ = select.select(list(self._readers), list(self._writers), (), 0)
        handles = [self._readers[fd] for fd in readable] + [self._writers[fd] for fd in writable]
        for handle in handles:
            self._ready.append(handle)
        return bool(handles)


def _submit(executor: ThreadPoolExecutor, loop: ChosenLoop, /, *args: Any, **options: Any) -> "Future[Any]":
    return loop.submit(executor, *args, **options)


def place_of(task: "asyncio.Task[Any]") -> str:
    """Return where a task waits, by file and line."""
    place, coro = "?", task.get_coro()
    while coro is not None:
        frame = getattr(coro, "cr_frame", None) or getattr(coro, "gi_frame", None) or getattr(coro, "ag_frame", None)
        if frame is not None and not frame.f_code.co_filename.startswith(_LIBRARY):
            place = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} {frame.f_code.co_name}"
        coro = getattr(coro, "cr_await", None) or getattr(coro, "gi_yieldfrom", None) or getattr(coro, "ag_await", None)
    return place


def _name(choice: asyncio.Handle | ThreadCall) -> str:
    if isinstance(choice, ThreadCall):
        return choice.name
    return str(choice._callback.__self__.get_name())  # type: ignore[attr-defined]


def _inner(func: Callable[..., Any], args: tuple[Any, ...]) -> Callable[..., Any]:
    """Return the function that a thread calls in the end: ``asyncio.to_thread`` wraps it."""
    args = (*getattr(func, "args", ()), *args)
    is_wrapped = getattr(getattr(func, "func", None), "__name__", "") == "run" and args
    return args[0] if is_wrapped else func  # type: ignore[no-any-return]


def _called(func: Callable[..., Any], args: tuple[Any, ...]) -> str:
    inner = _inner(func, args)
    return str(getattr(inner, "__qualname__", type(inner).__name__))


def _pool_of(func: Callable[..., Any], args: tuple[Any, ...]) -> ThreadPoolExecutor | None:
    """Return the executor that a call shuts down; None: it is another call."""
    inner = _inner(func, args)
    owner = getattr(inner, "__self__", None)
    is_shutdown = isinstance(owner, ThreadPoolExecutor) and getattr(inner, "__name__", "") == "shutdown"
    return owner if is_shutdown else None
