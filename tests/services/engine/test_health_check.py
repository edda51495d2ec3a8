"""An engine whose workers fail their health check, and recover."""

from pathlib import Path
from typing import Any

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from msgspec.structs import replace

from tests.ready_channel import ready_channel
from tests.services.engine.control.test_coordinator_link import is_serving, running_coordinator, see
from tests.services.engine.peer import Peer, make_add, make_settings, running_engine
from tokenloom.engine_core.data.model_info import ModelInfo
from tokenloom.engine_core.fake_workers.hash_worker import HashWorker
from tokenloom.process.fall_backs import FallBacks
from tokenloom.services.engine import running_engine as health_check
from tokenloom.services.engine.records.load import LoadTracker
from tokenloom.services.engine.running_engine import HealthCheck
from tokenloom.services.runtime.host.health import Health
from tokenloom.v1.coordinator_pb2 import ENGINE_STATE_DEAD

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class FailingWorker(HashWorker):
    """Fails its health checks while ``is_broken``."""

    is_broken = False

    def check_health(self) -> None:
        if self.is_broken:
            raise RuntimeError("the device is gone")


async def test_health_and_placement_follow_the_workers(
    socket_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(health_check, "INTERVAL_SECONDS", 0.01)
    settings = make_settings(socket_dir, coordinator=f"unix:{socket_dir}/coordinator")
    async with (
        running_coordinator(socket_dir) as (stub, _),
        running_engine(settings, FailingWorker) as host,
        ready_channel(host.address) as channel,
        Peer(host.address) as peer,
    ):
        await see(stub, is_serving)
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == SERVING
        await peer.send(make_add(1, [3], 200))
        await peer.read_tokens()
        monkeypatch.setattr(FailingWorker, "is_broken", True)
        assert (await watch.read()).status == NOT_SERVING
        await see(stub, lambda engines: [engine.report.state for engine in engines] == [ENGINE_STATE_DEAD])
        received = await peer.read_until_finished([1])
        assert len(received.token_ids[1]) == 200, "accepted requests continue"
        monkeypatch.setattr(FailingWorker, "is_broken", False)
        assert (await watch.read()).status == SERVING
        await see(stub, is_serving)
    assert "the worker failed: the device is gone" in caplog.text


async def test_a_core_that_does_not_answer_is_not_healthy(socket_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health_check, "INTERVAL_SECONDS", 0.01)
    monkeypatch.setattr(health_check, "PATIENCE_SECONDS", 0.0)
    settings = make_settings(socket_dir)
    async with running_engine(settings) as host, ready_channel(host.address) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        while (await watch.read()).status != NOT_SERVING:
            pass
        monkeypatch.setattr(health_check, "PATIENCE_SECONDS", 10.0)
        assert (await watch.read()).status == SERVING


class WorkerWithout(HashWorker):
    """Does without its kernels."""

    def load_model(self) -> ModelInfo:
        return replace(super().load_model(), fall_backs=[("slow_kernels", "no compiler")])


async def test_what_core_and_workers_do_without_is_shown(socket_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health_check, "INTERVAL_SECONDS", 0.01)
    settings = make_settings(socket_dir, coordinator=f"unix:{socket_dir}/coordinator")
    async with running_coordinator(socket_dir) as (stub, _), running_engine(settings, WorkerWithout) as host:
        assert host.fall_backs.own() == [("slow_kernels", "no compiler")]
        (engine,) = await see(stub, lambda engines: [len(each.report.fall_backs) for each in engines] == [1])
        assert engine.report.fall_backs[0].kind == "slow_kernels"


class CoreWithout:
    """A core whose offload file fails while it runs."""

    async def call(self, method: str) -> object:
        return [["offload_file", "the disk is full"]] if method == "fall_backs" else None


async def test_what_a_core_does_without_since_its_start_shows_with_the_next_check() -> None:
    fall_backs = FallBacks()
    core: Any = CoreWithout()
    await HealthCheck(core, LoadTracker(4, 4), Health(), fall_backs).check()
    assert fall_backs.own() == [("offload_file", "the disk is full")]
