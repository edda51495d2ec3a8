"""Several ranks verify drafts that the rank which draws has made, with the tokens of one rank without drafts."""

from pathlib import Path
from typing import Any

import pytest

from tests.gpu_worker.parallel.rank_threads import RankThreads, parallel
from tests.parity.engine import Engine
from tokenloom.engine_core.data.config import EngineConfig, SpeculativeConfig
from tokenloom.engine_core.executor.executor import Executor
from tokenloom.model_files.model_path import DEMO_MODEL

METHODS = {
    "ngram": SpeculativeConfig(method="ngram", num_speculative_tokens=4, prompt_lookup_min=1),
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
    if shape[1] > 1 or (method != "ngram" and shape[2] > 1):
        with pytest.raises(ValueError, match=r"speculative_config: .* leave"):
            make(tmp_path, shape, method)
        return
    expected = alone.generate(PROMPTS, LIMITS, **sampling)
    engine = make(tmp_path, shape, method, num_blocks=10, max_num_seqs=4, max_model_len=128)
    engine.core.scheduler.drafts.free_rows = engine.core.scheduler.drafts.costs = None  # also on a busy machine
    assert engine.generate(PROMPTS, LIMITS, **sampling) == expected
    assert engine.core.scheduler.stats().num_preemptions
    drafts = engine.core.scheduler.drafts.stats()
    assert drafts.num_accepted_tokens > 0
    engine.core.shutdown()
