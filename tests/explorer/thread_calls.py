"""Functions that were given to a thread of an executor, as steps that the loop chooses."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

_current = threading.local()


class Crashed(BaseException):
    """Ends the process: no handler of errors may catch it."""


class ThreadCall:
    """Holds one call. It runs whole in one step, or from one access of the disk to the next.

    Attributes:
        future: Its result.
        is_over: It has ended, or was cancelled before it began.
        waits_for_others: It begins when the calls before it have ended.
        may_go_on: Returns whether what its thread waits for has happened; None: it waits for nothing.
    """

    def __init__(self, name: str, func: Callable[[], Any], *, is_whole: bool) -> None:
        self.name = name
        self.future: Future[Any] = Future()
        self.waits_for_others = False
        self.may_go_on: Callable[[], bool] | None = None
        self._func = func
        self._is_whole = is_whole
        self._has_begun = self._has_ended = self._is_killed = False
        self._go, self._paused = threading.Semaphore(0), threading.Semaphore(0)
        self._thread: threading.Thread | None = None
        self._result: Any = None
        self._error: BaseException | None = None

    @property
    def is_over(self) -> bool:
        return self._has_ended or (not self._has_begun and self.future.cancelled())

    def step(self) -> None:
        """Run on, to the end or to the next access of the disk. Raises :class:`Crashed`."""
        if not self._has_begun:
            self._has_begun = True
            self.future.set_running_or_notify_cancel()  # from here on a cancellation does not stop it
            if not self._is_whole:
                self._thread = threading.Thread(target=self._run_in_thread, daemon=True)
                self._thread.start()
            return
        if self._thread is None:
            self._run()
        else:
            self._go.release()
            self._paused.acquire()
        if self._has_ended:
            self._deliver()

    def kill(self) -> None:
        """End its thread, wherever that is."""
        if self._thread is not None and not self._has_ended:
            self._is_killed = True
            self._go.release()
            self._thread.join()

    def pause(self) -> None:
        """Wait in the thread until the loop chooses it again."""
        self._paused.release()
        self._go.acquire()
        if self._is_killed:
            raise Crashed

    def _run_in_thread(self) -> None:
        _current.call = self
        self._go.acquire()
        if not self._is_killed:
            self._run()
        self._paused.release()

    def _run(self) -> None:
        try:
            self._result = self._func()
        except BaseException as error:
            self._error = error
        self._has_ended = True

    def _deliver(self) -> None:
        error, self._error = self._error, None
        if isinstance(error, Crashed):
            raise error
        if error is not None:
            self.future.set_exception(error)
        else:
            self.future.set_result(self._result)


def pause_thread() -> None:
    """Let the loop choose what runs next, if this is the thread of a call that runs in steps."""
    if (call := getattr(_current, "call", None)) is not None:
        call.pause()


def wait_in_thread(may_go_on: Callable[[], bool]) -> None:
    """Wait in the thread of a call that runs in steps until ``may_go_on`` returns True."""
    call: ThreadCall = _current.call
    call.may_go_on = may_go_on
    call.pause()
    call.may_go_on = None


class SteppedLock:
    """A lock of threads that run in steps."""

    def __init__(self) -> None:
        self._is_held = False

    def __enter__(self) -> None:
        wait_in_thread(lambda: not self._is_held)
        self._is_held = True

    def __exit__(self, *_: object) -> None:
        self._is_held = False
