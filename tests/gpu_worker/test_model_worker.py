"""A worker on a device apart from the host: the same tokens, and no memory of the host for its pool."""

import shutil
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.gpu_worker.cuda.late_platform import BYTES_OF_GRAPH, LatePlatform, use_tensor_backend
from tests.gpu_worker.platform.device_platform import ApartPlatform
from tests.parity.state_checkpoints import make_model, write_model
from tokenloom import demo_model
from tokenloom.engine_core.core import EngineCore
from tokenloom.engine_core.data.config import (
    CacheConfig,
    EngineConfig,
    KVConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    WorkerConfig,
)
from tokenloom.engine_core.data.core_params import CoreSamplingParams
from tokenloom.engine_core.data.kv_groups import KVCacheConfig
from tokenloom.engine_core.data.messages import EngineCoreRequest
from tokenloom.engine_core.data.scheduler_output import CachedRequestData, NewRequestData, SchedulerOutput, StateRun
from tokenloom.engine_core.executor.uniproc import UniProcExecutor
from tokenloom.gpu_worker import model_worker, warm_up
from tokenloom.gpu_worker.cuda.step_graphs import row_buckets, token_buckets
from tokenloom.gpu_worker.devices import CPUWorker
from tokenloom.gpu_worker.layers import linear
from tokenloom.gpu_worker.model_worker import ModelWorker
from tokenloom.gpu_worker.models.model import routes_of
from tokenloom.gpu_worker.warm_up import largest_step

DEMO_MODEL = Path(demo_model.__file__).parent
PARAMS = {
    "greedy": {"temperature": 0.0},
    "drawn": {"temperature": 1.0, "top_p": 0.9},
    "changed": {"temperature": 0.8, "presence_penalty": 0.5},
    "told of": {"temperature": 0.8, "logprobs": 2},
}


def make_config(**kv):
    return EngineConfig(
        worker=WorkerConfig(model=str(DEMO_MODEL), dtype="float32", attention_backend="torch", num_threads=1),
        cache=CacheConfig(block_size=16, num_blocks=64),
        scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64),
        kv=KVConfig(**kv),
        max_model_len=128,
    )


def generate(core, kinds):
    tokens = {name: [] for name in kinds}
    for seed, name in enumerate(kinds):
        prompt = [int(i) for i in np.random.default_rng(seed).integers(300, 2000, 20 + seed)]
        core.add_request(EngineCoreRequest(name, prompt, CoreSamplingParams(max_tokens=12, seed=seed, **PARAMS[name])))
    while core.has_work():
        for output in core.step().outputs:
            assert not output.error, output.error
            tokens[output.request_id] += output.new_token_ids
    return tokens


@pytest.mark.parametrize("kinds", [["greedy"], ["greedy", "drawn"], list(PARAMS)])
def test_the_same_tokens_as_on_the_host(kinds):
    config = make_config()
    apart = generate(EngineCore(config, UniProcExecutor(ModelWorker(config, ApartPlatform()))), kinds)
    assert apart == generate(EngineCore(config, UniProcExecutor(CPUWorker(config))), kinds)
    assert all(len(each) == 12 for each in apart.values())


