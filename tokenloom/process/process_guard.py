"""Handles signals in a child process, and its end when the parent has ended."""

import ctypes
import logging
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

log = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1
_PF_EXITING = 4
_NICENESS = 10
_GROUP_TRIES = 32


def wake_with_parent() -> None:
    """Let the kernel continue this process, if it is stopped, when its parent ends; then it notices the end itself.

    On its own the kernel does so only for a process of the parent's session, and not in every container. The signal may
    also come when the thread that started this process ends, and means nothing to a process that runs.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGCONT, 0, 0, 0)


def yield_processors() -> None:
    """Leave the processors to processes whose work takes milliseconds. For a process whose work takes seconds."""
    # Linux shares processors among sessions first (autogroup). With two encoders of long texts in the session of the
    # mesh, Linux 6.18 let all other processes wait for up to 0.7 s at a time: p99 of a neighbour's answers 507 to 911
    # ms, and 163 to 186 with sessions of their own.
    with suppress(PermissionError):  # it leads its group already
        os.setsid()
    os.nice(_NICENESS)
    # Without it a session has as much of the processors as all of the mesh.
    for _ in range(_GROUP_TRIES):
        try:
            Path("/proc/self/autogroup").write_text(str(_NICENESS))
            break
        except BlockingIOError:  # of users other than root the kernel takes one change in 0.1 s from all processes
            time.sleep(random.uniform(0.05, 0.15))
        except OSError:  # a kernel without these groups, or a sandbox
            break


def is_stopped(pid: int | None) -> bool:
    """Return whether a process is stopped by a signal; False if its state is not known."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] == b"T"
    except (OSError, IndexError):
        return False


def is_ending(pid: int) -> bool:
    """Return whether a process has begun to end, or has ended; True also if its state is not known."""
    # The kernel sets the flag before it closes what the process had open, so the flag is set when a peer reads the end
    # of a connection to the process.
    try:
        state, *_, flags = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[:7]
        return state in (b"Z", b"X") or bool(int(flags) & _PF_EXITING)
    except (OSError, ValueError):
        return True


class ProcessGuard:
    """Calls ``on_terminate`` for SIGTERM, ignores SIGINT and SIGHUP, which the parent handles, and exits when the
    parent has ended: then standard input, a pipe from the parent, reaches its end. A stopped process is continued for
    that."""

    def __init__(self, on_orphaned: Callable[[], None]) -> None:
        """``on_orphaned``: cleans up before the process exits because its parent has ended."""
        self.on_terminate: Callable[[], None] = lambda: os._exit(0)
        self._on_orphaned = on_orphaned
        self._wake_read, self._wake_write = os.pipe()

    def start(self) -> None:
        """Install the handlers. Call it in the main thread, before anything else."""
        wake_with_parent()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the kernel sends it to stopped orphans, with SIGCONT
        # The signal writes to a pipe. Blocking it here would not help, because threads of libraries would receive it.
        os.set_blocking(self._wake_write, False)
        signal.set_wakeup_fd(self._wake_write)
        signal.signal(signal.SIGTERM, lambda *_: None)
        # Python prints a thread's exception and goes on: a core without its input thread would look alive and answer
        # nothing.
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
    """Exit, so that the parent notices; without one of its threads the process would hang."""
    log.critical("thread %s failed", arguments.thread, exc_info=arguments.exc_value)
    os._exit(1)
