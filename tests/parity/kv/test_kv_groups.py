"""Models whose layers see different windows have the tokens that they have with one block table for all layers."""

import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.gpu_worker.kv_connector import engine_pair
from tests.gpu_worker.kv_connector.engine_pair import MAKE, Pair
from tests.parity.engine import Engine
from tests.parity.reference import SMALL_CONFIGS, save_random
from tokenloom.engine_core.data.core_params import CoreSamplingParams

SLIDING, FULL = "sliding_attention", "full_attention"
LAYERS = [FULL, SLIDING, SLIDING, FULL, SLIDING]
LENGTHS = (1, 16, 33, 49, 50, 51, 120, 270)
_NUM_TOKENS = 12


@pytest.fixture(scope="module", params=["windows", "chunks"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of chunks less is read than of windows as long; Llama 4 has such layers."""
    if request.param == "chunks":
        chunks = {"num_hidden_layers": 5, "no_rope_layers": [0, 1, 1, 0, 1], "attention_chunk_size": 48}
        return save_random(
            "llama4_text", tmp_path_factory.mktemp("chunks"), **{**SMALL_CONFIGS["llama4_text"], **chunks}
        )
    entries = {"layer_types": LAYERS, "num_hidden_layers": len(LAYERS), "sliding_window": 50, "head_dim": 16}
    entries |= {"tie_word_embeddings": False}  # otherwise each token repeats itself
    return save_random("gemma3_text", tmp_path_factory.mktemp("checkpoints"), **entries)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Some begin with each other."""
    generator = np.random.default_rng(3)
    longest = generator.integers(3, 503, max(LENGTHS)).tolist()
    others = [longest[:length] for length in LENGTHS] + [longest[:200] + [5] * 60, longest[:90] + [6] * 100]
    return [*others, generator.integers(3, 503, 200).tolist()]


@pytest.fixture(scope="module")
def expected(checkpoint: Path, prompts: list[list[int]]) -> list[list[int]]:
    """The tokens with one table, each prompt alone."""
    engine = Engine(checkpoint, groups=False)
    assert engine.core.ready.num_kv_groups == 1
    tokens = [engine.generate([prompt], [_NUM_TOKENS])[0] for prompt in prompts]
    assert len(set(map(tuple, tokens))) > len(tokens) - 2
    return tokens


@pytest.mark.parametrize(("backend", "budget"), [("auto", 24), ("torch", 2048)])
def test_chunks_batches_and_hits(
    backend: str, budget: int, checkpoint: Path, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    engine = Engine(
        checkpoint, num_blocks=500, budget=budget, max_num_seqs=8, prefix_caching=True, attention_backend=backend
    )
    assert engine.core.ready.num_kv_groups > 1
    assert engine.generate(prompts, [_NUM_TOKENS] * len(prompts)) == expected
    hits = engine.stats.prefix_cache_hits
    assert hits > 0
    assert engine.generate(prompts, [_NUM_TOKENS] * len(prompts)) == expected
    assert engine.stats.prefix_cache_hits > hits


def test_preemption(checkpoint: Path, prompts: list[list[int]], expected: list[list[int]]) -> None:
    engine = Engine(checkpoint, num_blocks=40, budget=64, max_model_len=300, prefix_caching=True)
    assert engine.generate(prompts, [_NUM_TOKENS] * len(prompts)) == expected
    assert engine.stats.num_preemptions > 0


@pytest.fixture
def pair(checkpoint: Path) -> Iterator[Pair]:
    pair = Pair(MAKE["shm"], model=str(checkpoint), num_blocks=300)
    yield pair
    pair.close()


def test_prefill_and_decode_on_two_engines(pair: Pair, prompts: list[list[int]], expected: list[list[int]]) -> None:
    num_groups = pair.decode.core.ready.num_kv_groups
    num_full = pair.decode.core.ready.kv_layout.count("full")
    assert num_groups > num_full > 0
    params = CoreSamplingParams(max_tokens=_NUM_TOKENS, seed=0, temperature=0.0)
    num_blocks = 0
    for number, prompt, tokens in zip(itertools.count(), prompts, expected, strict=False):
        pair.prefill.core.reset_prefix_cache()
        pair.decode.core.reset_prefix_cache()
        assert pair.ask(f"{number}", prompt, params) == tokens
        # The first token came with the request, so the next position is the one behind the prompt.
        total, unseen = -(-len(prompt) // 16), max(0, len(prompt) - 49) // 16
        num_blocks += total * num_full + (total - unseen) * (num_groups - num_full)
    stats = pair.decode.core.scheduler.stats()
    assert (stats.kv_blocks_received, stats.kv_recomputes) == (num_blocks, {})


def test_a_decode_engine_loads_after_what_it_hits(
    pair: Pair, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    params = CoreSamplingParams(max_tokens=_NUM_TOKENS, seed=0, temperature=0.0)
    for number in range(2):
        for index, (prompt, tokens) in enumerate(zip(prompts, expected, strict=True)):
            assert pair.ask(f"{number}-{index}", prompt, params) == tokens
    assert pair.decode.core.scheduler.stats().kv_recomputes == {}


@pytest.mark.parametrize("tier", ["offload", "folder"])
def test_evicted_blocks_come_back_from_a_file(
    tmp_path: Path, checkpoint: Path, prompts: list[list[int]], expected: list[list[int]], tier: str
) -> None:
    engine = engine_pair.Engine([], model=str(checkpoint), num_blocks=60, **engine_pair.tier(tier, tmp_path))
    assert engine.core.ready.num_kv_groups > 1
    params = CoreSamplingParams(max_tokens=_NUM_TOKENS, seed=0, temperature=0.0)
    for number in range(2):
        for index, (prompt, tokens) in enumerate(zip(prompts, expected, strict=True)):
            engine.add(f"{number}-{index}", prompt, params)
            assert [token for output in engine.run(f"{number}-{index}") for token in output.new_token_ids] == tokens
    stats = engine.core.scheduler.stats()
    assert stats.kv_blocks_received > 0
    assert stats.kv_bytes_received[tier] == stats.kv_blocks_received * engine.core.executor.kv_pool().block_bytes
    assert stats.kv_recomputes == {}
    engine.core.shutdown()


def test_pulling_and_offloading_by_group(
    tmp_path: Path, checkpoint: Path, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    pair = Pair(MAKE["shm"], model=str(checkpoint), num_blocks=80, offload_path=str(tmp_path), offload_bytes=64 << 20)
    params = CoreSamplingParams(max_tokens=_NUM_TOKENS, seed=0, temperature=0.0)
    for number in range(2):
        for index, (prompt, tokens) in enumerate(zip(prompts, expected, strict=True)):
            assert pair.ask(f"{number}-{index}", prompt, params) == tokens
    prefill, decode = (engine.core.scheduler.stats() for engine in (pair.prefill, pair.decode))
    assert prefill.kv_bytes_received["offload"] > 0
    assert decode.kv_bytes_received["shm"] > 0
    assert prefill.kv_recomputes == decode.kv_recomputes == {}
    pair.close()
