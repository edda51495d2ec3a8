"""Signals and orphanhood of a process that another of ours started."""

import logging
import os
import signal
import sys
import threading
from collections.abc import Callable

log = logging.getLogger(__name__)


class ProcessGuard:
    """SIGTERM asks to finish; SIGINT is the parent's business; and when standard input, a pipe from the parent, comes
    to its end, the parent is gone and so is everyone who could want an answer."""

    def __init__(self, on_orphaned: Callable[[], None]) -> None:
        """``on_orphaned``: what to clean up before the process ends."""
        self.on_terminate: Callable[[], None] = lambda: os._exit(0)
        self._on_orphaned = on_orphaned
        self._wake_read, self._wake_write = os.pipe()

    def start(self) -> None:
        """To be called first, in the main thread."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        # A pipe, not a blocked signal: libraries have threads that take it whatever is blocked here.
        os.set_blocking(self._wake_write, False)
        signal.set_wakeup_fd(self._wake_write)
        signal.signal(signal.SIGTERM, lambda *_: None)
        threading.excepthook = _exit_on_thread_failure
        threading.Thread(target=self._watch_terminate, name="core-signals", daemon=True).start()
        threading.Thread(target=self._watch_parent, name="core-parent", daemon=True).start()

    def _watch_terminate(self) -> None:
        while os.read(self._wake_read, 1):
            self.on_terminate()

    def _watch_parent(self) -> None:
        while os.read(sys.stdin.fileno(), 1):
            pass
        self._on_orphaned()
        os._exit(1)


def _exit_on_thread_failure(arguments: threading.ExceptHookArgs) -> None:
    """A process without one of its threads would hang: better that its parent sees it die."""
    log.critical("thread %s failed", arguments.thread, exc_info=arguments.exc_value)
    os._exit(1)
