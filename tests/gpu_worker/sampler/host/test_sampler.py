"""The sampler against the plain reference: token by token, and by its distribution."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.gpu_worker.sampler.host import reference
from tests.gpu_worker.sampler.host.processing import Row, sample
from tests.gpu_worker.sampler.host.variants import VARIANTS, params, peaked
from tokenloom.engine_core.data.core_params import CoreSamplingParams
from tokenloom.gpu_worker.sampler.host.sampler import (
    NO_TOKEN,
    WHOLE,
    Purpose,
    allowed_set,
    first_past,
    largest,
    nucleus,
    philox,
    rates,
    uniform,
    weigh,
)


@pytest.mark.parametrize("vocab", [2, 100, 5000, 20_011])
@pytest.mark.parametrize("name", VARIANTS)
def test_tokens_are_those_of_the_reference(name, vocab):
    generator = np.random.default_rng(vocab)
    logits = np.stack([peaked(generator, vocab) for _ in range(8)])
    rows = [Row(params(seed=seed, **VARIANTS[name]), output_index=seed * 3) for seed in range(8)]
    numbers = uniform(np.arange(8, dtype=np.uint64), np.arange(8, dtype=np.uint64) * np.uint64(3), Purpose.SAMPLE)
    expected = [
        reference.draw(reference.probabilities(row, sampling.params), u)
        for row, sampling, u in zip(logits, rows, numbers, strict=True)
    ]
    assert sample(logits, rows) == expected


@pytest.mark.parametrize("name", VARIANTS)
def test_distribution_is_that_of_the_reference(name):
    """Chi-square over 8,000 output indices of one seed; cells of less than 10 expected draws are put together."""
    logits, draws = peaked(np.random.default_rng(3), 200), 8_000
    sampling = [Row(params(seed=99, **VARIANTS[name]), output_index=index) for index in range(draws)]
    drawn = np.bincount(sample(np.tile(logits, (draws, 1)), sampling), minlength=200)
    expected = reference.probabilities(logits, sampling[0].params) * draws
    assert drawn[expected == 0].sum() == 0
    small = expected < 10
    cells = np.append(expected[~small], expected[small].sum())
    counts = np.append(drawn[~small], drawn[small].sum())
    statistic = ((counts - cells)[cells > 0] ** 2 / cells[cells > 0]).sum()
    freedom = max(int((cells > 0).sum()) - 1, 1)
    assert statistic < freedom + 4 * np.sqrt(2 * freedom) + 8


def test_a_row_does_not_depend_on_its_batch():
    generator = np.random.default_rng(5)
    logits = np.stack([peaked(generator, 5000) for _ in VARIANTS])
    rows = [Row(params(seed=index, **values), index) for index, values in enumerate(VARIANTS.values())]
    alone = [sample(logits[i : i + 1].copy(), rows[i : i + 1])[0] for i in range(len(rows))]
    assert sample(logits, rows) == alone


def test_greedy_takes_the_lowest_id_among_equals():
    logits = np.array([[1.0, 5.0, 5.0, 0.0], [2.0, 2.0, 2.0, 2.0]], dtype=np.float32)
    rows = [Row(params(temperature=0.0), 0)] * 2
    assert sample(logits, rows) == [1, 0]


def test_top_k_keeps_exactly_k_of_equals():
    rows = [Row(params(top_k=3), index) for index in range(500)]
    drawn = sample(np.zeros((500, 8), dtype=np.float32), rows)
    assert set(drawn) == {0, 1, 2}


def test_a_row_that_is_not_finite_harms_no_other():
    logits = np.zeros((4, 10), dtype=np.float32)
    logits[0, 3], logits[1, 4], logits[2] = np.nan, np.inf, -np.inf
    logits[3, 6] = 100.0
    tokens = sample(logits, [Row(params(top_k=2, top_p=0.5), 0)] * 4)
    assert tokens == [3, 4, NO_TOKEN, 6]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_row_without_a_finite_logit_has_no_token(bad, temperature):
    logits = np.full((3, 10), bad, dtype=np.float32)
    logits[0, 2] = 1.0
    logits[2, 5] = np.nan
    tokens = sample(logits, [Row(params(temperature=temperature), 0)] * 3)
    assert tokens[0] >= 0
    assert tokens[1:] == [NO_TOKEN, NO_TOKEN]


def test_a_temperature_of_any_size_leaves_a_valid_token():
    logits = np.tile(np.array([1.0, 3.0, 2.0], dtype=np.float32), (2, 1))
    assert sample(logits, [Row(params(temperature=t), 0) for t in (1e-310, 1e300)])[0] == 1


@pytest.mark.parametrize("count", [1, 63, 4095, 4096, 4100, 8192])
@pytest.mark.parametrize("u", [0.0, 0.5, 1.0 - 2.0**-53])
def test_first_past_never_takes_a_weight_of_zero(count, u):
    weights = np.zeros(count)
    weights[count // 2] = 0.7
    assert first_past(weights, u) == count // 2


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
    logits = (np.random.default_rng(size).standard_normal(size).round(2) * spread).astype(np.float32)
    weights = weigh(logits, rates(np.ones(1))[0])
    order = np.argsort(-logits, kind="stable")
    mass = np.cumsum(weights[order])
    count = min(int(np.searchsorted(mass, np.ceil(top_p * weights.sum()))) + 1, size)
    assert nucleus(logits, weights, top_p).tolist() == np.sort(order[:count]).tolist()


def test_weights_are_those_of_an_exponential_and_grow_with_the_logit():
    """Over every place within a power of two, and at the ends: a step of 2^-20, and a float32 next to it."""
    places = np.arange(1 << 20, dtype=np.float64) / (1 << 20)
    for whole in (0, 1, 39):
        logits = np.append(0.0, -(whole + places) * np.log(2)).astype(np.float32)
        weights = weigh(logits, rates(np.ones(1))[0])
        assert (np.diff(weights) <= 0).all()
        exact = np.exp(logits.astype(np.float64)) * WHOLE
        np.testing.assert_allclose(weights, exact, rtol=2e-6 * (1 + whole), atol=2)
    ends = np.array([3.0, 3.0, -np.inf, -3e38, 3.0 - 29.0, 2.9999998], dtype=np.float32)
    assert weigh(ends, rates(np.ones(1))[0]).tolist() == [WHOLE, WHOLE, 0, 0, 0, WHOLE]


@pytest.mark.parametrize("temperature", [1e-310, 1e-38, 1.0, 1e38, 1e300])
def test_a_weight_is_a_number_at_every_temperature(temperature):
    logits = np.array([1.0, 0.5, -np.inf, -3e38], dtype=np.float32)
    weights = weigh(logits, rates(np.array([temperature]))[0])
    assert weights[0] == WHOLE
    assert weights[2] == 0
    assert (weights[1] > 0) == (temperature >= 1.0)


def test_sums_of_weights_are_exact_at_the_largest_vocabulary():
    """A draw just below the end, of weights that are all the largest."""
    weights = np.full(1 << 22, WHOLE)
    assert int(weights.sum()) == 1 << 62
    assert first_past(weights, 1.0 - 2.0**-53) == len(weights) - 1
    assert first_past(weights, 0.5) == len(weights) // 2


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
    np.testing.assert_allclose(kept, reference.probabilities(row, params), rtol=2e-5, atol=2.0**-40)


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_known_answers(counter, key, expected):
    words = philox(np.array(counter, dtype=np.uint64)[:, None], np.array(key, dtype=np.uint64)[:, None])
    assert tuple(words[:, 0].tolist()) == expected


def test_a_number_does_not_depend_on_its_neighbours():
    seeds = np.array([7, 2**64 - 1, 7, 0], dtype=np.uint64)
    indices = np.array([0, 5, 2**33, 1], dtype=np.uint64)
    together = uniform(seeds, indices, Purpose.SAMPLE)
    alone = [uniform(seeds[i : i + 1], indices[i : i + 1], Purpose.SAMPLE)[0] for i in range(4)]
    assert together.tolist() == alone
    assert len(set(alone)) == 4


def test_numbers_are_uniform_over_indices_and_over_seeds():
    many, one = np.arange(100_000, dtype=np.uint64), np.full(100_000, 42, dtype=np.uint64)
    for numbers in (uniform(one, many, Purpose.SAMPLE), uniform(many, one, Purpose.SAMPLE)):
        assert numbers.min() >= 0.0
        assert numbers.max() < 1.0
        counts = np.histogram(numbers, bins=100, range=(0, 1))[0]
        assert ((counts - 1000) ** 2 / 1000).sum() < 149.4  # chi-square, 99 degrees of freedom, 0.1 %
