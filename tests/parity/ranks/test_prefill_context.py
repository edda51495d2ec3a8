"""Ranks that each have the whole model divide long prompts, and give the tokens of one."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from tests.gpu_worker.kv_connector.engine_pair import MAKE, MakeExecutor, Pair, tier, uni
from tests.gpu_worker.kv_connector.engine_pair import Engine as KVEngine
from tests.gpu_worker.parallel.rank_threads import RankThreads, parallel
from tests.gpu_worker.speculation.eagle3_checkpoint import write_head, write_model
from tests.parity.engine import Engine
from tests.parity.identical import Case, assert_identical
from tests.parity.ranks.test_ranks import Logits
from tests.parity.reference import SMALL_CONFIGS, save_random
from tokenloom.engine_core.data.config import EngineConfig, SpeculativeConfig
from tokenloom.engine_core.data.core_params import CoreSamplingParams
from tokenloom.engine_core.executor.executor import Executor
from tokenloom.engine_core.executor.multiproc import MultiprocExecutor
from tokenloom.gpu_worker.attention.context_backend import PrefillContext
from tokenloom.gpu_worker.model_worker import ModelWorker
from tokenloom.services.engine.core.workers import WORKER_COMMAND

LENGTHS = [300, 1, 40, 270]
"""Of prompts, some of which are long enough to be divided among two ranks."""
LIMITS = [8, 5, 9, 7]
GREEDY = CoreSamplingParams(max_tokens=12, seed=3, temperature=0.0)
PROMPT = [(i * i * 7) % 400 + 5 for i in range(400)]


def prompts() -> list[list[int]]:
    generator = np.random.default_rng(5)
    return [generator.integers(3, 503, length).tolist() for length in LENGTHS]


def prefills(engine: Engine) -> list[PrefillContext]:
    """What divides steps, by rank."""
    executor, found = engine.core.executor, []
    assert isinstance(executor, RankThreads)
    for worker in executor.workers:
        assert isinstance(worker, ModelWorker)
        assert worker._runner is not None
        assert worker._runner._prefill is not None
        found.append(worker._runner._prefill)
    return found


def make(
    path: Path, size: int, directory: Path, shape: tuple[int, int] = (1, 1), *, experts: bool = False, **options: object
) -> Engine:
    """``shape``: tensor parallel ranks and stages of each of ``size`` copies."""
    directory.mkdir()

    def executor(config: EngineConfig) -> Executor:
        return RankThreads(config, directory)

    ranks = parallel(*shape, pcp=size, experts=experts)
    return Engine(path, executor=executor, parallel=ranks, **options)  # type: ignore[arg-type]


MODELS = ["llama", "gemma3_text", "qwen3_moe", "gpt_oss", "deepseek_v3", "llama4_text", "gpt2"]
"""Plain; windows in groups; experts; sinks; compressed vectors; attention in chunks; learned positions."""


@pytest.mark.parametrize("name", MODELS)
def test_ranks_give_the_tokens_of_one(name: str, tmp_path: Path) -> None:
    path = save_random(name, tmp_path, **SMALL_CONFIGS[name])
    alone, engine = Engine(path, num_blocks=300), make(path, 2, tmp_path / "two", num_blocks=300)
    outputs = alone.generate(prompts(), LIMITS)
    pairs = zip(prompts(), outputs, strict=True)
    expected = [Case(prompt, tokens, Logits(alone, prompt, tokens)) for prompt, tokens in pairs]  # type: ignore[arg-type]
    assert_identical(expected, engine.generate)
    counts = [(each.num_steps, each.num_tokens) for each in prefills(engine)]
    assert counts[0][0] == counts[1][0] > 0, "the ranks divided the same steps"
    assert abs(counts[0][1] - counts[1][1]) < 64, "and each computed half of the tokens"
    drawn = {"temperature": 1.0, "top_p": 0.9}
    assert engine.generate(prompts(), LIMITS, **drawn) == alone.generate(prompts(), LIMITS, **drawn)
    theirs, ours = (set(each.next_logprobs(prompts()[0], [5])) for each in (alone, engine))
    assert len(theirs & ours) >= 19
    engine.core.shutdown()


@pytest.mark.parametrize(
    ("name", "shape", "experts"),
    [
        ("llama", (2, 1), False),
        ("llama", (1, 2), False),
        ("qwen3_moe", (2, 1), False),
        ("qwen3_moe", (2, 1), True),
        ("deepseek_v3", (1, 2), False),
        ("gemma3_text", (2, 1), False),
    ],
)
def test_each_copy_of_the_model_is_divided(name: str, shape: tuple[int, int], experts: bool, tmp_path: Path) -> None:
    path = save_random(name, tmp_path, **SMALL_CONFIGS[name])
    options: dict[str, Any] = {"num_blocks": 100, "prefix_caching": True}
    alone = Engine(path, **options)
    engine = make(path, 2, tmp_path / "two", shape, experts=experts, **options)
    for sampling in ({}, {"temperature": 1.0, "top_p": 0.9}):
        assert engine.generate(prompts(), LIMITS, **sampling) == alone.generate(prompts(), LIMITS, **sampling)
    counts = [(each.num_steps, each.num_tokens) for each in prefills(engine)]
    assert counts[:2] == [counts[0]] * 2, "the ranks of a copy computed the same tokens"
    assert counts[2:] == [counts[2]] * 2
    assert counts[0][0] == counts[2][0] > 0, "the copies divided the same steps"
    assert abs(counts[0][1] - counts[2][1]) < 64
    engine.core.shutdown()


def test_an_eagle3_head_reads_the_states_of_all_copies(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", is_sharp=True)
    write_head(tmp_path / "head", model, is_sharp=True)
    options: dict[str, Any] = {"num_blocks": 100, "max_model_len": 512}
    asked = [[3 + position * position * 5 % 60 for position in range(length)] for length in (300, 40)]
    expected = Engine(tmp_path / "model", **options).generate(asked, [30, 30])
    speculative = SpeculativeConfig("eagle3", 3, str(tmp_path / "head"))
    engine = make(tmp_path / "model", 2, tmp_path / "two", speculative=speculative, **options)
    drafts = engine.core.scheduler.drafts
    assert drafts is not None
    drafts.free_rows = drafts.costs = None  # also on a busy machine
    assert engine.generate(asked, [30, 30]) == expected
    assert {each.num_steps for each in prefills(engine)} == {1}
    assert drafts.stats().num_accepted_tokens > 20
    engine.core.shutdown()


@pytest.mark.parametrize("options", [{"attention_backend": "torch"}, {"kv_cache_dtype": "int8"}, {"dtype": "bfloat16"}])
def test_chunks_and_prefix_hits_are_divided_too(options: dict[str, object], tmp_path: Path) -> None:
    path = save_random("llama", tmp_path, **SMALL_CONFIGS["llama"])
    options = {"num_blocks": 100, "prefix_caching": True, "max_model_len": 1024, "budget": 420} | options
    long = np.random.default_rng(7).integers(3, 503, 1000).tolist()
    alone, engine = Engine(path, **options), make(path, 3, tmp_path / "three", **options)  # type: ignore[arg-type]
    for prompt in (long[:500], long, [9, *long[:600]]):
        assert engine.generate([prompt], [6]) == alone.generate([prompt], [6])
    assert engine.stats.prefix_cache_hits > 0
    assert {each.num_steps for each in prefills(engine)} == {3}
    engine.core.shutdown()


def test_a_rank_that_draws_nothing_has_no_output_layer(tmp_path: Path) -> None:
    path = save_random("llama", tmp_path, **SMALL_CONFIGS["llama"])
    engine = make(path, 2, tmp_path / "two", num_blocks=60)
    executor = engine.core.executor
    assert isinstance(executor, RankThreads)
    configs = [worker._model.config for worker in executor.workers]  # type: ignore[attr-defined]
    assert configs[1] == dataclasses.replace(configs[0], samples=False)
    assert engine.core.ready.kv_layout.count("HND") == 1, "each has the whole KV cache"
    engine.core.shutdown()


def of(size: int) -> MakeExecutor:
    """Ranks in processes of their own."""

    def make(config: EngineConfig) -> Executor:
        return MultiprocExecutor(replace(config, parallel=parallel(1, pcp=size)), WORKER_COMMAND)

    return uni if size == 1 else make


@pytest.fixture(scope="module")
def expected() -> list[int]:
    engine = KVEngine([])
    engine.add("a", PROMPT, GREEDY)
    tokens = [token for output in engine.run("a") for token in output.new_token_ids]
    engine.core.shutdown()
    return tokens


@pytest.mark.parametrize(("transport", "prefill", "decode"), [("shm", 2, 1), ("unix", 1, 2), ("tcp", 2, 2)])
def test_the_kv_of_divided_prompts_moves(transport: str, prefill: int, decode: int, expected: list[int]) -> None:
    pair = Pair(MAKE[transport], of(prefill), of(decode))
    assert pair.ask("a", PROMPT, GREEDY) == expected
    stats = pair.decode.core.scheduler.stats()
    assert (stats.kv_blocks_received, stats.kv_recomputes) == (25, {})
    for engine, size in ((pair.prefill, prefill), (pair.decode, decode)):
        assert engine.core.ready.kv_layout == "HND/fp32/4x2x64/16"
        assert_equal_copies(engine, size)
    pair.close()


def assert_equal_copies(engine: KVEngine, size: int) -> None:
    """All ranks have the same KV of every token."""
    pool = engine.core.executor.kv_pool()
    assert len(pool.copies) == size - 1
    for regions in pool.copies:
        other = dataclasses.replace(pool, regions=regions, copies=())
        for mine, theirs in zip(pool.views, other.views, strict=True):
            assert mine.any()
            assert np.array_equal(mine, theirs)


@pytest.mark.parametrize("label", ["offload", "folder"])
def test_blocks_from_a_file_come_to_all_ranks(tmp_path: Path, label: str) -> None:
    alone, engine = KVEngine([]), KVEngine([], of(2), num_blocks=40, **tier(label, tmp_path))
    for turn in range(2):
        for number in range(4):
            found, prompt = [], [(i * i * 7 + number) % 400 + 5 for i in range(300)]
            for each in (alone, engine):
                each.add(f"{turn}-{number}", prompt, GREEDY)
                found.append([token for output in each.run(f"{turn}-{number}") for token in output.new_token_ids])
            assert found[0] == found[1]
    stats = engine.core.scheduler.stats()
    assert stats.kv_bytes_received[label] > 0
    assert stats.kv_recomputes == {}
    assert_equal_copies(engine, 2)
    for each in (alone, engine):
        each.core.shutdown()
