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
from tests.parity.state_checkpoints import SERVED, write_model
from tests.parity.test_states import BUILT_IN, draw, make_drafting, make_engine, propose_from
from tokenloom.engine_core.data.core_params import CoreSamplingParams
from tokenloom.engine_core.data.messages import EngineCoreRequest

EXACT = ["qwen3_next", "qwen3_5_text", "olmo_hybrid", "granitemoehybrid", "bamba", "nemotron_h", "lfm2"]
_TALKS, _TURNS, _TOKENS = 12, 3, 16
_CROWD = 3
_LARGEST_STATE = 40_000
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


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def conversations(cold: Engine, warm: Engine, whole: list[list[int]]) -> list[tuple[Answer, Answer]]:
    """Return what an engine without a cache answers, and what the one under test does. ``whole`` gets the prompts with
    their answers before the one under test computes them."""
    for seed in range(_CROWD):
        start(warm, draw(80, seed=500 + seed), 1900)
    talks = [draw(70 + 23 * index, seed=600 + index) for index in range(_TALKS)]
    pairs: list[tuple[Answer, Answer]] = []
    for turn in range(_TURNS):
        expected = answers(cold, talks)
        whole += [talk + answer.tokens for talk, answer in zip(talks, expected, strict=True)]
        pairs += zip(expected, answers(warm, talks), strict=True)
        asked = [draw(17, seed=700 + _TALKS * turn + index) for index in range(_TALKS)]
        talks = [talk + more for talk, more in zip(whole[-_TALKS:], asked, strict=True)]
    assert warm.stats.prefix_cache_hits > 0
    assert warm.stats.num_running == _CROWD, "the crowd decoded all the time"
    assert len(pairs) == _TALKS * _TURNS
    return pairs


# The seven architectures that promise it with several threads, too.
_THREADS = [(kind, 1) for kind in SERVED] + [(kind, 2) for kind in EXACT]
_SETTINGS: dict[str, Any] = {"dtype": "bfloat16", "num_blocks": 2048}
_WARM: dict[str, Any] = {
    "budget": 160,
    "max_num_seqs": 4 + _CROWD,
    "max_model_len": 2048,
    "state_memory_bytes": 64 * _LARGEST_STATE,
}


@pytest.mark.parametrize(("kind", "num_threads"), _THREADS)
def test_a_cache_changes_no_bit(kind: str, num_threads: int, tmp_path: Path) -> None:
    path, settings = write_model(kind, tmp_path, torch.bfloat16), {**_SETTINGS, "num_threads": num_threads}
    cold = make_engine(path, prefix_caching=False, max_num_seqs=_TALKS, **settings)
    pairs = conversations(cold, make_engine(path, **settings, **_WARM), [])
    assert sum(one == other for one, other in pairs) == len(pairs)


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("kind", BUILT_IN)
def test_a_cache_changes_no_bit_of_built_in_layers(kind: str, num_threads: int, tmp_path: Path) -> None:
    """Their steps end anywhere, and what decoding leaves is found again: nothing is aligned to chunks."""
    path = write_model(kind, tmp_path, torch.bfloat16, **wide_heads(kind))
    settings = {**_SETTINGS, "num_threads": num_threads, "model_impl": "native"}
    cold = make_engine(path, prefix_caching=False, max_num_seqs=_TALKS, **settings)
    pairs = conversations(cold, make_engine(path, **settings, **_WARM), [])
    assert sum(one == other for one, other in pairs) == len(pairs)


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("kind", EXACT)
def test_drafts_change_no_bit(kind: str, num_threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The crowd decodes beside them without drafts."""
    path = write_model(kind, tmp_path, torch.bfloat16, **wide_heads(kind))
    pairs = drafted(path, "transformers", num_threads, monkeypatch)
    assert sum(one == other for one, other in pairs) == len(pairs)


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("is_wide", [False, True])
@pytest.mark.parametrize("kind", BUILT_IN)
def test_drafts_of_built_in_layers_change_no_bit(
    kind: str, is_wide: bool, num_threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_model(kind, tmp_path, torch.bfloat16, **(wide_heads(kind) if is_wide else {}))
    pairs = drafted(path, "native", num_threads, monkeypatch)
    assert sum(one == other for one, other in pairs) == len(pairs)


def wide_heads(kind: str) -> dict[str, int]:
    """Return entries for heads of 32 elements, for which other kernels attend than for those of 16: where the processor
    multiplies pairs of bfloat16, these round weights and add scores otherwise for a token than for a prompt."""
    entries = SERVED[kind]
    if "num_attention_heads" not in entries or "kv_lora_rank" in entries:
        return {}
    return {"head_dim": 32} if "head_dim" in entries else {"num_attention_heads": 2, "num_key_value_heads": 1}


def drafted(path: Path, impl: str, num_threads: int, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Answer, Answer]]:
    """Return the answers without a cache and drafts, and with both."""
    whole = list[list[int]]()
    settings = {**_SETTINGS, "num_threads": num_threads, "model_impl": impl}
    cold = make_engine(path, prefix_caching=False, max_num_seqs=_TALKS, **settings)
    propose_from(whole, monkeypatch)
    warm = make_drafting(path, **settings, **_WARM)
    pairs = conversations(cold, warm, whole)
    assert warm.stats.spec_decoding is not None
    assert warm.stats.spec_decoding.num_accepted_tokens > 100
    return pairs
