"""Bits that flip in weights are found, and nothing that changes weights on purpose is taken for that."""

import ctypes
import gc
import itertools
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu_worker.conftest import SaveCheckpoint
from tests.gpu_worker.lora.random_adapter import save_adapter
from tests.tokenloom.gguf.demo_file import write_demo_file
from tokenloom.engine_core.core import EngineCore
from tokenloom.engine_core.data.config import CacheConfig, EngineConfig, LoraConfig, SchedulerConfig, WorkerConfig
from tokenloom.engine_core.data.core_params import CoreSamplingParams
from tokenloom.engine_core.data.errors import WeightsDamagedError
from tokenloom.engine_core.data.kv_groups import KVCacheConfig
from tokenloom.engine_core.data.messages import EngineCoreRequest
from tokenloom.engine_core.executor.uniproc import UniProcExecutor
from tokenloom.gpu_worker.devices import CPUWorker
from tokenloom.gpu_worker.weights_scrub import _PIECE, WeightsScrub, _memory, weights_of
from tokenloom.model_files.model_path import DEMO_MODEL

CPU = torch.device("cpu")
NEVER = 1e6
"""Seconds of a pass that the thread does not begin during a test: the test compares itself."""
LATENT = {
    "kv_lora_rank": 32,
    "q_lora_rank": None,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
}
MIXED = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_ssm": 128, "mamba_d_state": 16, "mamba_n_groups": 1}
KINDS = ["fp32", "bf16", "int4", "gguf", "modules"]


def options_of(kind: str, directory: Path) -> dict[str, Any]:
    if kind == "gguf":
        write_demo_file(directory / "demo.gguf")
        return {"model": str(directory / "demo.gguf")}
    other = {"bf16": {"dtype": "bfloat16"}, "int4": {"quantization": "int4"}, "modules": {"model_impl": "transformers"}}
    return {"model": str(DEMO_MODEL), "dtype": "float32", **other.get(kind, {})}


def make_config(seconds: float | None = NEVER, lora: LoraConfig | None = None, **worker: Any) -> EngineConfig:
    return EngineConfig(
        worker=WorkerConfig(num_threads=1, weights_scrub_seconds=seconds, **worker),
        cache=CacheConfig(block_size=16, num_blocks=64),
        scheduler=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=128),
        lora=lora or LoraConfig(),
        max_model_len=128,
    )


def scrub_of(worker: CPUWorker) -> WeightsScrub:
    assert worker._scrub is not None
    return worker._scrub


def flip(tensor: torch.Tensor, at: float, bit: int = 0) -> None:
    """Flip a bit as damaged memory does: no part of the worker is told. ``at``: share of the tensor, 0 to 1."""
    address, nbytes = _memory(tensor)
    byte = ctypes.c_uint8.from_address(address + min(int(at * nbytes), nbytes - 1))
    byte.value ^= 1 << bit


def compare_all(worker: CPUWorker) -> str:
    scrub = scrub_of(worker)
    before = scrub.num_compared
    scrub.look(scrub.num_bytes)
    assert scrub.num_compared > before
    return scrub.damage


@pytest.mark.parametrize("kind", KINDS)
def test_a_bit_in_any_tensor_is_found(kind: str, tmp_path: Path) -> None:
    worker = CPUWorker(make_config(**options_of(kind, tmp_path)))
    worker.load_model()
    scrub, weights = scrub_of(worker), worker._weights()
    assert compare_all(worker) == ""
    for number, (name, tensor) in enumerate(weights.items()):
        at, bit = number % 11 / 10, number % 8
        flip(tensor, at, bit)
        scrub.look(scrub.num_bytes)
        assert scrub.damage.endswith(f" of {name} have changed since they were loaded"), name
        flip(tensor, at, bit)
        scrub.damage = ""
    assert compare_all(worker) == ""
    worker.shutdown()


