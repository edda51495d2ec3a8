"""Hooks of kernels while other threads call them."""

import threading

import numpy as np

from tokenloom.gpu_worker.call_recording.recorder import recording
from tokenloom.gpu_worker.kernels.library import load_replay

COUNT = 4_000_000


def test_a_call_of_another_thread_may_outlast_a_recording() -> None:
    """ctypes borrows the hook that it finds when a call begins, and calls it when the call ends."""
    library = load_replay()
    words, numbers = np.ones(COUNT, dtype=np.uint16), np.zeros(COUNT, dtype=np.float32)
    begins = threading.Barrier(2)

    def call() -> None:
        for _ in range(10):
            begins.wait()
            library.widen(words.ctypes.data, numbers.ctypes.data, COUNT)
            begins.wait()

    thread = threading.Thread(target=call)
    thread.start()
    for _ in range(10):
        with recording() as recorder:
            begins.wait()
            library.widen(words.ctypes.data, numbers.ctypes.data, 100)
        assert recorder is not None
        assert len(recorder.calls) == 1, "that of the other thread does not count"
        del recorder
        begins.wait()
    thread.join()
    assert numbers.all()
