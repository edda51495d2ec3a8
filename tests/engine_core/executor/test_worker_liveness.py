"""An executor notices the end of a worker by a connection over which nothing is sent."""

import socket
import subprocess
import sys
import threading

import pytest

from tokenloom.engine_core.data.errors import ExecutorFailedError
from tokenloom.engine_core.executor.ray_cluster import WorkerLiveness, open_lifeline

WORKER = """
from tokenloom.engine_core.executor.ray_cluster import open_lifeline
listener = open_lifeline("127.0.0.1")
print(listener.getsockname()[1], flush=True)
input()
"""


def test_the_end_of_a_process_is_noticed() -> None:
    lost: list[int] = []
    noticed = threading.Event()
    process = subprocess.Popen([sys.executable, "-c", WORKER], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with process, open_lifeline("127.0.0.1") as mine:
        assert process.stdout is not None
        places = [mine.getsockname()[1], int(process.stdout.readline())]

        def on_lost(rank: int) -> None:
            lost.append(rank)
            noticed.set()

        lines = WorkerLiveness([("127.0.0.1", port) for port in places], on_lost)
        assert not noticed.is_set()
        process.kill()
        assert noticed.wait(30)
    assert lost == [1]
    lines.close()


def test_an_executor_that_closes_has_lost_none() -> None:
    lost: list[int] = []
    with open_lifeline("127.0.0.1") as listener:
        lines = WorkerLiveness([listener.getsockname()], lost.append)
        lines.close()
        lines._thread.join()
        lines.close()
    assert not lost


def test_the_kernel_asks_a_machine_that_is_silent() -> None:
    with open_lifeline("127.0.0.1") as listener:
        lines = WorkerLiveness([listener.getsockname()], lambda rank: None)
        (connection,) = lines._connections
        assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        idle, between = (
            connection.getsockopt(socket.IPPROTO_TCP, name) for name in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL)
        )
        assert idle + between <= 2
        assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) < 1000 * (idle + between)
        lines.close()


def test_a_worker_that_cannot_be_reached_is_named() -> None:
    with open_lifeline("127.0.0.1") as listener:
        gone = open_lifeline("127.0.0.1")
        port = gone.getsockname()[1]
        gone.close()
        with pytest.raises(ExecutorFailedError, match=f"worker 1 cannot be reached at 127.0.0.1:{port}"):
            WorkerLiveness([listener.getsockname(), ("127.0.0.1", port)], lambda rank: None)
