"""The store on a real server of LMCache, which ``make test-platforms`` installs into ``.lmcache``; what it answers is
held to the exchange that the other tests play (``python -m tests.engine_core.kv_transfer.test_lmcache_server`` records
it anew)."""

import os
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from tests.engine_core.kv_transfer.offloading_core import expected
from tests.engine_core.kv_transfer.storing_core import BLOCK_BYTES, BLOCK_SIZE, StoringCore
from tests.engine_core.kv_transfer.test_lmcache_store import (
    DATA,
    KEYS,
    PROMPT,
    RECORDED,
    VALUE_BYTES,
    converse,
    kill_within_put,
    put,
    read,
)
from tokenloom.engine_core.kv_transfer.lmcache_store import LMCacheStore

ROOT = Path(__file__).parents[3]
PYTHON = Path(os.environ.get("TOKENLOOM_LMCACHE_PYTHON", ROOT / ".lmcache" / "bin" / "python"))
Steps = list[tuple[str, str]]


@contextmanager
def real_server() -> Iterator[int]:
    """Start a server of LMCache; yields its port."""
    assert PYTHON.is_file(), f"there is no LMCache at {PYTHON}: `make lmcache` installs it"
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
    command = [str(PYTHON), "-m", "lmcache.v1.server", "127.0.0.1", str(port)]
    environment = {**os.environ, "LMCACHE_TRACK_USAGE": "false", "CUDA_VISIBLE_DEVICES": ""}
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            _wait(port, process)
            yield port
        finally:
            process.kill()


def _wait(port: int, process: "subprocess.Popen[bytes]") -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except ConnectionRefusedError:
            time.sleep(0.05)
    raise AssertionError("LMCache's server did not start")


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with real_server() as port:
        yield port


def record(port: int) -> Steps:
    """Hold the conversation through a proxy; returns what was sent and what was answered, step by step."""
    steps: Steps = []
    with socket.create_server(("127.0.0.1", 0)) as proxy, socket.create_connection(("127.0.0.1", port)) as server:

        def relay() -> None:
            client, _ = proxy.accept()
            with client:
                while asked := client.recv(1 << 16):
                    server.sendall(asked)
                    server.settimeout(0.5)  # a put has no answer
                    answer = b""
                    try:
                        while piece := server.recv(1 << 16):
                            answer += piece
                            client.sendall(piece)
                    except TimeoutError:
                        pass
                    steps.append((asked.hex(), answer.hex()))

        thread = threading.Thread(target=relay)
        thread.start()
        store = LMCacheStore("127.0.0.1", proxy.getsockname()[1], 10.0)
        assert converse(store) == (set(), True, {KEYS[0]}, b"block", b"")
        store.close()
        thread.join(30)
    return steps


def joined(steps: Steps) -> tuple[str, str]:
    """What was sent and what was answered, however it was cut into pieces."""
    return "".join(asked for asked, _ in steps), "".join(answer for _, answer in steps)


def test_a_real_server_answers_as_it_was_recorded() -> None:
    with real_server() as port:
        recorded = msgspec.json.decode(RECORDED.read_bytes(), type=Steps)
        assert joined(record(port)) == joined(recorded)


def test_engines_share_blocks_through_it(port: int) -> None:
    cores = [StoringCore(f"lm://127.0.0.1:{port}", num_blocks=20) for _ in range(2)]
    for core in cores:
        assert core.run(PROMPT) == [expected(PROMPT)]
    num_blocks = (len(PROMPT) - 1) // BLOCK_SIZE
    assert cores[0].num_saved >= num_blocks
    assert cores[1].core.scheduler.stats().kv_bytes_received == {"lmcache": num_blocks * BLOCK_BYTES}
    for core in cores:
        core.core.shutdown()


def test_what_an_engine_left_that_was_killed_within_a_put(port: int) -> None:
    """As the server that the other tests play: it has a name without a value, and hangs up on all who ask for that."""
    store = LMCacheStore("127.0.0.1", port, 10.0)
    kill_within_put(port, KEYS[9])
    assert store.find(KEYS[9:10], in_order=True) == {KEYS[9]}
    assert list(store.read(KEYS[9:11], VALUE_BYTES)) == [b"", None]
    store.remove(KEYS[9])
    assert put(store, KEYS[9])
    assert read(store, KEYS[9]) == DATA
    store.close()


def test_a_server_that_is_killed_costs_a_recompute() -> None:
    with real_server() as port:
        core = StoringCore(f"lm://127.0.0.1:{port}", num_blocks=20)
        assert core.run(PROMPT) == [expected(PROMPT)]
    core.core.reset_prefix_cache()
    assert core.run(PROMPT, settles=False) == [expected(PROMPT)]
    assert core.connector.queue.is_away
    core.core.shutdown()


if __name__ == "__main__":
    with real_server() as recorded_port:
        RECORDED.write_bytes(msgspec.json.format(msgspec.json.encode(record(recorded_port)), indent=1) + b"\n")
