"""Selection without sorting against sorting, on values with many equals."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.gpu_worker.sampler.host import reference
from tokenloom.engine_core.data.core_sampling_params import CoreSamplingParams
from tokenloom.gpu_worker.sampler.host.sampler import allowed_set, largest, nucleus

SIZES = [1, 2, 63, 64, 65, 1000, 20_000]


def coarse(seed, size):
    return np.random.default_rng(seed).integers(0, max(2, size // 3), size).astype(np.float32)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("share", [0.0, 0.001, 0.3, 1.0, 2.0])
def test_largest_is_the_head_of_a_stable_sort(size, share):
    values = coarse(size, size)
    k = max(1, int(size * share))
    expected = np.sort(np.argsort(-values, kind="stable")[:k])
    assert largest(values, k).tolist() == expected.tolist()


def test_minus_infinity_is_a_value_like_others():
    values = np.full(1000, -np.inf)
    values[700] = 0.0
    assert largest(values, 3).tolist() == [0, 1, 700]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("top_p", [1e-9, 0.5, 0.9, 0.999999])
@pytest.mark.parametrize("spread", [0.0, 1.0, 30.0])
def test_nucleus_is_the_shortest_head_with_the_mass(size, top_p, spread):
    weights = np.exp(np.random.default_rng(size).standard_normal(size).round(2) * spread)
    order = np.argsort(-weights, kind="stable")
    mass = np.cumsum(weights[order])
    count = min(int(np.searchsorted(mass, top_p * weights.sum())) + 1, size)
    assert nucleus(weights, top_p).tolist() == np.sort(order[:count]).tolist()


@settings(max_examples=200, deadline=None)
@given(
    logits=st.lists(st.integers(-40, 40).map(lambda i: i / 8), min_size=1, max_size=80),
    temperature=st.sampled_from([0.25, 1.0, 4.0]),
    top_k=st.integers(0, 90),
    top_p=st.sampled_from([0.1, 0.5, 0.95, 1.0]),
    min_p=st.sampled_from([0.0, 0.01, 0.3]),
)
def test_filters_together_keep_what_the_reference_keeps(logits, temperature, top_k, top_p, min_p):
    params = CoreSamplingParams(max_tokens=1, seed=0, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    row = np.array(logits, dtype=np.float32)
    token_ids, weights = allowed_set(row, params)
    kept = np.zeros(len(row))
    kept[slice(None) if token_ids is None else token_ids] = weights / weights.sum()
    np.testing.assert_allclose(kept, reference.probabilities(row, params), rtol=1e-12, atol=1e-300)
