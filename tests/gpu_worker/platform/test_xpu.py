"""The platform of Intel's GPUs, on a fake one whose tensors are the CPU's. Nobody has run it on a real one."""

import pytest
import torch

from tests.engine_core.helpers import finish, tokens_of
from tokenloom.engine_core.core import EngineCore
from tokenloom.engine_core.data.config import CacheConfig, EngineConfig, KVConfig, SchedulerConfig, WorkerConfig
from tokenloom.engine_core.data.core_params import CoreSamplingParams
from tokenloom.engine_core.data.messages import EngineCoreRequest
from tokenloom.engine_core.executor.uniproc import UniProcExecutor
from tokenloom.gpu_worker import devices
from tokenloom.gpu_worker.devices import make_worker
from tokenloom.gpu_worker.platform.platform import Platform, XPUPlatform, check_device
from tokenloom.model_files.model_path import DEMO_MODEL

GIB = 1 << 30


class FakeXPU:
    """Intel's GPU of 16 GiB, of which the driver holds one; it notes what is called."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        answers = {
            "is_available": True,
            "device_count": 2,
            "mem_get_info": (14 * GIB, 16 * GIB),
            "memory_reserved": GIB,
            "memory_allocated": GIB,
            "max_memory_allocated": 3 * GIB,
            "get_device_name": "Intel(R) Arc(TM) B580/12",
        }
        for name in (*answers, "set_device", "reset_peak_memory_stats", "synchronize", "empty_cache"):
            monkeypatch.setattr(torch.xpu, name, lambda *_, name=name: self._note(name, answers.get(name)))

    def _note(self, name: str, answer: object) -> object:
        self.calls.append(name)
        return answer


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeXPU:
    return FakeXPU(monkeypatch)


def config_of(device: str = "xpu") -> EngineConfig:
    return EngineConfig(
        worker=WorkerConfig(model=str(DEMO_MODEL), device=device, dtype="float32", num_threads=1),
        cache=CacheConfig(num_blocks=64),
        scheduler=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64),
        max_model_len=128,
    )


def test_its_memory_is_divided_as_a_gpus_is(fake: FakeXPU) -> None:
    platform: Platform = XPUPlatform(0.9, 3)
    assert platform.device == torch.device("xpu", 1)
    assert platform.hardware == "Intel(R)-Arc(TM)-B580-12"
    assert platform.kv_memory(GIB, 1) == int(0.9 * 16 * GIB) - 2 * GIB - GIB
    assert platform.peak_of(lambda: None) == 2 * GIB
    assert fake.calls[-4:] == ["reset_peak_memory_stats", "synchronize", "max_memory_allocated", "empty_cache"]


def test_what_it_lacks_is_refused(fake: FakeXPU, monkeypatch: pytest.MonkeyPatch) -> None:
    platform = XPUPlatform(0.9, device=torch.device("cpu"))
    with pytest.raises(ValueError, match="kv_offload_path"):
        check_device(EngineConfig(kv=KVConfig(offload_path="/tmp/x")), platform)
    with pytest.raises(ValueError, match="kv_transports: KV on xpu does not move"):
        platform.device_pool([], 1, "")
    monkeypatch.setattr(torch.xpu, "is_available", lambda: False)
    with pytest.raises(ValueError, match=r"device xpu: this PyTorch .* finds no GPU of Intel"):
        make_worker(config_of())


def test_the_demo_model_gives_the_tokens_of_a_cpu(fake: FakeXPU, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        devices, "XPUPlatform", lambda share, number: XPUPlatform(share, number, device=torch.device("cpu"))
    )
    found = {}
    for device in ("xpu", "cpu"):
        config = config_of(device)
        core = EngineCore(config, UniProcExecutor(make_worker(config)))
        for index in range(3):
            sampling = CoreSamplingParams(max_tokens=8, seed=index)
            core.add_request(EngineCoreRequest(f"r{index}", [300 + index, 7, 300, 8], sampling))
        found[device] = {request_id: tokens_of(outputs) for request_id, outputs in finish(core).items()}
        core.shutdown()
    assert found["xpu"] == found["cpu"]
    assert "set_device" in fake.calls
