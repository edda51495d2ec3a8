"""Imported by every Python process of a mesh that has this folder in PYTHONPATH.

SIGUSR2 keeps the process's event loop busy for TEST_BUSY_SECONDS. TEST_DESCRIPTORS limits its open descriptors. With
TEST_STALLS, a folder, a thread wakes up every 5 ms and writes there, each second, how late it was: one that is late
although its process had a processor waited for the interpreter's lock. So does a callback of each event loop, which
waits for the loop's turn besides.
"""

import os
import resource
import signal
import sys
import threading
import time
from typing import Any

PAUSE_SECONDS = 0.005


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

    def add(self) -> None:
        now, now_used = time.monotonic(), time.process_time()
        # What the process did not compute itself, it waited for on a busy machine.
        self._beats.append(min(now - self._last - PAUSE_SECONDS, now_used - self._used))
        if now - self._written > 1.0:
            with open(self._path, "a") as file:
                late = sorted(self._beats)[-8:]
                file.write(" ".join([f"{now:.3f}", str(len(self._beats)), *(f"{each:.4f}" for each in late)]) + "\n")
            self._beats, self._written = [], now
        self._last, self._used = time.monotonic(), time.process_time()


def _beat(beats: _Beats) -> None:
    while True:
        time.sleep(PAUSE_SECONDS)
        beats.add()


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

        def beat() -> None:
            beats.add()
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
