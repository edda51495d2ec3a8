"""When a process has no descriptor left, accepting neither spins nor ends."""

import subprocess
import sys
import time
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from socket import create_connection, socket

import psutil

from tests.engine_core.processes import wait_until
from tests.services.gateway.http.server.starved_server import DESCRIPTORS

ROOT = Path(__file__).parents[4]
WATCHED_SECONDS = 1.5


def ask(running: socket) -> None:
    """Send a request on a connection and read the whole answer."""
    running.sendall(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
    answer = b""
    while not answer.endswith(b"\r\n\r\nok"):
        received = running.recv(65536)
        assert received
        answer += received


def ask_until_answered(url: str, seconds: float = 30.0) -> bytes:
    """Ask until the server has noticed that connections were closed."""
    end = time.monotonic() + seconds
    while True:
        try:
            with urllib.request.urlopen(url, timeout=seconds) as answer:
                body: bytes = answer.read()
                return body
        except OSError:
            assert time.monotonic() < end
            time.sleep(0.05)


def test_it_waits_and_serves_again() -> None:
    command = (sys.executable, "-m", "tests.services.gateway.http.server.starved_server")
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT) as server:
        assert server.stdout is not None
        address = server.stdout.readline().strip()
        host, _, port = address.rpartition(":")
        process = psutil.Process(server.pid)
        with ExitStack() as held, create_connection((host, int(port)), timeout=30) as running:
            ask(running)
            for _ in range(3 * DESCRIPTORS):
                held.enter_context(create_connection((host, int(port)), timeout=30))
            assert wait_until(lambda: process.num_fds() >= DESCRIPTORS, timeout=60)
            before = process.cpu_times()
            time.sleep(WATCHED_SECONDS)
            after = process.cpu_times()
            assert after.user + after.system - before.user - before.system < 0.2 * WATCHED_SECONDS, "it spins"
            ask(running)
        assert ask_until_answered(f"http://{address}/") == b"ok"
        server.communicate()
        assert server.returncode == 0
