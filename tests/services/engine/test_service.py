"""The engine as processes: what a signal, a dead core and a dead front lead to."""

import asyncio
import json
import shutil
import signal
import subprocess
import sys
import urllib.request
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.engine_core.processes import has_ended
from tests.services.engine.peer import VOCAB_SIZE, Peer, make_add, make_settings, running_engine
from tokenloom.engine_core.data.model_info import ModelInfo
from tokenloom.engine_core.fake_workers.hash_worker import HashWorker, expected_tokens
from tokenloom.model_files.model_path import DEMO_MODEL
from tokenloom.request import errors, wire_errors
from tokenloom.services.engine.records.engine_settings import EngineSettings
from tokenloom.services.runtime.peers.channels import open_channel
from tokenloom.v1.types_pb2 import FINISH_REASON_ERROR


@dataclass
class EngineProcess:
    """A running engine: its front's process, its core's, and where it listens."""

    front: asyncio.subprocess.Process
    core: psutil.Process
    address: str

    async def wait(self, timeout: float) -> int:
        async with asyncio.timeout(timeout):
            return await self.front.wait()

    async def wait_for_core(self, timeout: float) -> None:
        async with asyncio.timeout(timeout):
            while not has_ended(self.core.pid):  # noqa: ASYNC110  # not our child
                await asyncio.sleep(0.01)


@pytest.fixture
async def engine(request: pytest.FixtureRequest, socket_dir: Path) -> AsyncIterator[EngineProcess]:
    """An engine; the fixture's parameter is more of its flags."""
    state_file = socket_dir / "state.json"
    flags = ["--worker", "hash", "--listen", f"unix:{socket_dir}/engine", "--hash-step-seconds", "0.002"]
    flags += getattr(request, "param", [])
    front = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tokenloom.services.engine", *flags, "--state-file", str(state_file)),
        stderr=subprocess.DEVNULL,
    )
    try:
        async with asyncio.timeout(60):
            while not state_file.exists():  # noqa: ASYNC110  # another process writes it
                await asyncio.sleep(0.01)
            address = json.loads(state_file.read_text())["address"]
            await wait_until_serving(address)
        (core,) = psutil.Process(front.pid).children()
        yield EngineProcess(front, core, address)
    finally:
        if front.returncode is None:
            front.kill()
        await front.wait()


async def wait_until_serving(address: str) -> None:
    async with open_channel(address) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        while (await watch.read()).status != health_pb2.HealthCheckResponse.SERVING:
            pass
        watch.cancel()


async def test_sigterm_lets_live_requests_finish_refuses_new_ones_and_leaves_nothing(engine: EngineProcess) -> None:
    async with Peer(engine.address) as peer:
        # The second keeps the engine up until the signal has come, and is aborted then.
        await peer.send(make_add(1, [1, 2], 300), make_add(2, [5, 6], 1500))
        await peer.read_tokens()
        engine.front.send_signal(signal.SIGTERM)
        slot = 2
        while slot == 2 or peer.received.finished[slot].reason != FINISH_REASON_ERROR:
            slot += 1
            await peer.send(make_add(slot, [3, 4], 1))
            await peer.read_until_finished([slot])
        error = wire_errors.from_proto(peer.received.finished[slot].error)
        assert isinstance(error, errors.Unavailable)
        assert error.retry_after is not None
        await peer.send(abort_slots=[2])
        received = await peer.read_until_finished([1, 2])
        assert received.token_ids[1] == expected_tokens([1, 2], 300, VOCAB_SIZE)
        assert await engine.wait(60) == 0
    await engine.wait_for_core(30)


async def test_when_the_core_is_killed_requests_are_told_and_the_front_exits(engine: EngineProcess) -> None:
    async with Peer(engine.address) as peer:
        await peer.send(make_add(1, [1, 2], 1500))
        await peer.read_tokens()
        engine.core.kill()
        received = await peer.read_until_finished([1])
        assert received.finished[1].error.reason == "ENGINE_DIED"
        assert await engine.wait(30) == 1


@pytest.mark.parametrize("engine", [["--distributed-executor-backend", "mp"]], indirect=True)
@pytest.mark.parametrize("victim", ["core", "worker"])
async def test_a_core_whose_step_hangs_is_killed_within_seconds(engine: EngineProcess, victim: str) -> None:
    (worker,) = engine.core.children()
    async with Peer(engine.address) as peer:
        await peer.send(make_add(1, [1, 2], 1500))
        for _ in range(3):
            await peer.read_tokens()
        (engine.core if victim == "core" else worker).suspend()
        stopped_at = asyncio.get_running_loop().time()
        received = await peer.read_until_finished([1])
        assert received.finished[1].error.reason == "ENGINE_DIED"
        assert await engine.wait(30) == 1
        assert asyncio.get_running_loop().time() - stopped_at < 30, "it waited for the 60 s of its peers"
    await engine.wait_for_core(30)
    if victim == "worker":
        worker.kill()  # a stopped process cannot notice that its parent has ended


