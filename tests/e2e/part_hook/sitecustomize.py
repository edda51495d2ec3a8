"""Imported by every Python process of a mesh that has this folder in PYTHONPATH.

SIGUSR2 keeps the process's event loop busy for TEST_BUSY_SECONDS. TEST_DESCRIPTORS limits its open descriptors.
"""

import os
import resource
import signal
import time


def _be_busy(*_: object) -> None:
    end = time.monotonic() + float(os.environ["TEST_BUSY_SECONDS"])
    while time.monotonic() < end:
        pass


signal.signal(signal.SIGUSR2, _be_busy)
if "TEST_DESCRIPTORS" in os.environ:
    limit = int(os.environ["TEST_DESCRIPTORS"])
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit // 2, limit))
