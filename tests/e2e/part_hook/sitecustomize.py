"""Imported by every Python process of a mesh that has this folder in PYTHONPATH.

SIGUSR2 keeps the process's event loop busy for TEST_BUSY_SECONDS. TEST_DESCRIPTORS limits its open descriptors. With
TEST_STALLS, a folder, a thread wakes up every 5 ms and writes there, each second, how late it was: one that is late
although its process had a processor waited for the interpreter's lock.
"""

import os
import resource
import signal
import sys
import threading
import time


def _be_busy(*_: object) -> None:
    end = time.monotonic() + float(os.environ["TEST_BUSY_SECONDS"])
    while time.monotonic() < end:
        pass


def _beat(folder: str) -> None:
    beats: list[float] = []
    written = last = time.monotonic()
    used = time.process_time()
    while True:
        time.sleep(0.005)
        now, now_used = time.monotonic(), time.process_time()
        # What the process did not compute itself, it waited for on a busy machine.
        beats.append(min(now - last - 0.005, now_used - used))
        last, used = now, now_used
        if now - written > 1.0:
            with open(f"{folder}/{os.getpid()}", "a") as file:
                late = sorted(beats)[-8:]
                file.write(" ".join([f"{now:.3f}", str(len(beats)), *(f"{each:.4f}" for each in late)]) + "\n")
            beats, written = [], now


signal.signal(signal.SIGUSR2, _be_busy)
if "TEST_STALLS" in os.environ:
    with open(f"{os.environ['TEST_STALLS']}/{os.getpid()}", "w") as named:
        named.write(" ".join(sys.orig_argv[1:5]) + "\n")
    threading.Thread(target=_beat, args=(os.environ["TEST_STALLS"],), daemon=True).start()
if "TEST_DESCRIPTORS" in os.environ:
    limit = int(os.environ["TEST_DESCRIPTORS"])
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit // 2, limit))
