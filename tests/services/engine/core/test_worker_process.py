"""An operator's calls to a real model's engine whose worker is a process of its own."""

import gzip
import os
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.engine_core.processes import has_ended
from tests.mesh.faults.test_killed_workers import workers_of
from tests.ready_channel import ready_channel
from tests.services.engine.peer import Peer, make_add, make_settings
from tokenloom.model_files.model_path import DEMO_MODEL
from tokenloom.services.engine.service import EngineService
from tokenloom.services.runtime.host.host import Host
from tokenloom.services.runtime.host.service import running
from tokenloom.v1 import engine_pb2
from tokenloom.v1.engine_pb2 import PAUSE_MODE_WAIT, ReloadWeightsRequest, SleepRequest, WakeUpRequest
from tokenloom.v1.engine_pb2_grpc import EngineAdminStub


@pytest.fixture
async def host(socket_dir: Path, tmp_path: Path) -> AsyncIterator[Host]:
    settings = make_settings(
        socket_dir,
        worker="model",
        model=str(DEMO_MODEL),
        dtype="float32",
        num_threads=1,
        block_size=16,
        distributed_executor_backend="mp",
        profiler_dir=str(tmp_path / "profiles"),
    )
    async with running(EngineService(settings), settings) as host:
        yield host


@pytest.fixture
def other_weights(tmp_path: Path) -> Path:
    """The demo model's shapes with random weights."""
    directory = tmp_path / "random"
    shutil.copytree(DEMO_MODEL, directory)
    generator = torch.Generator().manual_seed(0)
    tensors = load_file(DEMO_MODEL / "model.safetensors")
    for tensor in tensors.values():
        tensor.normal_(0, 0.1, generator=generator)
    save_file(tensors, directory / "model.safetensors")
    return directory


def resident_mib(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGESIZE") >> 20


async def say(host: Host) -> list[int]:
    async with Peer(host.address) as peer:
        await peer.send(make_add(1, range(1, 40), 8))
        received = await peer.read_until_finished([1])
        assert received.finished[1].num_output_tokens == 8
        return received.token_ids[1]


async def test_sleep_profiles_and_new_weights_reach_the_worker(host: Host, other_weights: Path, tmp_path: Path) -> None:
    (worker,) = workers_of(os.getpid())
    async with ready_channel(host.address) as channel:
        admin = EngineAdminStub(channel)
        before = await say(host)

        awake = resident_mib(worker)
        await admin.Sleep(SleepRequest(level=1, mode=PAUSE_MODE_WAIT))
        weights = (DEMO_MODEL / "model.safetensors").stat().st_size >> 20
        assert awake - resident_mib(worker) >= 0.8 * weights
        await admin.WakeUp(WakeUpRequest())
        assert await say(host) == before

        await admin.StartProfile(engine_pb2.StartProfileRequest())
        with pytest.raises(grpc.aio.AioRpcError, match="recorded already"):
            await admin.StartProfile(engine_pb2.StartProfileRequest())
        await say(host)
        await admin.StopProfile(engine_pb2.StopProfileRequest())
        (trace,) = (tmp_path / "profiles").iterdir()
        assert b"aten::" in gzip.decompress(trace.read_bytes())

        await admin.Sleep(SleepRequest(level=2, mode=PAUSE_MODE_WAIT))
        answer = await admin.ReloadWeights(ReloadWeightsRequest(path=str(other_weights)))
        await admin.WakeUp(WakeUpRequest())
        info = await admin.GetEngineInfo(engine_pb2.GetEngineInfoRequest())
        assert info.fingerprint == answer.fingerprint
        assert await say(host) != before
        await admin.ReloadWeights(ReloadWeightsRequest(path=str(DEMO_MODEL)))
        assert await say(host) == before
    assert list(workers_of(os.getpid())) == [worker], "the same process all along"
    assert not has_ended(worker)
