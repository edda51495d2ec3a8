"""Imported by every Python process of a mesh that has this folder in PYTHONPATH.

SIGUSR2 keeps the process's event loop busy for TEST_BUSY_SECONDS. TEST_DESCRIPTORS limits its open descriptors. With
TEST_STALLS, a folder, a thread wakes up every 5 ms and writes there, each second, how late it was: one that is late
although it had a processor waited for the interpreter's lock. So does a callback of each event loop, which waits for
the loop's turn besides. With TEST_STACKS, another folder, the stacks of all threads are written there whenever a
process's first loop has not beaten for 25 ms, while it still computes: the lock is not needed for that.
"""

import faulthandler
import os
import resource
import signal
import sys
import threading
import time
from typing import Any

PAUSE_SECONDS = 0.005
STACKS_SECONDS = 0.025


def _be_busy(*_: object) -> None:
    end = time.monotonic() + float(os.environ["TEST_BUSY_SECONDS"])
    while time.monotonic() < end:
        pass


class _Beats:
    """Notes how late one beat after the other was, and writes it to a file."""

    def __init__(self, path: str) -> None:
        with open(path, "w") as named:
            named.write(" ".join(sys.orig_argv[1:5]) + "\n")
        self._path = path
        self._beats: list[float] = []
        self._written = self._last = time.monotonic()
        self._used = time.process_time()
        self._statistics: int | None = None  # of the thread that beats
        self._waited = 0.0

    def add(self) -> float:
        """Note a beat, and return by how much it was late."""
        now, now_used, waited = time.monotonic(), time.process_time(), self._wait_seconds()
        # What its thread has waited for a processor, the machine was busy with other work, and so it was with what the
        # process did not compute itself.
        late = min(now - self._last - PAUSE_SECONDS - (waited - self._waited), now_used - self._used)
        self._beats.append(late)
        if now - self._written > 1.0:
            with open(self._path, "a") as file:
                most = sorted(self._beats)[-8:]
                file.write(" ".join([f"{now:.3f}", str(len(self._beats)), *(f"{each:.4f}" for each in most)]) + "\n")
            self._beats, self._written = [], now
        self._last, self._used, self._waited = time.monotonic(), time.process_time(), waited
        return late

    def _wait_seconds(self) -> float:
        """Return how long this thread has waited for a processor since it began; 0: the kernel does not say."""
        if self._statistics is None:
            try:
                self._statistics = os.open("/proc/thread-self/schedstat", os.O_RDONLY)
            except OSError:
                self._statistics = -1
        return float(os.pread(self._statistics, 64, 0).split()[1]) / 1e9 if self._statistics >= 0 else 0.0


def _beat(beats: _Beats) -> None:
    while True:
        time.sleep(PAUSE_SECONDS)
        beats.add()


def _stacks_file() -> int | None:
    """Return a descriptor for the stacks of this process; None: they are not wanted."""
    if (folder := os.environ.get("TEST_STACKS")) is None:
        return None
    file = os.open(f"{folder}/{os.getpid()}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(file, f"{' '.join(sys.orig_argv[1:5])}\n".encode())
    return file


def _watch_loops(folder: str) -> None:
    """Let each event loop of a service beat from its begin on."""
    try:
        import uvloop
    except ImportError:  # a process of the tests' that has no service
        return
    make, made = uvloop.new_event_loop, 0

    def new_event_loop() -> Any:
        nonlocal made
        loop, made = make(), made + 1
        beats = _Beats(f"{folder}/{os.getpid()}.loop-{made}")
        stacks = _stacks_file() if made == 1 else None

        def beat() -> None:
            late = beats.add()
            if stacks is not None:
                if late > STACKS_SECONDS - 2 * PAUSE_SECONDS:
                    os.write(stacks, f"late by {late * 1e3:.0f} ms at {time.monotonic():.3f}\n\n".encode())
                faulthandler.dump_traceback_later(STACKS_SECONDS, file=stacks)
            loop.call_later(PAUSE_SECONDS, beat)

        loop.call_later(PAUSE_SECONDS, beat)
        return loop

    uvloop.new_event_loop = new_event_loop


signal.signal(signal.SIGUSR2, _be_busy)
if "TEST_STALLS" in os.environ:
    of_thread = _Beats(f"{os.environ['TEST_STALLS']}/{os.getpid()}")
    threading.Thread(target=_beat, args=(of_thread,), daemon=True).start()
    _watch_loops(os.environ["TEST_STALLS"])
if "TEST_DESCRIPTORS" in os.environ:
    limit = int(os.environ["TEST_DESCRIPTORS"])
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit // 2, limit))