@pytest.mark.parametrize("kind", ["fp32", "int4", "gguf", "modules"])
def test_all_weights_of_the_model_are_known(kind: str, tmp_path: Path) -> None:
    """Embedding, projections, MLPs, output layer: what the kernels read, as they read it."""
    worker = CPUWorker(make_config(**options_of(kind, tmp_path)))
    worker.load_model()
    found = sum(_memory(tensor)[1] for tensor in worker._weights().values())
    numbers = 4 * (256 * (512 + 256) + 256 * 3 * 640)  # of the layers' matrices
    layers, table, output = {"int4": (4.5, 32, 8), "gguf": (8.5, 16, 8)}.get(kind, (32, 32, 32))  # bits of a number
    assert found >= (numbers * layers + 2048 * 256 * (table + output)) / 8
    worker.shutdown()


@pytest.mark.parametrize(
    ("impl", "family", "entries"),
    [
        ("native", "gpt2", {}),
        ("native", "gemma3_text", {}),
        ("native", "qwen3_moe", {}),
        ("native", "deepseek_v2", LATENT),
        ("native", "falcon_h1", MIXED),
        ("transformers", "gemma3_text", {}),
        ("transformers", "qwen3_moe", {}),
        ("transformers", "falcon_h1", MIXED),
    ],
)
def test_steps_change_no_weights(
    family: str, entries: dict[str, Any], impl: str, save_checkpoint: SaveCheckpoint
) -> None:
    """What steps write, such as counts of experts and states, is not among the weights."""
    config = make_config(model=str(save_checkpoint(family, **entries)), dtype="float32", model_impl=impl)
    worker = CPUWorker(config)
    core = EngineCore(config, UniProcExecutor(worker))
    add_requests(core, 3)
    while core.has_work():
        core.step()
    worker.execute_dummy_batch()
    assert compare_all(worker) == ""
    core.shutdown()


names = itertools.count()


def add_requests(core: EngineCore, count: int) -> None:
    for _ in range(count):
        name = next(names)
        prompt = [3 + (7 * name + i) % 150 for i in range(20)]
        core.add_request(EngineCoreRequest(str(name), prompt, CoreSamplingParams(max_tokens=30, seed=0)))


def serve(core: EngineCore, ends_at: float) -> None:
    while time.monotonic() < ends_at:
        if not core.has_work():
            add_requests(core, 4)
        core.step()


@pytest.mark.parametrize("is_busy", [False, True])
@pytest.mark.parametrize("kind", ["fp32", "int4", "gguf", "modules"])
def test_a_live_engine_finds_a_flipped_bit_within_a_pass(kind: str, tmp_path: Path, is_busy: bool) -> None:
    """By its thread alone, idle and under load; no step is computed afterwards."""
    config = make_config(0.2, **options_of(kind, tmp_path))
    worker = CPUWorker(config)
    core = EngineCore(config, UniProcExecutor(worker))
    scrub, found = scrub_of(worker), threading.Event()
    told, refuse = [0], worker._refuse_steps

    def refused(reason: str) -> None:
        refuse(reason)
        told[0] = scrub.num_compared
        found.set()

    scrub._on_damage = refused
    tensors = list(worker._weights().values())
    tensor, ends_at = max(tensors, key=lambda each: each.nbytes), time.monotonic() + 60
    before = scrub.num_compared
    flip(tensor, 0.7)
    if is_busy:
        with pytest.raises(WeightsDamagedError, match="have changed since they were loaded"):
            serve(core, ends_at)
    else:
        assert found.wait(60)
    # Counted in pieces, not in seconds, of which a loaded machine has any number.
    assert told[0] - before <= len(scrub._pieces) + 1
    add_requests(core, 1)
    with pytest.raises(WeightsDamagedError):
        core.step()
    with pytest.raises(WeightsDamagedError):
        core.executor.collective_rpc("execute_dummy_batch")
    with pytest.raises(WeightsDamagedError):
        core.check_health()
    assert core.damage is not None
    core.shutdown()


