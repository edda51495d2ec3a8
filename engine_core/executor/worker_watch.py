"""Notices when the process of a worker ends."""

import contextlib
import os
import threading
from collections.abc import Callable, Sequence

from .worker_launch import WorkerProcess


class WorkerWatch:
    """Watches the workers of one executor, each from a thread, until others take their place or it is closed.

    Attributes:
        fd: Readable once a worker has ended.
        failure: Which worker ended, and how; empty while all run.
    """

    def __init__(self) -> None:
        self.fd, self._write_fd = os.pipe()
        os.set_blocking(self.fd, False)
        self.failure = ""
        self._lock = threading.Lock()
        self._generation = 0  # of workers: the end of an earlier one is no failure
        self._on_failure: Callable[[], None] = lambda: None

    def on_failure(self, callback: Callable[[], None]) -> None:
        """Call ``callback``, from any thread, when a worker has ended. It may not call this object."""
        with self._lock:
            self._on_failure = callback
            if self.failure:
                callback()

    def begin(self, workers: Sequence[WorkerProcess]) -> None:
        """Watch these workers."""
        for worker in workers:
            threading.Thread(
                target=self._wait, args=(worker, self._generation), name="worker-monitor", daemon=True
            ).start()

    def end(self) -> None:
        """Watch none any more: the present workers are about to be ended."""
        with self._lock:
            self._generation += 1
            self.failure = ""
            with contextlib.suppress(BlockingIOError):
                while os.read(self.fd, 64):
                    pass

    def close(self, reason: str) -> None:
        """Release the descriptors, and let ``reason`` be the failure unless there is one. No worker may be watched."""
        self.failure = self.failure or reason
        os.close(self.fd)
        os.close(self._write_fd)

    def _wait(self, worker: WorkerProcess, generation: int) -> None:
        status = worker.wait()
        with self._lock:
            # Replacing workers ends the healthy ones too; their ends are no news.
            if generation != self._generation:
                return
            self.failure = f"worker {worker.rank} ended with status {status}"
            os.write(self._write_fd, b"\0")
            self._on_failure()
