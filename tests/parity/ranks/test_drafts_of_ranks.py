"""Several ranks verify drafts that the rank which draws has made, with the tokens of one rank without drafts."""

from pathlib import Path
from typing import Any

import pytest

from tests.gpu_worker.parallel.rank_threads import RankThreads, parallel
from tests.gpu_worker.speculation.mtp_checkpoint import add_head, sharp_model
from tests.parity.engine import Engine
from tests.parity.test_states import draw
from tokenloom.engine_core.data.config import EngineConfig, SpeculativeConfig
from tokenloom.engine_core.data.scheduler_output import SchedulerOutput
from tokenloom.engine_core.executor.executor import Executor
from tokenloom.model_files.model_path import DEMO_MODEL

METHODS = {
    "ngram": SpeculativeConfig(method="ngram", num_speculative_tokens=4, prompt_lookup_min=1),
    "suffix": SpeculativeConfig(method="suffix", num_speculative_tokens=4),
    "draft_model": SpeculativeConfig(method="draft_model", model=str(DEMO_MODEL / "draft"), num_speculative_tokens=3),
    "eagle": SpeculativeConfig(method="eagle", model=str(DEMO_MODEL / "eagle"), num_speculative_tokens=3),
}
PROMPTS = [
    [5 + (index * 7 + position % 9 * 31) % 480 for position in range(n)] for index, n in enumerate((70, 3, 40, 17))
]
LIMITS = [40, 30, 24, 33]
SHAPES = [(2, 1, 1), (1, 2, 1), (2, 2, 1), (2, 1, 2)]


def make(directory: Path, shape: tuple[int, int, int], method: str, **options: Any) -> Engine:
    def executor(config: EngineConfig) -> Executor:
        return RankThreads(config, directory)

    return Engine(
        DEMO_MODEL, budget=64, executor=executor, parallel=parallel(*shape), speculative=METHODS[method], **options
    )


@pytest.fixture(scope="module")
def alone() -> Engine:
    return Engine(DEMO_MODEL, budget=64, num_blocks=80)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.8, "top_p": 0.9}], ids=["greedy", "seeded"])
@pytest.mark.parametrize("method", METHODS)
def test_tokens(method: str, sampling: dict[str, float], shape: tuple[int, int, int], alone, tmp_path: Path) -> None:
    expected = alone.generate(PROMPTS, LIMITS, **sampling)
    engine = make(tmp_path, shape, method, num_blocks=10, max_num_seqs=4, max_model_len=128)
    engine.core.scheduler.drafts.free_rows = engine.core.scheduler.drafts.costs = None  # also on a busy machine
    for _ in range(2):  # past answers draft only for later requests
        assert engine.generate(PROMPTS, LIMITS, **sampling) == expected
    assert engine.core.scheduler.stats().num_preemptions
    drafts = engine.core.scheduler.drafts.stats()
    assert drafts.num_accepted_tokens > 0
    assert engine.core.scheduler.kv.pool.num_free == 10
    engine.core.shutdown()


def test_stages_verify_drafts_at_the_same_time(alone: Engine, tmp_path: Path) -> None:
    """Requests that share a pipeline have their drafts in steps of which each leaves the others' to wait."""
    engine = make(tmp_path, (1, 2, 1), "draft_model", num_blocks=80)
    engine.core.scheduler.drafts.free_rows = engine.core.scheduler.drafts.costs = None
    in_flight, begin = [], engine.core.executor.execute_model

    def note(step: SchedulerOutput) -> None:
        in_flight.append([each.scheduled.draft_token_ids for each in engine.core.steps_in_flight])
        in_flight[-1].append(step.draft_token_ids)
        begin(step)

    engine.core.executor.execute_model = note
    assert engine.generate(PROMPTS, LIMITS) == alone.generate(PROMPTS, LIMITS)
    both = [each for each in in_flight if len(each) == 2 and all(each)]
    assert len(both) > 5
    assert all(one.keys().isdisjoint(other) for one, other in both)
    engine.core.shutdown()


@pytest.mark.parametrize(("shape", "overlaps"), [((2, 1, 1), False), ((2, 1, 1), True), ((1, 2, 1), False)])
@pytest.mark.parametrize("kind", ["qwen3_next", "qwen3_5_text"])
def test_heads_that_models_bring(
    kind: str, shape: tuple[int, int, int], overlaps: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tokenloom.engine_core.kv_cache.kv_cache_size._is_small", lambda model: False)
    model = sharp_model(kind)
    model.save_pretrained(tmp_path)
    add_head(tmp_path, model, is_sharp=True)
    prompts, limits = [draw(length, seed=60 + length) for length in (66, 9, 130)], [30] * 3
    settings: dict[str, Any] = {"budget": 160, "max_num_seqs": 4, "num_blocks": 128, "prefix_caching": True}
    plain = Engine(tmp_path, **settings).generate(prompts, limits)

    def executor(config: EngineConfig) -> Executor:
        return RankThreads(config, tmp_path)

    mtp = SpeculativeConfig("mtp", num_speculative_tokens=3)
    settings |= {"async_scheduling": overlaps, "speculative": mtp}
    engine = Engine(tmp_path, executor=executor, parallel=parallel(*shape), **settings)
    assert engine.core.scheduler.drafts.defers == overlaps
    engine.core.scheduler.drafts.free_rows = engine.core.scheduler.drafts.costs = None
    for _ in range(2):  # the second time the prompts' beginnings are found
        assert engine.generate(prompts, limits) == plain
    assert engine.core.scheduler.drafts.stats().num_accepted_tokens > 40
    assert engine.stats.prefix_cache_hits > 0
    engine.core.shutdown()