def test_a_pass_takes_the_stated_time() -> None:
    """Also if the thread wakes late, as on a loaded machine."""
    weights = {"a": torch.zeros(3 * _PIECE // 4), "b": torch.zeros(7, dtype=torch.uint8), "c": torch.zeros(_PIECE // 2)}
    now = [0.0]
    scrub = WeightsScrub(CPU, 10.0, lambda reason: None, lambda: now[0])
    scrub._learn(weights)
    looks = 0
    while scrub.num_compared < 2 * len(scrub._pieces):
        late = 1.5 if looks == 3 else 0.0
        now[0] += scrub._pause(spent=0.01) + late
        scrub.look(_PIECE)
        looks += 1
        now[0] += 0.01
    assert looks == 10
    assert 19.0 <= now[0] <= 20.1
    assert scrub._pause(spent=9.0) == 9.0, "never more than half of a core"
    now[0] += 1000.0
    pauses = [scrub._pause(spent=0.01) for _ in range(18)]
    assert pauses[:16] == [0.01] * 16, "it catches up, with some of it"
    assert pauses[17] > 1.0


def test_weights_that_change_on_purpose_are_no_damage(tmp_path: Path, save_checkpoint: SaveCheckpoint) -> None:
    """Sleep at both levels, waking, and other weights, awake and asleep."""
    path, other = save_checkpoint("qwen3", head_dim=32), save_checkpoint("qwen3", head_dim=32, initializer_range=0.3)
    config = make_config(0.01, model=str(path), dtype="float32")  # the thread looks all the time, too
    worker = CPUWorker(config)
    core = EngineCore(config, UniProcExecutor(worker))

    def check() -> None:
        add_requests(core, 2)
        while core.has_work():
            core.step()
        assert compare_all(worker) == ""

    check()
    for reloaded in (other, path):
        worker.check_weights(str(reloaded))
        worker.reload_weights(str(reloaded))
        check()
    for level in (1, 2):
        core.sleeping.sleep(level).result()
        assert scrub_of(worker).num_bytes == 0, "no weights are kept alive while the engine sleeps"
        if level == 2:
            core.sleeping.reload_weights(str(other))
        core.sleeping.wake_up(None)
        check()
    with pytest.raises(ValueError, match="vocab_size"):
        worker.reload_weights(str(save_checkpoint("qwen3", head_dim=32, vocab_size=150)))
    check()
    flip(next(iter(worker._weights().values())), 0)
    scrub_of(worker).look(scrub_of(worker).num_bytes)
    assert scrub_of(worker).damage
    core.shutdown()


def test_adapters_come_and_go_and_are_compared(tmp_path: Path, save_checkpoint: SaveCheckpoint) -> None:
    path = save_checkpoint("qwen3", head_dim=32)
    adapters = [save_adapter(tmp_path / name, path, seed=seed) for seed, name in enumerate(("one", "two"))]
    config = make_config(lora=LoraConfig(enable=True, max_loras=1), model=str(path), dtype="float32")
    worker = CPUWorker(config)
    worker.load_model()
    worker.initialize_kv_cache(KVCacheConfig(num_blocks=64, max_model_len=128))
    own = scrub_of(worker).num_bytes
    infos = [worker.load_lora(str(each)) for each in adapters]
    with pytest.raises(ValueError, match="adapter_config"):
        worker.load_lora(str(tmp_path))
    assert worker._loras is not None
    for info in (*infos, *infos):  # of two that take turns in one slot
        worker._loras.occupy([info.digest])
        assert compare_all(worker) == ""
    size = sum(each.nbytes for each in worker._loras.adapters.values())
    assert scrub_of(worker).num_bytes == own + size
    worker.drop_lora(infos[0].digest)
    assert own < scrub_of(worker).num_bytes < own + size
    assert compare_all(worker) == ""
    worker.reload_weights(str(path))
    assert compare_all(worker) == ""
    (adapter,) = worker._loras.adapters.values()
    flip(next(iter(adapter.layers.values())).down, 0.5)
    assert "adapters." in compare_all(worker)
    worker.shutdown()


def test_a_pass_goes_on_while_adapters_come_and_go() -> None:
    """Also where they change more often than a pass comes to its end."""
    model = {"first": torch.zeros(_PIECE // 4), "last": torch.zeros(_PIECE // 4)}
    scrub = WeightsScrub(CPU, NEVER, lambda reason: None)
    held: list[dict[str, torch.Tensor]] = []
    scrub._learn(model)
    flip(model["last"], 0.5)
    for number in range(2):
        held.append({**model, str(number): torch.zeros(7)})
        with scrub.changing(lambda: held[-1], adds=True):
            pass
        scrub.look(_PIECE)
    assert " of last have changed" in scrub.damage


def test_off_costs_nothing() -> None:
    threads = {thread.ident for thread in threading.enumerate()}
    worker = CPUWorker(make_config(0, **options_of("fp32", Path())))
    worker.load_model()
    assert worker._scrub is None
    assert not any(each.name == "weights-scrub" and each.ident not in threads for each in threading.enumerate())
    worker.check_health()
    assert not {"execute_model", "sample_tokens", "execute_dummy_batch"} & vars(worker).keys()
    worker.shutdown()


def test_a_worker_that_nobody_holds_is_collected_with_its_thread(save_checkpoint: SaveCheckpoint) -> None:
    worker = CPUWorker(make_config(model=str(save_checkpoint("llama")), dtype="float32"))
    before = {thread for thread in threading.enumerate() if thread.name == "weights-scrub"}
    worker.load_model()
    (thread,) = {thread for thread in threading.enumerate() if thread.name == "weights-scrub"} - before
    held, tensor = weakref.ref(worker), weakref.ref(next(iter(worker._weights().values())))
    del worker
    gc.collect()
    assert held() is None
    thread.join(60)
    assert not thread.is_alive()
    gc.collect()
    assert tensor() is None


def test_a_device_is_compared_by_sums_in_the_workers_thread() -> None:
    """Of this machine's memory, which stands for a device's: odd offsets, odd sizes and columns of a matrix."""
    matrix = torch.arange(5000, dtype=torch.int16).view(50, 100)
    weights = {"a": torch.randn(700), "b": torch.arange(23, dtype=torch.uint8)[3:], "c": matrix[:, 1:99]}
    now, found = [0.0], list[str]()
    scrub = WeightsScrub(torch.device("meta"), 100.0, found.append, lambda: now[0])
    threads = threading.active_count()
    scrub.start(weights)
    assert threading.active_count() == threads
    for _ in range(20):
        now[0] += 10.0
        scrub.look()
    assert not found
    assert scrub.num_compared >= 6
    for name, tensor in weights.items():
        for at in (0, 0.5, 1):
            flip(tensor, at, 5)
            now[0] += 100.0
            scrub.look()
            assert f" of {name} " in scrub.damage, (name, at)
            flip(tensor, at, 5)
            scrub.damage = ""


def test_parts_that_hold_no_weights_are_left_out() -> None:
    shared = torch.ones(3)
    found = weights_of({"model": {"a": shared, "b": [shared, torch.empty(0)], "kept_states": torch.ones(2)}})
    assert list(found) == ["model.a"]


def test_experts_that_steps_move_are_left_out(save_checkpoint: SaveCheckpoint) -> None:
    """Those of ``enable_eplb``: any step may put others in their places."""
    worker = CPUWorker(make_config(model=str(save_checkpoint("qwen3_moe")), dtype="float32"))
    worker.load_model()
    assert worker._slot is not None
    model = worker._slot.model
    of_all, of_rest = weights_of({"model": model}), weights_of({"model": model}, moves_experts=True)
    assert any("_experts" in name for name in of_all)
    assert of_rest.keys() == {name for name in of_all if ".mlp." not in name}
    worker.shutdown()
