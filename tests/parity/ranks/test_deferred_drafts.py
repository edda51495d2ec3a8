"""Several ranks verify drafts in steps that were planned before the drafts were known, with the tokens of one rank
without drafts."""

from pathlib import Path

import pytest

from tests.gpu_worker.parallel.rank_threads import RankThreads, parallel
from tests.parity.engine import Engine
from tests.parity.ranks.test_drafts_of_ranks import LIMITS, PROMPTS
from tokenloom.engine_core.data.config import EngineConfig, SpeculativeConfig
from tokenloom.engine_core.executor.executor import Executor
from tokenloom.model_files.model_path import DEMO_MODEL

METHODS = {
    "ngram": SpeculativeConfig(method="ngram", num_speculative_tokens=4, prompt_lookup_min=1),
    "eagle": SpeculativeConfig(method="eagle", model=str(DEMO_MODEL / "eagle"), num_speculative_tokens=3),
}


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.8, "top_p": 0.9}], ids=["greedy", "seeded"])
@pytest.mark.parametrize("method", METHODS)
def test_tokens(method: str, sampling: dict[str, float], tmp_path: Path) -> None:
    def executor(config: EngineConfig) -> Executor:
        return RankThreads(config, tmp_path)

    expected = Engine(DEMO_MODEL, budget=64, num_blocks=80).generate(PROMPTS, LIMITS, **sampling)
    engine = Engine(
        DEMO_MODEL,
        budget=64,
        num_blocks=10,
        max_num_seqs=4,
        max_model_len=128,
        executor=executor,
        parallel=parallel(2),
        speculative=METHODS[method],
        async_scheduling=True,
    )
    drafts = engine.core.scheduler.drafts
    assert drafts is not None
    assert drafts.defers
    drafts.free_rows = drafts.costs = None  # also on a busy machine
    assert engine.core.executor.max_concurrent_batches == 2
    assert engine.generate(PROMPTS, LIMITS, **sampling) == expected
    assert engine.core.scheduler.stats().num_preemptions
    assert drafts.stats().num_accepted_tokens > 0
    engine.core.shutdown()
