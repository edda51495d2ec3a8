"""The offline API with its worker in a process of its own."""

import gzip
import os
import signal

import pytest
from safetensors.torch import load_file

from tests.engine_core.processes import has_ended
from tokenloom import LLM, SamplingParams
from tokenloom.engine_core.client.core_client import InprocClient
from tokenloom.engine_core.data.config import CacheConfig, EngineConfig, ParallelConfig, WorkerConfig
from tokenloom.engine_core.data.core_params import CoreSamplingParams as CoreParams
from tokenloom.engine_core.data.errors import ExecutorFailedError, UtilityError
from tokenloom.engine_core.data.messages import EngineCoreRequest, FinishReason
from tokenloom.engine_core.executor.make_executor import make_executor
from tokenloom.engine_core.executor.multiproc import MultiprocExecutor
from tokenloom.gpu_worker.devices import CPUWorker
from tokenloom.model_files.model_path import DEMO_MODEL
from tokenloom.offline import offline_loop
from tokenloom.services.engine.core.workers import WORKER_COMMAND

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, logprobs=2)
PROMPTS = ["Once upon a time", "The dog", [5, 6, 7]]


def make_llm(backend, **options):
    return LLM(
        "tokenloom-demo",
        dtype="float32",
        max_model_len=256,
        num_gpu_blocks_override=2000,
        distributed_executor_backend=backend,
        enable_prompt_embeds=True,
        **options,
    )


def say(llm):
    return [output.outputs[0] for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


def executor_of(llm):
    executor = llm._client._core.executor
    assert isinstance(executor, MultiprocExecutor)
    return executor


def check_embeddings(llm):
    """Those of 200 tokens are large enough to be lent to the worker."""
    ids = list(range(1, 201))
    rows = load_file(DEMO_MODEL / "model.safetensors")["model.embed_tokens.weight"][ids].float()
    of_rows, of_ids = llm.generate([{"prompt_embeds": rows}, ids], GREEDY, use_tqdm=False)
    assert of_rows.outputs[0].token_ids == of_ids.outputs[0].token_ids
    assert executor_of(llm)._arena.num_lent == 1, "the worker hears of its end with the next step"


@pytest.fixture(scope="module")
def expected():
    llm = make_llm("uni")
    yield [(sample.token_ids, sample.text) for sample in say(llm)]
    llm.close()


def test_the_same_tokens_asleep_and_awake_and_with_reloaded_weights(expected):
    llm = make_llm("mp")
    assert [(sample.token_ids, sample.text) for sample in say(llm)] == expected
    check_embeddings(llm)
    long = SamplingParams(temperature=0.0, max_tokens=2)
    llm.generate([[index] + [7] * 240 for index in range(100)], long, use_tqdm=False)  # fills the pool
    (awake,) = llm.collective_rpc("resident_bytes")
    llm.sleep()
    (asleep,) = llm.collective_rpc("resident_bytes")
    assert awake - asleep > DEMO_MODEL.joinpath("model.safetensors").stat().st_size
    llm.wake_up()
    assert [(sample.token_ids, sample.text) for sample in say(llm)] == expected
    llm.sleep(2)
    llm.reload_weights()
    llm.wake_up()
    assert [(sample.token_ids, sample.text) for sample in say(llm)] == expected
    with pytest.raises(UtilityError, match="without profiler_dir"):
        llm.collective_rpc("profile", [True])
    with pytest.raises(UtilityError, match="clients may not call 'sleep' on workers; use profile, resident_bytes"):
        llm.collective_rpc("sleep", [1])
    pid = executor_of(llm).workers[0].pid
    llm.close()
    assert has_ended(pid)


def test_a_killed_worker_ends_the_call_in_an_error():
    llm = make_llm("mp")
    steps = llm.stream(PROMPTS, GREEDY)
    next(steps)
    os.kill(executor_of(llm).workers[0].pid, signal.SIGKILL)
    with pytest.raises(ExecutorFailedError, match="worker 0 ended with status -9"):
        list(steps)
    llm.close()


def test_what_does_not_work_is_a_value_error():
    with pytest.raises(ValueError, match="must be one of auto, uni, mp, ray, or PACKAGE:NAME of a plugin, not 'slurm'"):
        make_llm("slurm")


@pytest.mark.parametrize("has_own_process", [False, True])
@pytest.mark.parametrize(("size", "reason"), [(3, "does not divide"), (64, "is 64 workers: at most 4 share one of")])
def test_workers_that_cannot_be_are_refused_before_one_starts(monkeypatch, size, reason, has_own_process):
    def start(*_):
        raise AssertionError("a process starts")

    monkeypatch.setattr(offline_loop, "make_executor", start)
    monkeypatch.setattr(offline_loop, "SyncMPClient", start)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    with pytest.raises(ValueError, match=reason):
        LLM("tokenloom-demo", tensor_parallel_size=size, engine_process=has_own_process)


def test_llm_records_profiles(tmp_path):
    llm = make_llm("uni", profiler_dir=str(tmp_path))
    for prefix in (None, "first-2.x"):
        llm.start_profile(prefix)
        say(llm)
        llm.stop_profile()
    names = sorted(path.name for path in tmp_path.iterdir())
    assert len(names) == 2
    assert sum(name.startswith("first-2.x_") for name in names) == 1
    for wrong in ("../up", "a/b", "x" * 101, "\n"):
        with pytest.raises(UtilityError, match="profile_prefix may hold"):
            llm.start_profile(wrong)
    llm.close()


def test_a_profile_of_what_the_worker_computes(tmp_path):
    config = EngineConfig(
        worker=WorkerConfig(model=str(DEMO_MODEL), num_threads=1, profiler_dir=str(tmp_path)),
        cache=CacheConfig(num_blocks=64),
        parallel=ParallelConfig(distributed_executor_backend="mp"),
    )
    client = InprocClient(config, make_executor(config, CPUWorker, WORKER_COMMAND))
    client.call_utility("profile", True)
    client.add_request(EngineCoreRequest("a", [5, 6, 7], CoreParams(max_tokens=1, seed=0)))
    (output,) = client.get_output().outputs
    assert output.finish_reason is FinishReason.LENGTH
    client.call_utility("profile", False)
    (trace,) = tmp_path.iterdir()
    assert b"aten::" in gzip.decompress(trace.read_bytes())
    client.close()


def test_programs_share_blocks_through_a_folder(tmp_path):
    prompt, cached = list(range(300, 440)), []
    for _ in range(2):
        options = {"kv_store": tmp_path.as_uri(), "kv_store_bytes": 1 << 24, "kv_store_timeout": 30.0}
        llm = LLM("tokenloom-demo", worker="hash", engine_process=True, num_gpu_blocks_override=64, **options)
        (output,) = llm.generate([prompt], SamplingParams(max_tokens=2), use_tqdm=False)
        cached.append(output.num_cached_tokens)
        while len(list(tmp_path.glob("*.kv"))) < len(prompt) // 16:
            os.sched_yield()
        llm.close()
    assert cached == [0, len(prompt) // 16 * 16]
