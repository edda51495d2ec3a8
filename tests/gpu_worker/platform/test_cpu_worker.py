import gzip
import shutil
from itertools import accumulate
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from tokenloom import demo_model
from tokenloom.engine_core.data.config import CacheConfig, EngineConfig, SchedulerConfig, WorkerConfig
from tokenloom.engine_core.data.core_params import CoreSamplingParams
from tokenloom.engine_core.data.kv_groups import KVCacheConfig
from tokenloom.engine_core.data.scheduler_output import CachedRequestData, NewRequestData, SchedulerOutput
from tokenloom.engine_core.kv_cache.pool_memory import PoolMemory
from tokenloom.gpu_worker.devices import CPUWorker
from tokenloom.gpu_worker.model_runner import ModelRunner
from tokenloom.gpu_worker.numerics import input_rounding
from tokenloom.process import memory
from tokenloom.process.memory import available_memory

DEMO_MODEL = Path(demo_model.__file__).parent

NEGATIVE = b'{"num_tokens": -1, "activation_bytes": 0, "step_seconds": 0, "free_rows": 0}'
GREEDY = CoreSamplingParams(max_tokens=4, seed=1, temperature=0.0)


def make_worker(max_model_len=None, scheduler=None, engines_on_host=1, **worker):
    return CPUWorker(
        EngineConfig(
            worker=WorkerConfig(model=str(DEMO_MODEL), **worker),
            cache=CacheConfig(block_size=16, engines_on_host=engines_on_host),
            scheduler=scheduler or SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=128),
            max_model_len=max_model_len,
        )
    )


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_quantization_is_part_of_the_numerics():
    """Engines that round differently must not share a pool."""
    info = make_worker(dtype="float32", quantization="int8-dynamic", attention_backend="torch").load_model()
    assert info.numerics.startswith(f"cpu/float32/int8-dynamic/torch/{input_rounding()}/")


@pytest.mark.parametrize(("dtype", "itemsize"), [("float32", 4), ("bfloat16", 2)])
@pytest.mark.parametrize("backend", ["cpu", "torch"] if shutil.which("g++") else ["torch"])
def test_loads_profiles_and_computes(dtype, itemsize, backend):
    worker = make_worker(dtype=dtype, num_threads=1, attention_backend=backend)
    info = worker.load_model()
    assert info.numerics.split("/")[:3] == ["cpu", dtype, backend]
    assert info.kv_bytes_per_token % itemsize == 0
    assert 0 < worker.determine_available_memory() <= available_memory()
    worker.initialize_kv_cache(KVCacheConfig(8, 128))
    prompt = [5, 6, 7]
    new = NewRequestData("a", prompt, [], GREEDY, [2], 0)
    worker.execute_model(SchedulerOutput([new], CachedRequestData([], [], [], {}), {"a": 3}, 3, [], []))
    output = worker.sample_tokens(None)
    assert output.req_ids == ["a"]
    assert 0 <= output.sampled_token_ids[0][0] < info.vocab_size
    worker.shutdown()
    worker.shutdown()


def test_the_pool_lies_in_memory_that_is_given():
    worker = make_worker(dtype="float32")
    info = worker.load_model()
    memory = PoolMemory.allocate(8 * 16 * info.kv_bytes_per_token, shared=True)
    worker.initialize_kv_cache(KVCacheConfig(8, 128), memory)
    pool = worker.kv_pool()
    assert pool.memory is memory
    assert pool.layout == info.kv_layout
    assert (pool.num_blocks, pool.block_bytes) == (8, 16 * info.kv_bytes_per_token)
    new = NewRequestData("a", [5, 6, 7], [], GREEDY, [2], 0)
    worker.execute_model(SchedulerOutput([new], CachedRequestData([], [], [], {}), {"a": 3}, 3, [], []))
    written = [block_id for block_id in range(1, 8) if any(view[block_id].any() for view in pool.views)]
    assert written == [2]
    worker.shutdown()


def test_dtype_auto_is_the_checkpoints():
    info = make_worker(dtype="auto").load_model()
    assert info.kv_layout.split("/")[1] == "bf16"


@pytest.mark.parametrize(("setting", "value"), [("dtype", "float8"), ("attention_backend", "psychic")])
def test_a_wrong_setting_is_named(setting, value):
    with pytest.raises(ValueError, match=setting):
        make_worker(**{setting: value}).load_model()


