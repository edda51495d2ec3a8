"""Several ranks compute the tokens that one computes: tensor parallel, pipeline parallel, and both."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.gpu_worker.parallel.rank_threads import RankThreads, parallel
from tests.parity.engine import Engine
from tests.parity.identical import Case, assert_identical
from tests.parity.reference import SMALL_CONFIGS, save_random
from tokenloom.engine_core.config import EngineConfig
from tokenloom.engine_core.executor.executor import Executor

VOCAB = 503
LENGTHS = [1, 15, 16, 17, 40, 70, 130]
NUM_TOKENS = 12
SHAPES = [(2, 1), (1, 2), (2, 2)]


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


def make(path: Path, tp: int, pp: int, directory: Path, **settings: Any) -> Engine:
    def executor(config: EngineConfig) -> Executor:
        return RankThreads(config, directory)

    return Engine(path, budget=64, num_blocks=60, executor=executor, parallel=parallel(tp, pp), **settings)


@pytest.mark.parametrize("name", SMALL_CONFIGS)
def test_greedy_and_seeded_tokens(name: str, tmp_path: Path) -> None:
    path = save_random(name, tmp_path, **SMALL_CONFIGS[name])
    alone, limits = Engine(path, budget=64, num_blocks=60), [NUM_TOKENS] * len(LENGTHS)
    expected = cases(alone)
    drawn = {"temperature": 1.0, "top_p": 0.9}
    seeded = alone.generate(prompts(), limits, **drawn)
    for tp, pp in SHAPES:
        directory = tmp_path / f"{tp}-{pp}"
        directory.mkdir()
        engine = make(path, tp, pp, directory)
        assert_identical(expected, engine.generate)
        assert engine.generate(prompts(), limits, **drawn) == seeded
        engine.core.shutdown()
