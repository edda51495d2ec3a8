"""Several ranks compute the tokens of a model that keeps a state: each keeps those of its heads or of its layers.

Of context parallel ranks each keeps the states of its heads, and the KV of its part of the tokens.
"""

from pathlib import Path
from typing import Any

import pytest

from tests.gpu_worker.models.test_mixers import FACTORS
from tests.gpu_worker.parallel.rank_threads import RankThreads, parallel
from tests.parity.engine import Engine
from tests.parity.state_checkpoints import write_model
from tests.parity.test_states import Reference, draw, free_slots
from tokenloom.engine_core.data.config import EngineConfig
from tokenloom.engine_core.executor.executor import Executor

_LENGTHS = (5, 64, 130, 1, 97)
_SHAPES = [(2, 1, 1), (1, 2, 1), (2, 2, 1), (2, 1, 2)]
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_next": ("qwen3_next", {}),
    "qwen3_5": ("qwen3_5_text", {}),
    "granite": ("granitemoehybrid", {}),
    "granite of one group": ("granitemoehybrid", {"mamba_n_groups": 1}),
    "lfm2": ("lfm2", {}),
    "mamba2": ("mamba2", {}),
    "nemotron_h": ("nemotron_h", {}),
    "falcon_h1": ("falcon_h1", FACTORS),
    "kimi_linear": ("kimi_linear", {}),
    "falcon_h1 with a norm": ("falcon_h1", {"mamba_rms_norm": True, "mamba_n_groups": 1}),
}


def make(path: Path, directory: Path, shape: tuple[int, int, int], **options: Any) -> Engine:
    directory.mkdir()

    def executor(config: EngineConfig) -> Executor:
        return RankThreads(config, directory)

    return Engine(path, executor=executor, parallel=parallel(*shape), **options)


@pytest.mark.parametrize("name", MODELS)
def test_tokens_are_those_of_the_model(name: str, tmp_path: Path) -> None:
    kind, entries = MODELS[name]
    path = write_model(kind, tmp_path / "model", **entries)
    prompts = [draw(length, seed) for seed, length in enumerate(_LENGTHS)]
    expected = Reference(kind, **entries).answers(prompts, 12)
    for tp, pp, cp in _SHAPES[: 3 if name == "kimi_linear" else 4]:  # compressed vectors are not spread
        options: dict[str, Any] = {"budget": 60, "max_num_seqs": 4, "num_blocks": 256, "prefix_caching": True}
        engine = make(path, tmp_path / f"{tp}-{pp}-{cp}", (tp, pp, cp), **options)
        for hits in (False, True):
            assert engine.generate(prompts, [12] * len(prompts)) == expected
            assert (engine.stats.prefix_cache_hits > 0) is hits
        free, total = free_slots(engine)
        assert free == total
        engine.core.shutdown()
