"""The sampler against the plain reference: token by token, and by its distribution."""

import numpy as np
import pytest

from tests.gpu_worker.sampler.host import reference
from tests.gpu_worker.sampler.host.processing import Row, sample
from tests.gpu_worker.sampler.host.variants import VARIANTS, params, peaked
from tokenloom.gpu_worker.sampler.host.sampler import NO_TOKEN, Purpose, first_past, uniform


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
