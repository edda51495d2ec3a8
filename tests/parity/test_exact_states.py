"""Models that keep a state, in bfloat16: a prefix cache, chunks and other requests change no bit of an answer.

Twelve conversations of three turns. The engine under test has a prefix cache and small steps, in which a crowd decodes;
the other one computes each prompt as a whole.
"""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from tests.parity.engine import Engine
from tests.parity.state_checkpoints import write_model
from tests.parity.test_states import draw, make_engine
from tokenloom.engine_core.data.core_params import CoreSamplingParams
from tokenloom.engine_core.data.messages import EngineCoreRequest

EXACT = ["qwen3_next", "qwen3_5_text", "olmo_hybrid", "granitemoehybrid", "bamba", "nemotron_h", "lfm2"]
_TALKS, _TURNS, _TOKENS = 12, 3, 16
_CROWD = 3
_LARGEST_STATE = 30_000
"""Bytes of a slot of the largest of these models."""
_NAMES = map(str, itertools.count())


class Answer(NamedTuple):
    """What an engine answers to a prompt: the tokens, and the log probability of each."""

    tokens: list[int]
    logprobs: list[float]


def start(engine: Engine, prompt: list[int], max_tokens: int) -> str:
    params = CoreSamplingParams(max_tokens=max_tokens, seed=0, temperature=0.0, logprobs=0)
    request = EngineCoreRequest(next(_NAMES), prompt, params)
    engine.core.add_request(request)
    return request.request_id


def answers(engine: Engine, prompts: list[list[int]]) -> list[Answer]:
    found = {start(engine, prompt, _TOKENS): Answer([], []) for prompt in prompts}
    while any(len(answer.tokens) < _TOKENS for answer in found.values()):
        outputs = engine.core.step()
        engine.stats = outputs.scheduler_stats or engine.stats
        for output in outputs.outputs:
            assert not output.error, output.error
            if (answer := found.get(output.request_id)) and output.new_logprobs is not None:
                answer.tokens.extend(output.new_token_ids)
                answer.logprobs.extend(output.new_logprobs.sampled)
    return list(found.values())


@pytest.fixture(params=[1, 2], ids=["one thread", "two threads"])
def num_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    yield request.param
    torch.set_num_threads(before)


def conversations(path: Path, num_threads: int, model_impl: str = "transformers") -> list[tuple[Answer, Answer]]:
    """Return what an engine without a cache answers, and what the one under test does."""
    settings: dict[str, Any] = {
        "model_impl": model_impl,
        "dtype": "bfloat16",
        "num_threads": num_threads,
        "num_blocks": 2048,
    }
    cold = make_engine(path, prefix_caching=False, max_num_seqs=_TALKS, **settings)
    settings["state_memory_bytes"] = 64 * _LARGEST_STATE
    warm = make_engine(path, budget=160, max_num_seqs=4 + _CROWD, max_model_len=2048, **settings)
    for seed in range(_CROWD):
        start(warm, draw(80, seed=500 + seed), 1900)
    talks = [draw(70 + 23 * index, seed=600 + index) for index in range(_TALKS)]
    pairs: list[tuple[Answer, Answer]] = []
    for turn in range(_TURNS):
        turns = list(zip(answers(cold, talks), answers(warm, talks), strict=True))
        pairs += turns
        asked = [draw(17, seed=700 + _TALKS * turn + index) for index in range(_TALKS)]
        talks = [talk + answer.tokens + more for talk, (answer, _), more in zip(talks, turns, asked, strict=True)]
    assert warm.stats.prefix_cache_hits > 0
    assert warm.stats.num_running == _CROWD, "the crowd decoded all the time"
    return pairs


@pytest.mark.parametrize("kind", EXACT)
def test_a_cache_changes_no_bit(kind: str, num_threads: int, tmp_path: Path) -> None:
    pairs = conversations(write_model(kind, tmp_path, torch.bfloat16), num_threads)
    assert len(pairs) == _TALKS * _TURNS
    assert sum(one == other for one, other in pairs) == len(pairs)


@pytest.mark.parametrize("kind", ["qwen3_next", "qwen3_5_text", "granitemoehybrid", "lfm2"])
def test_a_cache_changes_no_bit_of_built_in_layers(kind: str, num_threads: int, tmp_path: Path) -> None:
    """Their steps end anywhere, and what decoding leaves is found again: nothing is aligned to chunks."""
    pairs = conversations(write_model(kind, tmp_path, torch.bfloat16), num_threads, "native")
    assert len(pairs) == _TALKS * _TURNS
    assert sum(one == other for one, other in pairs) == len(pairs)
