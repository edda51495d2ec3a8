"""Owns background tasks: none outlives its owner, none fails unseen."""

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar, cast

T = TypeVar("T")

_CANCEL_SECONDS = 1.0
"""Time for a cancelled task to clean up before it is cancelled again."""


class Tasks:
    """Owns tasks until :meth:`close`. Unlike ``asyncio.TaskGroup`` it is not bound to one ``async with`` block, and it
    reports a failure to ``on_failure`` instead of cancelling the code that waits."""

    def __init__(self, on_failure: Callable[[BaseException], None]) -> None:
        self._on_failure = on_failure
        self._tasks: dict[asyncio.Task[Any], None] = {}  # in the order of their start; each leaves when done

    def spawn(self, coro: Coroutine[Any, Any, Any], *, name: str) -> asyncio.Task[Any]:
        """Start a task; an exception other than cancellation goes to ``on_failure``."""
        task = asyncio.get_running_loop().create_task(coro, name=name)
        # asyncio itself keeps weak references only: a task that nothing else holds could be collected while it waits.
        self._tasks[task] = None
        task.add_done_callback(self._done)
        return task

    async def close(self) -> None:
        """Cancel the tasks that still run and wait for them."""
        while tasks := [task for task in self._tasks if task is not asyncio.current_task()]:
            try:
                # Cancelled before its first step, a task would run none of its ``finally``.
                while not all(map(_has_begun, tasks)):  # noqa: ASYNC110
                    await asyncio.sleep(0)
            finally:  # also if this is cancelled itself
                for task in tasks:
                    task.cancel()
            # Cancelling once may not suffice: a TaskGroup raises a child's failure instead of the cancellation.
            await asyncio.wait(tasks, timeout=_CANCEL_SECONDS)
            for task in tasks:
                if task.done():
                    self._tasks.pop(task, None)

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._on_failure(error)


def _has_begun(task: asyncio.Task[Any]) -> bool:
    coro = cast(Coroutine[Any, Any, Any], task.get_coro())
    return task.done() or inspect.getcoroutinestate(coro) != inspect.CORO_CREATED


def is_cancelled() -> bool:
    """Return whether the task that asks is being cancelled.

    A call of gRPC raises ``CancelledError``, too, when its channel is closed in this process. Taken for a cancellation,
    that would end a client's connection without an answer.
    """
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


class Failure:
    """The first error that ends a service."""

    def __init__(self) -> None:
        self._error: BaseException | None = None
        self._was_taken = False
        self._happened = asyncio.Event()

    @property
    def happened(self) -> bool:
        return self._error is not None

    def set(self, error: BaseException) -> None:
        """Record the error."""
        self._error = error
        self._happened.set()

    async def wait(self) -> None:
        """Return once there is an error."""
        await self._happened.wait()

    async def take(self) -> BaseException:
        """Wait for the error and return it; :meth:`raise_unseen` then does not raise it."""
        await self._happened.wait()
        assert self._error is not None
        self._was_taken = True
        return self._error

    def raise_unseen(self) -> None:
        """Raise the error, unless there is none or it was taken."""
        if self._error is not None and not self._was_taken:
            raise self._error


async def completed(awaitable: Awaitable[T]) -> T:
    """Wait for something to its end, also if the waiting task is cancelled meanwhile; the cancellation is raised then.

    For what changes a state elsewhere, such as a file or another process, if that must be noted here whatever becomes
    of the caller. It must end soon by itself.
    """
    running = asyncio.ensure_future(awaitable)
    cancellation: asyncio.CancelledError | None = None
    while not running.done():
        try:
            await asyncio.wait([running])
        except asyncio.CancelledError as error:
            cancellation = error
    if cancellation is None:
        return running.result()
    if not running.cancelled():
        running.exception()  # the caller does not ask for it any more
    raise cancellation


async def first_of(*waits: Coroutine[Any, Any, object]) -> None:
    """Run coroutines until the first one returns or raises, cancel the others, and raise what the first one raised, as
    it is. For tasks that outlive the call, use :class:`Tasks`."""
    tasks = [asyncio.create_task(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            if task.done():
                task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