def test_the_platform_says_how_much_is_left_for_kv():
    config = make_config()
    worker = ModelWorker(config, ApartPlatform(kv_memory=5 << 20))
    info = worker.load_model()
    # The pool of the profile run is no activation.
    num_slots = sum(-(-length // 16) * 16 for length in largest_step(config.scheduler, info.max_model_len))
    activations = (1 << 20) - num_slots * info.kv_bytes_per_token
    assert worker.determine_available_memory() == (5 << 20) - activations


def test_a_step_without_room_is_refused_by_the_option_that_sizes_it() -> None:
    class Full(ApartPlatform):
        def peak_of(self, call) -> int:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    worker = ModelWorker(make_config(), Full())
    worker.load_model()
    with pytest.raises(ValueError, match=r"no memory for a step of 64 tokens: lower max_num_batched_tokens \(CUDA"):
        worker.determine_available_memory()


def test_what_graphs_keep_is_left_out_of_the_kv_pool(monkeypatch):
    use_tensor_backend(monkeypatch)
    config, left = make_config(), {}
    num_graphs = len(row_buckets(8)) + len(token_buckets(64))
    for eager in (True, False):
        worker_config = msgspec.structs.replace(config.worker, enforce_eager=eager)
        platform = LatePlatform()
        worker = ModelWorker(msgspec.structs.replace(config, worker=worker_config), platform)
        worker.load_model()
        left[eager] = worker.determine_available_memory()
        assert len(platform.capture.graphs) == (0 if eager else num_graphs)
        worker.initialize_kv_cache(KVCacheConfig(num_blocks=16, max_model_len=128))
        assert len(platform.capture.graphs) == (0 if eager else 2 * num_graphs), "they are captured over the real pool"
        worker.shutdown()
    assert left[True] - left[False] == num_graphs * BYTES_OF_GRAPH


def test_tokens_of_the_warm_up_are_none_that_experts_computed(monkeypatch, save_checkpoint):
    use_tensor_backend(monkeypatch)
    config = make_config()
    model = str(save_checkpoint("qwen3_moe"))
    worker = ModelWorker(
        msgspec.structs.replace(config, worker=msgspec.structs.replace(config.worker, model=model)), LatePlatform()
    )
    worker.load_model()
    routes = routes_of(worker._model)

    @torch.inference_mode()
    def replay(runner, batches, block_size):  # a graph that was captured while passes were recorded
        routes.on(worker._device).counts[0] += len(batches)

    monkeypatch.setattr(warm_up, "run_decode_steps", replay)
    worker.initialize_kv_cache(KVCacheConfig(num_blocks=16, max_model_len=128))
    assert not routes.counts().any()
    worker.shutdown()


def test_graphs_are_captured_before_it_is_awake(monkeypatch):
    use_tensor_backend(monkeypatch)
    platform, num_graphs = LatePlatform(), len(row_buckets(8)) + len(token_buckets(64))
    worker = ModelWorker(make_config(), platform)
    core = EngineCore(make_config(), UniProcExecutor(worker))
    before = generate(core, ["greedy"])
    core.reset_prefix_cache()
    assert len(platform.capture.graphs) == num_graphs
    worker.sleep(1)
    worker.wake_up(["weights"])
    assert len(platform.capture.graphs) == num_graphs, "there are no KV caches to write to"
    worker.wake_up(["kv_cache"])
    assert len(platform.capture.graphs) == 2 * num_graphs
    assert generate(core, ["greedy"]) == before
    assert len(platform.capture.graphs) == 2 * num_graphs, "no request waited for one"
    core.shutdown()


def test_it_sleeps_and_wakes_with_a_pool_of_its_own():
    config, platform = make_config(), ApartPlatform()
    worker = ModelWorker(config, platform)
    core = EngineCore(config, UniProcExecutor(worker))
    before = generate(core, ["drawn"])
    core.reset_prefix_cache()
    platform.num_returned = 0
    freed = worker.sleep(1)
    assert freed.kept_on_host > 0
    assert platform.num_returned == 2
    worker.wake_up(["weights", "kv_cache"])
    assert generate(core, ["drawn"]) == before
    worker.wake_up(["kv_cache"])  # what is awake stays so
    assert generate(core, ["drawn"]) == before


def test_at_level_1_the_weights_of_a_device_come_back_without_their_files(tmp_path, monkeypatch):
    monkeypatch.setattr(linear, "make_unquantized", linear.make_plain)  # as on a GPU
    path = shutil.copytree(DEMO_MODEL, tmp_path / "model")
    config = make_config()
    config = msgspec.structs.replace(config, worker=msgspec.structs.replace(config.worker, model=str(path)))
    worker = ModelWorker(config, ApartPlatform())
    core = EngineCore(config, UniProcExecutor(worker))
    before = generate(core, ["greedy", "drawn"])
    core.reset_prefix_cache()
    size = sum(tensor.nbytes for tensor in load_file(path / "model.safetensors").values())
    assert worker.sleep(1).kept_on_host >= size
    (path / "model.safetensors").unlink()
    worker.wake_up(["weights", "kv_cache"])
    assert generate(core, ["greedy", "drawn"]) == before
    core.reset_prefix_cache()
    assert worker.sleep(2).kept_on_host == 0
    with pytest.raises(ValueError, match="reload_weights"):
        worker.wake_up(["weights"])


class StatefulWorker:
    """Drives a worker of a model that keeps states: one request, whose runs are given."""

    def __init__(self, path, platform=None, **options):
        worker = WorkerConfig(
            model=str(path), dtype="float32", model_impl="transformers", num_threads=1, **options.pop("worker", {})
        )
        self.config = EngineConfig(worker=worker, scheduler=SchedulerConfig(max_num_seqs=4), **options)
        self.worker = ModelWorker(self.config, platform) if platform else CPUWorker(self.config)
        self.info = self.worker.load_model()

    def initialize(self, num_slots=8):
        self.worker.initialize_kv_cache(KVCacheConfig(num_blocks=16, max_model_len=256, num_state_slots=num_slots))

    def prefill(self, req_id, prompt, runs):
        """Compute a prompt in one step and return the token that it draws."""
        params = CoreSamplingParams(max_tokens=9, seed=0, temperature=0.0)
        new = NewRequestData(req_id, prompt, [], params, list(range(-(-len(prompt) // 16))), 0)
        return self._step([new], CachedRequestData([], [], [], {}), req_id, len(prompt), runs)

    def decode(self, req_id, position, slot):
        cached = CachedRequestData([req_id], [[]], [position], {})
        return self._step([], cached, req_id, 1, [(1, slot, slot)])

    def _step(self, new, cached, req_id, count, runs):
        state_runs = [StateRun(req_id, *run) for run in runs]
        self.worker.execute_model(SchedulerOutput(new, cached, {req_id: count}, count, [], [], state_runs=state_runs))
        return self.worker.sample_tokens(None).sampled_token_ids[0][0]


PROMPT = [(i * 37) % 500 + 5 for i in range(70)]


def test_the_states_of_a_model_follow_its_steps(tmp_path):
    stateful = StatefulWorker(write_model("qwen3_next", tmp_path))
    assert (stateful.info.state_bytes, stateful.info.state_chunk) == (18432, 64)
    assert "/states-modules-chunk64-strict/" in stateful.info.numerics
    assert stateful.info.kv_layout.endswith("/state/fp32+fp32/3x4x128+4x16x16")
    stateful.initialize()
    tokens = [stateful.prefill("a", PROMPT, [(64, -1, 7), (6, 7, 0)])]
    tokens += [stateful.decode("a", len(PROMPT) + index, 0) for index in range(4)]
    ids = torch.tensor([PROMPT])
    expected = make_model("qwen3_next").generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=5, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    assert tokens == expected[0, len(PROMPT) :].tolist()


def test_a_dummy_step_changes_no_state_of_a_request(tmp_path):
    stateful = StatefulWorker(write_model("granitemoehybrid", tmp_path))
    stateful.initialize(num_slots=2)
    stateful.prefill("a", PROMPT, [(70, -1, 1)])
    layers = stateful.worker._require_runner()._states.layers
    before = [layer.recurrent[:2].clone() for layer in layers]
    stateful.worker.execute_dummy_batch()
    assert all(torch.equal(layer.recurrent[:2], old) for layer, old in zip(layers, before, strict=True))
    assert all(layer.recurrent[1].any() for layer in layers)


def test_states_are_empty_after_sleep(tmp_path):
    stateful = StatefulWorker(write_model("mamba2", tmp_path))
    stateful.initialize()
    first = stateful.prefill("a", PROMPT, [(70, -1, 3)])
    runner = stateful.worker._require_runner()
    assert all(layer.recurrent[3].any() for layer in runner._states.layers)
    stateful.worker.sleep(1)
    assert runner._states.layers == []
    stateful.worker.wake_up(["weights", "kv_cache"])
    assert not any(layer.recurrent.any() for layer in runner._states.layers)
    assert stateful.prefill("b", PROMPT, [(70, -1, 3)]) == first


def test_reloaded_weights_keep_the_slots(tmp_path):
    path = write_model("lfm2", tmp_path / "old")
    stateful = StatefulWorker(path)
    stateful.initialize()
    first = stateful.prefill("a", PROMPT, [(70, -1, 3)])
    stateful.worker.reload_weights(str(shutil.copytree(path, tmp_path / "new")))
    assert stateful.decode("a", 70, 3) >= 0
    assert stateful.prefill("b", PROMPT, [(70, -1, 3)]) == first


def test_the_profile_run_of_a_model_with_states_counts_no_slot_as_activations(tmp_path):
    path = write_model("falcon_h1", tmp_path)
    stateful = StatefulWorker(path, ApartPlatform(kv_memory=5 << 20))
    num_slots = sum(
        -(-length // 16) * 16 for length in largest_step(stateful.config.scheduler, stateful.info.max_model_len)
    )
    pool = num_slots * stateful.info.kv_bytes_per_token + stateful.info.state_bytes
    assert stateful.worker.determine_available_memory() == (5 << 20) - max(0, (1 << 20) - pool)


def test_what_only_the_cpu_computes_is_refused_by_name():
    config = make_config()
    config = msgspec.structs.replace(config, worker=msgspec.structs.replace(config.worker, quantization="int8-dynamic"))
    with pytest.raises(ValueError, match="quantization: int8-dynamic"):
        ModelWorker(config, ApartPlatform())
    config = msgspec.structs.replace(make_config(), cache=CacheConfig(dtype="int8"))
    with pytest.raises(ValueError, match="kv_cache_dtype: int8 is not supported on"):
        ModelWorker(config, ApartPlatform())


@pytest.mark.parametrize("option", ["quantization", "kv_cache_dtype"])
def test_fp8_needs_a_device_that_computes_it(option, monkeypatch):
    config = make_config()
    if option == "quantization":
        config = msgspec.structs.replace(config, worker=msgspec.structs.replace(config.worker, quantization="fp8"))
    else:
        config = msgspec.structs.replace(config, cache=CacheConfig(dtype="fp8"))
    with pytest.raises(ValueError, match=f"{option} fp8 is .* on a GPU only"):
        CPUWorker(config)
    monkeypatch.setattr(ApartPlatform, "computes_fp8", False)
    with pytest.raises(ValueError, match=f"{option}: fp8 needs a GPU of compute capability 8.9 .* apart has not"):
        ModelWorker(config, ApartPlatform())


def test_its_pool_stays_while_it_sleeps_if_others_may_have_mapped_it():
    config = make_config(transports=("cuda",))
    worker = ModelWorker(config, ApartPlatform())
    worker.load_model()
    worker.initialize_kv_cache(KVCacheConfig(num_blocks=64, max_model_len=128))
    pool, before = worker.kv_pool(), worker.kv_pool().checksums([3])
    pool.damage(3)
    worker.sleep(1)
    worker.wake_up(["weights", "kv_cache"])
    assert worker.kv_pool() is pool
    assert pool.checksums([3]) != before


def test_it_computes_at_the_level_of_processors_that_is_asked_for(monkeypatch):
    def refuse(name):
        raise ValueError(f"no {name}")

    monkeypatch.setattr(model_worker, "limit_level", refuse)
    worker = WorkerConfig(model=str(DEMO_MODEL), processor_level="x86-64-v4-bf16")
    with pytest.raises(ValueError, match="no x86-64-v4-bf16"):
        CPUWorker(EngineConfig(worker=worker)).load_model()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (EngineConfig(kv=KVConfig(offload_path="/somewhere")), "kv_offload_path: KV on cpu is not offloaded"),
        (EngineConfig(kv=KVConfig(transports=("nixl",))), "kv_transports: nixl moves no KV on cpu"),
        (
            EngineConfig(kv=KVConfig(transports=("cuda",)), parallel=ParallelConfig(distributed_executor_backend="mp")),
            "kv_transports: .* in the core's process",
        ),
        (
            EngineConfig(kv=KVConfig(transports=("shm",)), speculative=SpeculativeConfig(method="eagle", model="x")),
            "kv_transports: the KV of a draft model",
        ),
    ],
)
def test_what_a_pool_on_a_device_cannot_do_is_refused_at_once(config, message):
    with pytest.raises(ValueError, match=message):
        ModelWorker(config, ApartPlatform())


def test_a_cpu_moves_no_kv_between_gpus():
    with pytest.raises(ValueError, match="kv_transports: cuda moves KV between GPUs"):
        CPUWorker(EngineConfig(kv=KVConfig(transports=("cuda",))))


def test_float16_is_of_gpus():
    with pytest.raises(ValueError, match="dtype float16 is computed on a GPU only"):
        CPUWorker(EngineConfig(worker=WorkerConfig(dtype="float16")))
