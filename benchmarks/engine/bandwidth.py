"""Measures how fast this machine reads memory, which bounds a decode step: the step reads all weights once."""

import threading
import time
from collections.abc import Callable

import torch

_SECONDS = 0.7
_BYTES = 1 << 30
"""Far more than any cache holds."""


def read_bandwidth(threads: int, seconds: float = _SECONDS, size: int = _BYTES) -> float:
    """Return the bytes a second that so many threads read at once. Each sums its own part, so none waits at a
    barrier."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        parts = [torch.ones(size // 8 // threads, dtype=torch.int64) for _ in range(threads)]
        return _together([part.sum for part in parts], parts[0].nbytes, seconds)
    finally:
        torch.set_num_threads(before)


def _together(readers: list[Callable[[], object]], size: int, seconds: float) -> float:
    rates = [0.0] * len(readers)
    stop = threading.Event()

    def loop(index: int) -> None:
        done, started = 0, time.perf_counter()
        while not stop.is_set():
            readers[index]()
            done += size
        rates[index] = done / (time.perf_counter() - started)

    threads = [threading.Thread(target=loop, args=(index,)) for index in range(len(readers))]
    for thread in threads:
        thread.start()
    stop.wait(seconds)
    stop.set()
    for thread in threads:
        thread.join()
    return sum(rates)
