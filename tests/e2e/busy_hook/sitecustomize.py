"""Imported by every Python process of a mesh that has this folder in PYTHONPATH: SIGUSR2 keeps its event loop busy."""

import signal
import time

SECONDS = 5.0


def _be_busy(*_: object) -> None:
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        pass


signal.signal(signal.SIGUSR2, _be_busy)
