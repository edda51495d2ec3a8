"""How much of a GPU's memory the KV pool gets. What the driver would say takes the place of a GPU."""

from dataclasses import dataclass, field

import pytest
import torch

from tokenloom.engine_core.data.config import CacheConfig, EngineConfig, KVConfig, ParallelConfig, WorkerConfig
from tokenloom.gpu_worker.checkpoint.local_config import num_sharing
from tokenloom.gpu_worker.devices import CUDAWorker
from tokenloom.gpu_worker.platform.platform import CUDAPlatform, check_device

GIB = 1 << 30


@dataclass
class FakeGPU:
    """A GPU of 80 GiB, of which other processes and the driver hold some."""

    others: int = GIB
    reserved: int = 0
    """By PyTorch in this process."""
    allocated: int = 0
    peak: int = 0
    calls: list[str] = field(default_factory=list)

    def mem_get_info(self, device):
        return 80 * GIB - self.others - self.reserved, 80 * GIB

    def install(self, monkeypatch):
        cuda = {
            "is_available": lambda: True,
            "device_count": lambda: 2,
            "mem_get_info": self.mem_get_info,
            "memory_reserved": lambda device: self.reserved,
            "memory_allocated": lambda device: self.allocated,
            "max_memory_allocated": lambda device: self.peak,
            "reset_peak_memory_stats": lambda device: self.calls.append("reset"),
            "synchronize": lambda device: self.calls.append("synchronize"),
            "empty_cache": lambda: self.calls.append("empty"),
            "get_device_name": lambda device: "NVIDIA H100 80GB HBM3",
        }
        for name, function in cuda.items():
            monkeypatch.setattr(torch.cuda, name, function)


@pytest.fixture
def gpu(monkeypatch):
    fake = FakeGPU()
    fake.install(monkeypatch)
    return fake


def test_the_share_of_the_gpu_less_weights_and_activations(gpu):
    gpu.reserved = 15 * GIB
    assert CUDAPlatform(0.9).kv_memory(2 * GIB, 1) == (72 - 1 - 15 - 2) * GIB
    assert CUDAPlatform(0.5).kv_memory(2 * GIB, 1) == (40 - 1 - 15 - 2) * GIB
    gpu.others = 50 * GIB
    assert CUDAPlatform(0.9).kv_memory(2 * GIB, 1) == (72 - 50 - 15 - 2) * GIB


def test_nothing_is_left_where_the_weights_fill_the_share(gpu):
    gpu.reserved = 60 * GIB
    assert CUDAPlatform(0.5).kv_memory(0, 1) == 0


def test_engines_on_one_gpu_get_equal_parts(gpu):
    gpu.reserved = 15 * GIB
    assert CUDAPlatform(0.9).kv_memory(GIB, 2) == (36 - 15 - 1) * GIB


def test_the_peak_of_a_call_is_what_it_adds(gpu):
    gpu.allocated = 10 * GIB

    def call():
        gpu.calls.append("call")
        gpu.peak = 13 * GIB

    assert CUDAPlatform(0.9).peak_of(call) == 3 * GIB
    assert gpu.calls == ["reset", "call", "synchronize", "empty"], "kernels run behind the call that launches them"


def test_what_a_call_keeps_is_what_stays_reserved_after_it(gpu):
    gpu.reserved = 10 * GIB

    def call():
        gpu.calls.append("call")
        gpu.reserved += 2 * GIB

    assert CUDAPlatform(0.9).kept_by(call) == 2 * GIB
    assert gpu.calls == ["empty", "call", "synchronize", "empty"], "what is free in between does not count"


def test_the_engines_of_a_host_take_its_gpus_in_turn(gpu):
    def device_of(place, rank=0, size=1):
        parallel = ParallelConfig(tensor_parallel_size=size, rank=rank)
        return CUDAWorker(EngineConfig(worker=WorkerConfig(place_on_host=place), parallel=parallel))._device

    assert [str(device_of(place)) for place in range(3)] == ["cuda:0", "cuda:1", "cuda:0"]
    assert [str(device_of(0, rank, 2)) for rank in range(2)] == ["cuda:0", "cuda:1"]
    assert [str(device_of(1, rank, 2)) for rank in range(2)] == ["cuda:0", "cuda:1"], "the first engine's again"


def test_an_engine_of_more_workers_than_gpus_is_refused_at_start(gpu):
    def start(backend="auto"):
        parallel = ParallelConfig(
            tensor_parallel_size=2, pipeline_parallel_size=2, distributed_executor_backend=backend
        )
        check_device(EngineConfig(parallel=parallel), CUDAPlatform(0.9))

    with pytest.raises(ValueError, match="a GPU for each of the 4 workers of an engine, and this host shows 2"):
        start()
    start("ray")  # which shows each worker one


@pytest.mark.parametrize(
    ("engines", "num_gpus", "sharing"), [(1, 1, 1), (2, 1, 2), (2, 2, 1), (3, 2, 2), (4, 2, 2), (2, 8, 1)]
)
def test_engines_share_the_memory_of_a_gpu_if_there_are_more_of_them(engines, num_gpus, sharing):
    config = EngineConfig(cache=CacheConfig(engines_on_host=engines))
    assert num_sharing(config, num_gpus) == sharing
    assert num_sharing(config, None) == engines, "all share the host's"
    on_ray = EngineConfig(
        cache=config.cache, parallel=ParallelConfig(tensor_parallel_size=2, distributed_executor_backend="ray")
    )
    assert num_sharing(on_ray, 1) == 1, "Ray gives each worker a GPU"
    assert num_sharing(on_ray, None) == engines


def test_the_name_of_the_gpu_is_one_word_of_the_numerics(gpu):
    assert CUDAPlatform(0.9).hardware == "NVIDIA-H100-80GB-HBM3"


@pytest.mark.parametrize(
    ("kv", "words"),
    [
        (KVConfig(offload_path="/somewhere"), "kv_offload_path: KV on cuda is not offloaded to files yet"),
        (KVConfig(store="lm://h:1"), "kv_store: KV on cuda is not shared through stores yet"),
        (KVConfig(connector="acme:own"), "kv_connector: KV on cuda is not given to connectors of plugins yet"),
    ],
)
def test_what_keeps_blocks_outside_of_the_pool_is_refused_at_start(gpu, kv, words):
    with pytest.raises(ValueError, match=words):
        check_device(EngineConfig(kv=kv), CUDAPlatform(0.9))


@pytest.mark.parametrize(("name", "capability"), [("flashinfer", (7, 5)), ("flash-attn", (8, 9))])
def test_a_gpu_that_a_library_of_attention_does_not_know_is_refused_at_start(gpu, name, capability, monkeypatch):
    config = EngineConfig(worker=WorkerConfig(attention_backend=name))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    with pytest.raises(ValueError, match=f"attention_backend {name} needs a GPU of compute capability [89].0 or more"):
        check_device(config, CUDAPlatform(0.9))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    check_device(config, CUDAPlatform(0.9))
