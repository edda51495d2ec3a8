"""The KV of what drafts goes where the model's goes: through windows, to other engines, to files and back.

A model that drafts for itself is right as long as its KV is whole.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from tests.gpu_worker.kv_connector import engine_pair
from tests.gpu_worker.kv_connector.engine_pair import MAKE, MODEL, Pair
from tests.parity.engine import Engine
from tests.parity.kv.test_kv_groups import LAYERS
from tests.parity.reference import save_random
from tokenloom.engine_core.core import EngineCore
from tokenloom.engine_core.data.config import SpeculativeConfig
from tokenloom.engine_core.data.core_params import CoreSamplingParams

LENGTHS = (1, 33, 120, 270, 51, 200)
GREEDY = CoreSamplingParams(max_tokens=48, seed=0, temperature=0.0)


@pytest.fixture(scope="module", params=["windows", "one table"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if request.param == "one table":
        return Path(MODEL)
    entries = {"layer_types": LAYERS, "num_hidden_layers": len(LAYERS), "sliding_window": 50, "head_dim": 16}
    entries |= {"tie_word_embeddings": False}  # otherwise each token repeats itself
    return save_random("gemma3_text", tmp_path_factory.mktemp("checkpoints"), **entries)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    generator = np.random.default_rng(3)
    return [generator.integers(3, 480, length).tolist() for length in LENGTHS]


@pytest.fixture(scope="module")
def expected(checkpoint: Path, prompts: list[list[int]]) -> list[list[int]]:
    return Engine(checkpoint, groups=False).generate(prompts, [GREEDY.max_tokens] * len(prompts))


def itself(checkpoint: Path) -> SpeculativeConfig:
    return SpeculativeConfig("draft_model", 3, str(checkpoint))


def begin(*cores: EngineCore) -> None:
    """Let engines draft also on a busy machine."""
    for core in cores:
        assert core.scheduler.drafts is not None
        core.scheduler.drafts.free_rows = core.scheduler.drafts.costs = None


def check_right(core: EngineCore) -> None:
    """Fail unless the drafts were right but for near ties, which a step of other rows may round otherwise."""
    assert core.scheduler.drafts is not None
    stats = core.scheduler.drafts.stats()
    assert stats.num_accepted_tokens > 40
    assert stats.num_accepted_tokens >= 0.97 * stats.num_draft_tokens


def has_windows(core: EngineCore, checkpoint: Path) -> bool:
    return (core.ready.num_kv_groups > 1) is (checkpoint != Path(MODEL))


@pytest.mark.parametrize("is_tight", [False, True])
def test_hits_and_preemption(
    is_tight: bool, checkpoint: Path, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    engine = Engine(
        checkpoint,
        num_blocks=(22 if checkpoint == Path(MODEL) else 70) if is_tight else 400,
        budget=64,
        max_num_seqs=4,
        max_model_len=330,
        prefix_caching=True,
        speculative=itself(checkpoint),
    )
    assert has_windows(engine.core, checkpoint)
    begin(engine.core)
    for _ in range(2):
        assert engine.generate(prompts, [GREEDY.max_tokens] * len(prompts)) == expected
    assert engine.stats.num_preemptions if is_tight else engine.stats.prefix_cache_hits
    check_right(engine.core)


def test_prefill_and_decode_on_two_engines(
    checkpoint: Path, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    pair = Pair(MAKE["shm"], model=str(checkpoint), num_blocks=300, speculative=itself(checkpoint))
    assert has_windows(pair.decode.core, checkpoint)
    begin(pair.prefill.core, pair.decode.core)
    for number, (prompt, tokens) in enumerate(zip(prompts, expected, strict=True)):
        assert pair.ask(f"{number}", prompt, GREEDY) == tokens
    stats = pair.decode.core.scheduler.stats()
    assert stats.kv_bytes_received["shm"] > 0
    assert stats.kv_recomputes == {}
    check_right(pair.decode.core)
    pair.close()


@pytest.mark.parametrize("tier", ["offload", "folder"])
def test_evicted_blocks_come_back_from_a_file(
    tmp_path: Path, checkpoint: Path, prompts: list[list[int]], expected: list[list[int]], tier: str
) -> None:
    num_blocks = 80 if checkpoint != Path(MODEL) else 34
    engine = engine_pair.Engine(
        [],
        model=str(checkpoint),
        num_blocks=num_blocks,
        speculative=itself(checkpoint),
        **engine_pair.tier(tier, tmp_path),
    )
    assert has_windows(engine.core, checkpoint)
    begin(engine.core)
    for number in range(2):
        for index, (prompt, tokens) in enumerate(zip(prompts, expected, strict=True)):
            assert ask(engine, f"{number}-{index}", prompt) == tokens
    stats = engine.core.scheduler.stats()
    assert stats.kv_blocks_received > 0
    assert stats.kv_bytes_received[tier] == stats.kv_blocks_received * engine.core.executor.kv_pool().block_bytes
    check_right(engine.core)
    engine.core.shutdown()


def ask(engine: engine_pair.Engine, name: str, prompt: Sequence[int]) -> list[int]:
    engine.add(name, list(prompt), GREEDY)
    return [token for output in engine.run(name) for token in output.new_token_ids]
