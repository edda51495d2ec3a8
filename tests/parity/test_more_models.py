"""Greedy outputs of more architectures are those of transformers: in chunks, in batches, from caches, preempted."""

from pathlib import Path

import pytest

from tests.parity.engine import Engine
from tests.parity.identical import assert_identical
from tests.parity.reference import MORE_MODELS, Reference, make_gpt_oss_reference, make_small_reference


@pytest.mark.parametrize("name", MORE_MODELS)
def test_chunks_prefix_hits_and_preemption(name: str, tmp_path: Path) -> None:
    num_blocks = {"gemma2": 51, "gemma3_text": 51, "gpt_oss": 51, "llama4_text": 69}.get(name)
    _check_reference(make_small_reference(name, tmp_path), num_blocks or 42, has_groups=num_blocks is not None)


def test_gpt_oss_as_published(tmp_path: Path) -> None:
    _check_reference(make_gpt_oss_reference(tmp_path), 56, has_groups=True)


def _check_reference(reference: Reference, num_blocks: int, has_groups: bool) -> None:
    """``num_blocks``: a few more than the longest request needs. In a pool of groups of layers it has full and window
    blocks: 40 and 9 with a window of 50, and 10 for each layer with chunks of 64."""
    assert len({tuple(case.tokens) for case in reference.cases}) >= len(reference.cases) - 2
    engine = Engine(
        reference.path, stop_token_ids=reference.eos_token_ids, budget=64, num_blocks=num_blocks, prefix_caching=True
    )
    assert (engine.core.ready.num_kv_groups > 1) == has_groups
    assert_identical(sorted(reference.cases, key=lambda case: len(case.prompt)), engine.generate)
    hits = engine.stats.prefix_cache_hits
    assert_identical(reference.cases, engine.generate)
    assert engine.stats.prefix_cache_hits > hits
    assert engine.most_scheduled > 3
    assert engine.stats.num_preemptions > 0
