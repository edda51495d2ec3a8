"""Greedy outputs of the engine are transformers' own, however the work is batched, cached, cut or interrupted."""

import pytest

from tests.parity.engine import Engine
from tests.parity.identical import assert_identical
from tests.parity.reference import NUM_TOKENS, Reference


def make_engine(reference: Reference, **settings) -> Engine:
    return Engine(reference.path, stop_token_ids=reference.eos_token_ids, **settings)


def test_the_reference_is_worth_comparing_with(reference):
    """Prompts of 1 to 600 tokens; outputs that differ from each other and do not repeat one token."""
    assert {1, 600} <= {len(case.prompt) for case in reference.cases}
    assert len(reference.cases) == 32
    outputs = {tuple(case.tokens) for case in reference.cases}
    assert len(outputs) >= 24
    assert sum(len(set(output)) for output in outputs) >= 4 * len(outputs)


@pytest.mark.parametrize("batch_size", [1, 7, 32])
def test_batches(reference, batch_size):
    engine = make_engine(reference, max_num_seqs=batch_size, budget=8192)
    assert_identical(reference.cases if batch_size > 1 else reference.cases[:8], engine.generate)
    assert engine.most_scheduled == batch_size
    assert engine.stats.prefix_cache_hits == 0


def test_prefix_cache_hits(reference):
    engine = make_engine(reference, prefix_caching=True)
    assert_identical(reference.cases, engine.generate)
    hits = engine.stats.prefix_cache_hits
    assert hits > 0, "no prompt found the beginning that it shares with another"
    assert_identical(reference.cases, engine.generate)
    full_blocks = sum((len(case.prompt) - 1) // 16 * 16 for case in reference.cases)
    assert engine.stats.prefix_cache_hits - hits == full_blocks


@pytest.mark.parametrize("prefix_caching", [False, True])
def test_chunked_prefill(reference, prefix_caching):
    engine = make_engine(reference, budget=64, prefix_caching=prefix_caching)
    assert_identical(reference.cases, engine.generate)


def test_without_kernels(reference):
    """The other tests compute with C++ kernels, where there is a compiler and a model's shapes allow it."""
    engine = make_engine(reference, budget=64, prefix_caching=True, attention_backend="torch")
    assert_identical(reference.cases, engine.generate)


@pytest.mark.parametrize("prefix_caching", [False, True])
def test_forced_preemption(reference, prefix_caching):
    engine = make_engine(reference, num_blocks=42, budget=256, prefix_caching=prefix_caching)
    # Short prompts first: many fit at once, and then their outputs do not.
    assert_identical(sorted(reference.cases, key=lambda case: len(case.prompt)), engine.generate)
    assert engine.stats.num_preemptions >= 3


def test_a_continuation_goes_on_where_it_was(reference):
    """Accepted tokens of an earlier attempt: what fail-over relies on."""
    engine = make_engine(reference)
    half = NUM_TOKENS // 2
    cases = [case for case in reference.cases if len(case.tokens) == NUM_TOKENS]
    prompts = [case.prompt + case.tokens[:half] for case in cases]
    assert engine.generate(prompts, [half] * len(cases)) == [case.tokens[half:] for case in cases]