@pytest.mark.parametrize(
    ("max_model_len", "seqs", "tokens", "expected"),
    [
        (None, 4, 128, [125, 1, 1, 1]),
        (100, 4, 128, [100, 26, 1, 1]),
        (10, 4, 128, [10, 10, 10, 10]),
        (None, 8, 3, [1, 1, 1]),
        (None, 1, 64, [64]),
    ],
)
def test_the_profiled_step_fills_the_budget_with_as_many_draws_as_fit(max_model_len, seqs, tokens, expected):
    scheduler = SchedulerConfig(max_num_seqs=seqs, max_num_batched_tokens=tokens)
    worker = make_worker(max_model_len, scheduler)
    worker.load_model()
    profiled = []
    worker._make_runner = lambda num_blocks, memory=None: RunnerThatNotes(num_blocks, profiled)
    worker.determine_available_memory()
    num_blocks = sum(-(-length // 16) for length in expected)
    assert profiled == [(num_blocks, [1], None), (num_blocks, expected, 3)]


class RunnerThatNotes:
    def __init__(self, num_blocks, notes):
        self._num_blocks, self._notes = num_blocks, notes

    def dummy_run(self, query_lens, block_size, num_layers=None):
        self._notes.append((self._num_blocks, query_lens, num_layers))


def test_the_first_layers_need_as_much_memory_as_all():
    """Beyond the weights. PyTorch's profiler counts what tensors take; the resident memory of the process, by which the
    worker measures, differs by a third from one run to the next, by what its heap keeps."""
    worker = make_worker(None, SchedulerConfig(max_num_seqs=32, max_num_batched_tokens=2048), num_threads=1)
    worker.load_model()
    runner = worker._make_runner(num_blocks=128)
    runner.dummy_run([1], 16)

    def peak(num_layers: int | None) -> int:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            runner.dummy_run([64] * 32, 16, num_layers)
        events = sorted(profiler.profiler.kineto_results.events(), key=lambda event: event.start_ns())
        return max(accumulate(event.nbytes() for event in events if event.name() == "[memory]"))

    few, every = peak(3), peak(None)
    assert every > 1_000_000
    assert few == every


def test_buffers_are_sized_by_the_context_that_fits():
    worker = make_worker()
    assert worker.load_model().max_model_len > 100
    worker.initialize_kv_cache(KVCacheConfig(6, 96))
    batch = worker._runner._batch
    assert batch.token_ids.shape == (4, 96)
    assert batch.block_table.gather(np.arange(4)).shape[1] == 0
    assert batch.block_table.block_ids.shape == (4, 6)


@pytest.mark.parametrize(
    ("blocks", "context", "profiles", "decode", "prefill"),
    [
        (64, 1000, False, [1, 2, 4], 128),
        (64, 100, False, [1, 2, 4], 128),
        (3, 48, False, [1, 2, 3], 48),
        (64, 1000, True, [1, 2, 4], 128),
    ],
)
def test_warm_up_covers_the_sizes_that_will_run(blocks, context, profiles, decode, prefill, monkeypatch):
    steps, draws = [], []
    run, draw = ModelRunner.dummy_run, ModelRunner.dummy_sample

    def note_run(runner, query_lens, block_size, num_layers=None):
        steps.append(query_lens)
        return run(runner, query_lens, block_size, num_layers)

    def note_draw(runner, logits, params):
        draws.append((len(logits), params.temperature))
        draw(runner, logits, params)

    monkeypatch.setattr(ModelRunner, "dummy_run", note_run)
    monkeypatch.setattr(ModelRunner, "dummy_sample", note_draw)
    worker = make_worker()
    worker.load_model()
    if profiles:
        worker.determine_available_memory()
    report = worker.initialize_kv_cache(KVCacheConfig(blocks, context))
    first, largest, *others = steps
    assert first == [1]
    assert [len(step) for step in others if set(step) == {1}] == decode
    assert sum(largest) == prefill
    assert max(largest) <= context
    assert draws == [*((batch, 0.0) for batch in decode), (1, 1.0)]
    assert (report.decode_batches, report.prefill_tokens, report.sampled_rows) == (decode, prefill, decode[-1])
    assert report.seconds > 0
    assert str(report).endswith(f"the sampler for {decode[-1]} rows")
    assert not np.frombuffer(worker.kv_pool().memory.buffer, dtype=np.uint8).any(), "no page of the pool is left in use"


def warmed_up(monkeypatch, **worker):
    """Returns the report of a worker's warm-up, and the tokens of the largest step that it computed."""
    steps = [0]
    run = ModelRunner.dummy_run

    def note(runner, query_lens, *more):
        steps.append(sum(query_lens))
        return run(runner, query_lens, *more)

    with monkeypatch.context() as patched:
        patched.setattr(ModelRunner, "dummy_run", note)
        made = make_worker(scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=128), **worker)
        made.load_model()
        made.determine_available_memory()
        report = made.initialize_kv_cache(KVCacheConfig(16, 256))
    return report, max(steps)


def test_a_worker_computes_few_steps_where_one_like_it_has_measured_them(monkeypatch, tmp_path):
    first, computed = warmed_up(monkeypatch, warm_up_dir=str(tmp_path / "notes"))
    assert (computed, first.is_remembered) == (128, False)
    assert "a prefill step of 128 tokens" in str(first)
    assert len(list((tmp_path / "notes").iterdir())) == 1, "no temporary is left"
    again, computed = warmed_up(monkeypatch, warm_up_dir=str(tmp_path / "notes"), cpus=(0,))
    assert (computed, again.is_remembered, again.decode_batches) == (4, True, [1, 2, 4])
    assert again.activation_bytes == first.activation_bytes
    assert again.prefill_tokens == first.prefill_tokens
    assert "the remembered time and memory of a prefill step of 128 tokens" in str(again)


@pytest.mark.parametrize("other", [{"dtype": "bfloat16"}, {"quantization": "int8-dynamic"}, {"max_model_len": 100}])
def test_what_other_options_have_measured_does_not_count(monkeypatch, tmp_path, other):
    warmed_up(monkeypatch, warm_up_dir=str(tmp_path), dtype="float32")
    report, computed = warmed_up(monkeypatch, warm_up_dir=str(tmp_path), **{"dtype": "float32", **other})
    assert (computed, report.is_remembered) == (128, False)
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("content", [b"", b"{", NEGATIVE])
def test_notes_that_say_nothing_are_measured_again(monkeypatch, tmp_path, content):
    warmed_up(monkeypatch, warm_up_dir=str(tmp_path))
    (notes,) = tmp_path.iterdir()
    notes.write_bytes(content)
    report, computed = warmed_up(monkeypatch, warm_up_dir=str(tmp_path))
    assert (computed, report.is_remembered) == (128, False)
    assert warmed_up(monkeypatch, warm_up_dir=str(tmp_path))[0].is_remembered


def test_a_folder_that_cannot_be_made_keeps_nothing(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    report, computed = warmed_up(monkeypatch, warm_up_dir=str(tmp_path / "file" / "notes"))
    assert (computed, report.is_remembered) == (128, False)


def test_one_thread_warms_a_tiny_model_up(monkeypatch):
    """Threads that share a small step would spin for each other on a busy machine."""
    run, threads = ModelRunner.dummy_run, []

    def note_run(runner, query_lens, block_size, num_layers=None):
        threads.append((torch.get_num_threads(), sum(query_lens)))
        return run(runner, query_lens, block_size, num_layers)

    monkeypatch.setattr(ModelRunner, "dummy_run", note_run)
    worker = make_worker()
    worker.load_model()
    torch.set_num_threads(2)
    worker.determine_available_memory()
    worker.initialize_kv_cache(KVCacheConfig(4, 64))
    assert threads == [(1, 1), (1, 128), (1, 1), (1, 2), (1, 4)]
    assert torch.get_num_threads() == 2


def test_a_worker_that_computes_wrong_sums_is_not_healthy(monkeypatch):
    worker = make_worker()
    worker.load_model()
    worker.check_health()
    monkeypatch.setattr(torch, "ones", torch.zeros)
    with pytest.raises(RuntimeError, match="cpu computes wrong sums"):
        worker.check_health()


def test_four_engines_of_a_host_get_a_quarter_each(monkeypatch):
    """Each leaves room for a step of every engine, and all four together plan half of what is free."""
    free, peak = 1 << 40, 1 << 36
    monkeypatch.setattr(memory, "available_memory", lambda: free)
    monkeypatch.setattr(memory, "peak_of", lambda call: peak)
    plans = []
    for engines in (1, 4):
        worker = make_worker(engines_on_host=engines)
        kv_bytes = 128 * worker.load_model().kv_bytes_per_token  # the blocks of a step lie in the pool
        step = peak - kv_bytes * 3 // worker._model.config.num_layers
        plans.append(worker.determine_available_memory())
    assert plans == [(free - step) // 2, (free - 4 * step) // 2 // 4]


def test_steps_are_profiled_between_start_and_stop(tmp_path):
    worker = make_worker(dtype="float32", profiler_dir=str(tmp_path))
    worker.load_model()
    worker.initialize_kv_cache(KVCacheConfig(8, 128))
    worker.profile(True)
    new = NewRequestData("a", [5] * 80, [], GREEDY, [2, 3, 4, 5, 6], 0)
    worker.execute_model(SchedulerOutput([new], CachedRequestData([], [], [], {}), {"a": 80}, 80, [], []))
    worker.profile(False)
    (trace,) = tmp_path.iterdir()
    assert b"aten::embedding" in gzip.decompress(trace.read_bytes()), "the first operation of a step"
    worker.shutdown()
