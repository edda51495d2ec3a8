"""Several ranks compute the tokens that one computes: tensor, pipeline and context parallel."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from tests.gpu_worker.parallel.rank_threads import RankThreads, parallel
from tests.parity.engine import Engine
from tests.parity.identical import Case, assert_identical
from tests.parity.reference import SMALL_CONFIGS, save_random
from tokenloom.engine_core.data.config import EngineConfig
from tokenloom.engine_core.executor.executor import Executor

VOCAB = 503
LENGTHS = [1, 15, 16, 17, 40, 70, 130]
NUM_TOKENS = 12
SHAPES = [(2, 1, 1), (1, 2, 1), (2, 2, 1), (2, 1, 2)]
NOT_SPREAD = ("deepseek_v2", "deepseek_v3", "llama4_text")
"""Models whose compressed vectors are on every rank, and not spread."""


@dataclass
class Logits:
    """Asks the engine of one rank for the logits before a token, which a difference alone needs."""

    engine: Engine
    prompt: list[int]
    tokens: list[int]

    def __getitem__(self, position: int) -> np.ndarray:
        logits = np.full(VOCAB, -np.inf, np.float32)
        for token, logprob in self.engine.next_logprobs(self.prompt, self.tokens[:position]).items():
            logits[token] = logprob
        return logits


def prompts() -> list[list[int]]:
    generator = np.random.default_rng(5)
    return [generator.integers(3, VOCAB, length).tolist() for length in LENGTHS]


def cases(engine: Engine) -> list[Case]:
    outputs = engine.generate(prompts(), [NUM_TOKENS] * len(LENGTHS))
    pairs = zip(prompts(), outputs, strict=True)
    return [Case(prompt, tokens, Logits(engine, prompt, tokens)) for prompt, tokens in pairs]  # type: ignore[arg-type]


NUM_BLOCKS = 80
"""Enough for one request of the model whose layers are in most groups."""


def make(path: Path, shape: tuple[int, int, int], directory: Path, *, experts: bool = False) -> Engine:
    def executor(config: EngineConfig) -> Executor:
        return RankThreads(config, directory)

    return Engine(path, budget=64, num_blocks=NUM_BLOCKS, executor=executor, parallel=parallel(*shape, experts=experts))


@pytest.mark.parametrize("name", SMALL_CONFIGS)
def test_greedy_and_seeded_tokens(name: str, tmp_path: Path) -> None:
    path = save_random(name, tmp_path, **SMALL_CONFIGS[name])
    alone, limits = Engine(path, budget=64, num_blocks=NUM_BLOCKS), [NUM_TOKENS] * len(LENGTHS)
    expected = cases(alone)
    drawn = {"temperature": 1.0, "top_p": 0.9}
    seeded = alone.generate(prompts(), limits, **drawn)
    for tp, pp, cp in SHAPES[: 3 if name in NOT_SPREAD else 4]:
        directory = tmp_path / f"{tp}-{pp}-{cp}"
        directory.mkdir()
        engine = make(path, (tp, pp, cp), directory)
        assert_identical(expected, engine.generate)
        assert engine.generate(prompts(), limits, **drawn) == seeded
        engine.core.shutdown()


@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss", "deepseek_v3", "llama4_text"])
def test_experts_spread_over_ranks(name: str, tmp_path: Path) -> None:
    path = save_random(name, tmp_path, **SMALL_CONFIGS[name])
    alone = Engine(path, budget=64, num_blocks=NUM_BLOCKS)
    engine = make(path, (2, 1, 1), tmp_path, experts=True)
    assert_identical(cases(alone), engine.generate)
    engine.core.shutdown()
