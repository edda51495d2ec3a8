"""Outputs of steps that the device of a worker's process has not finished yet."""

import contextlib
import socket
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

from ..data.pending_output import PendingOutput
from ..data.scheduler_output import ModelRunnerOutput


class LateOutputs:
    """Waits for outputs on a thread, in order, and makes a descriptor readable when one is there.

    It holds as many as the executor has steps in flight.
    """

    def __init__(self) -> None:
        self._waiting: deque[tuple[int, Future[ModelRunnerOutput]]] = deque()
        self._thread: ThreadPoolExecutor | None = None  # most workers have no late outputs
        # A descriptor and not a condition: the worker waits for this and for its ZMQ socket in one poll.
        self._reading, self._writing = socket.socketpair()
        self._reading.setblocking(False)
        self._writing.setblocking(False)

    def __len__(self) -> int:
        """Return how many outputs were not taken."""
        return len(self._waiting)

    @property
    def fd(self) -> int:
        """The descriptor, which is readable when an output is there."""
        return self._reading.fileno()

    def add(self, call_id: int, pending: PendingOutput) -> None:
        """Wait for the output of a call from now on."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="late-outputs")
        future = self._thread.submit(pending.result)
        self._waiting.append((call_id, future))
        future.add_done_callback(self._wake)

    def take(self) -> Iterator[tuple[int, Future[ModelRunnerOutput]]]:
        """Yield the calls whose outputs or errors are there, in order."""
        with contextlib.suppress(BlockingIOError):
            self._reading.recv(1 << 10)
        # In order, although a later output may be there: the core takes results in the order of its steps.
        while self._waiting and self._waiting[0][1].done():
            yield self._waiting.popleft()

    def close(self) -> None:
        """Wait for the outputs that are left, and drop them."""
        if self._thread is not None:
            self._thread.shutdown()
        self._reading.close()
        self._writing.close()

    def _wake(self, _: "Future[ModelRunnerOutput]") -> None:
        with contextlib.suppress(BlockingIOError):  # it is readable already
            self._writing.send(b"\0")
