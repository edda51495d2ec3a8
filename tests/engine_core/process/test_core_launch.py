"""A core in an actor of Ray, without a cluster; ``tests/parity/ranks/test_core_on_ray.py`` has one."""

import socket
import subprocess
import sys
import threading
from unittest.mock import MagicMock

import pytest

from tokenloom.engine_core.data.config import CacheConfig, EngineConfig, KVConfig, ParallelConfig, WorkerConfig
from tokenloom.engine_core.executor import ray_cluster
from tokenloom.engine_core.process import core_launch
from tokenloom.engine_core.process.core_launch import RemoteCore, _accept

SOON = 30.0
ON_RAY = ParallelConfig(data_parallel_backend="ray")


def test_a_core_waits_for_the_client_that_knows_the_secret() -> None:
    found: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address, secret = listener.getsockname(), b"s" * 32
        waiting = threading.Thread(target=lambda: found.append(_accept(listener, secret)))
        waiting.start()
        for wrong in (b"x" * 32, b"s" * 31):
            with socket.create_connection(address) as other:
                other.sendall(wrong)
                other.shutdown(socket.SHUT_WR)
                assert other.recv(1) == b""
        with socket.create_connection(address) as client:
            client.sendall(secret + b"more")
            waiting.join(SOON)
            assert found[0].recv(4) == b"more"
            found[0].close()


class FakeChild:
    """A child that waits for its command."""

    def __init__(self, is_gone: bool) -> None:
        self.is_gone = is_gone
        self.calls: list[object] = []

    def run(self, command: list[str], descriptors: list[int]) -> None:
        if self.is_gone:
            raise BrokenPipeError
        self.calls.append((command, descriptors))

    def discard(self) -> None:
        self.calls.append("discarded")


PRINT = [sys.executable, "-c", "import sys; sys.stdin.read()"]


@pytest.mark.parametrize(
    ("command", "is_gone"),
    [([sys.executable, "-m", "this"], False), ([sys.executable, "-m", "this"], True), (PRINT, False)],
)
def test_a_child_that_waits_becomes_the_core_if_it_can(
    command: list[str], is_gone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = FakeChild(is_gone)
    monkeypatch.setattr(core_launch, "take_waiting_child", lambda: child)
    process: object = core_launch._spawn(command, [1])
    if command is PRINT or is_gone:
        assert child.calls == (["discarded"] if is_gone else [])
        assert isinstance(process, subprocess.Popen)
        process.communicate()
        assert process.returncode == 0
    else:
        assert process is child
        assert child.calls == [(command, [1])]


def test_kv_that_moves_is_refused_before_ray_is_asked() -> None:
    with pytest.raises(ValueError, match="KV does not move to and from a core on Ray: leave out kv_transports"):
        RemoteCore(EngineConfig(kv=KVConfig(transports=("shm",)), parallel=ON_RAY))


def test_no_array_is_put_into_the_memory_of_another_machine() -> None:
    assert ON_RAY.request_arena_bytes == 0
    assert ParallelConfig().request_arena_bytes == ParallelConfig().array_arena_bytes > 0


@pytest.mark.parametrize(("gpus", "engines", "place"), [(0, 3, 0), (1, 1, 0)])
def test_the_gpus_of_a_core_are_its_own(gpus: int, engines: int, place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many engines the client's machine has, of which this one is the third."""
    monkeypatch.setattr(ray_cluster, "connect", MagicMock())
    monkeypatch.setattr(ray_cluster, "reserve", lambda *_, **__: None)
    monkeypatch.setattr(ray_cluster, "gpus_of_worker", lambda *_: gpus)
    config = EngineConfig(worker=WorkerConfig(place_on_host=2), cache=CacheConfig(engines_on_host=3), parallel=ON_RAY)
    core = RemoteCore(config)
    core._connection.close()
    assert (core._config.cache.engines_on_host, core._config.worker.place_on_host) == (engines, place)