async def test_the_core_does_not_outlive_a_killed_front(engine: EngineProcess) -> None:
    async with Peer(engine.address) as peer:
        await peer.send(make_add(1, [1, 2], 1500))
        await peer.read_tokens()
        engine.front.kill()
        await engine.wait_for_core(30)
        assert (await peer.status())[0] is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--worker", "hash", "--max-model-len", "999999"], "max_model_len is 999999"),
        (["--model", "/nowhere/at/all"], "no such directory"),
        (["--worker", "quantum"], "--worker: "),
        (["--block-size", "0"], "--block-size: "),
    ],
)
async def test_what_keeps_it_from_starting_is_one_clear_line(flags: list[str], reason: str) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tokenloom.services.engine", *flags), stderr=subprocess.PIPE
    )
    _, stderr = await process.communicate()
    assert process.returncode == 2, "the supervisor need not try again"
    (line,) = stderr.decode().splitlines()
    assert reason in line


async def test_an_engine_whose_checkpoint_changes_while_it_starts_does_not_serve(
    socket_dir: Path, tmp_path: Path
) -> None:
    """It would serve the one checkpoint's weights under the other one's fingerprint."""
    checkpoint = shutil.copytree(DEMO_MODEL, tmp_path / "checkpoint")
    weights = checkpoint / "model.safetensors"

    class Overtaken(HashWorker):
        def load_model(self) -> ModelInfo:
            weights.write_bytes(b"other weights")
            return super().load_model()

    settings = make_settings(socket_dir, worker="model", model=str(checkpoint))
    with pytest.raises(errors.FailedPrecondition, match="changed while they were loaded"):
        async with running_engine(settings, Overtaken):
            pass


@pytest.mark.parametrize("is_disabled", [False, True])
async def test_a_line_of_throughput_at_intervals(
    is_disabled: bool, socket_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="tokenloom.services.engine.records.stat_log")
    settings = make_settings(socket_dir, instance_id="engine-3", log_stats_interval=0.02, disable_log_stats=is_disabled)
    async with running_engine(settings) as host, Peer(host.address) as peer:
        for slot in range(1, 1000):
            await peer.send(make_add(slot, [1, 2, 3], 20))
            await peer.read_until_finished([slot])
            if caplog.messages or (is_disabled and slot == 5):
                break
    assert [line.partition(":")[0] for line in caplog.messages[:1]] == ([] if is_disabled else ["Engine 3"])


async def test_metrics_have_the_names_that_dashboards_read(socket_dir: Path) -> None:
    settings = make_settings(socket_dir, metrics_listen="127.0.0.1:0", instance_id="engine-3")
    async with running_engine(settings) as host, Peer(host.address) as peer:
        await peer.send(make_add(1, [1, 2, 3], 4), make_add(2, [4], 1500))
        await peer.read_until_finished([1])
        await peer.send(abort_slots=[2])
        await peer.read_until_finished([2])
        text = await asyncio.to_thread(read_metrics, host.metrics_address)
    labels = '{engine="engine-3",model_name="tokenloom-demo"}'
    assert f"vllm:num_requests_waiting{labels} 0.0" in text
    assert f"vllm:prompt_tokens_total{labels} 4.0" in text
    assert f"vllm:time_to_first_token_seconds_count{labels} 2.0" in text
    assert f"vllm:e2e_request_latency_seconds_count{labels} 2.0" in text
    for reason in ("length", "abort"):
        assert f'vllm:request_success_total{{engine="engine-3",finished_reason="{reason}",model_name=' in text
    assert 'num_gpu_blocks="600"' in text


def test_settings_become_the_cores_configuration() -> None:
    flags = ["--dtype", "float32", "--no-enable-prefix-caching", "--kv-cache-memory", "1048576", "--num-threads", "2"]
    config = EngineSettings.load([*flags, "--max-num-seqs", "7", "--prefill-tokens-beside-decode", "64"]).engine_config(
        "/m"
    )
    assert (config.worker.model, config.worker.dtype, config.worker.num_threads) == ("/m", "float32", 2)
    assert (config.cache.enable_prefix_caching, config.cache.memory_bytes) == (False, 1 << 20)
    assert (config.scheduler.max_num_seqs, config.scheduler.prefill_tokens_beside_decode) == (7, 64)


def read_metrics(address: str) -> str:
    with urllib.request.urlopen(f"http://{address}/metrics") as response:
        text: bytes = response.read()
        return text.decode()
