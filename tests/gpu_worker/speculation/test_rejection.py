"""Rejection sampling keeps the distribution: chi-square tests over fixed seeds, and its special cases."""

import numpy as np
import pytest

from tokenloom.engine_core.data.core_params import CoreSamplingParams
from tokenloom.gpu_worker.sampler.host.sampler import Purpose, Sampler
from tokenloom.gpu_worker.speculation.rejection import RejectionSampler, accept_or_redraw, distribution

NUM_DRAWS = 3000
TARGET = np.array([0.05, 0.3, 0.1, 0.25, 0.0, 0.02, 0.2, 0.08])
LIMIT = 22.46
"""Chi-square with 6 degrees of freedom exceeds it once in 1,000; the numbers here are the same in every run."""


def chi_square(tokens, expected):
    counts = np.bincount(tokens, minlength=len(expected))
    possible = expected > 0
    assert not counts[~possible].any()
    means = expected[possible] * len(tokens)
    return float(((counts[possible] - means) ** 2 / means).sum())


def draw_all(drafted_from, make_drafts):
    """One token of each of many seeds, whose drafts ``make_drafts(logits, params, indices)`` draws."""
    with np.errstate(divide="ignore"):
        logits = np.log(TARGET).astype(np.float32)
    params = [CoreSamplingParams(max_tokens=9, seed=seed, temperature=1.0) for seed in range(NUM_DRAWS)]
    names = [str(seed) for seed in range(NUM_DRAWS)]
    indices = np.full(NUM_DRAWS, 4)
    drafts = make_drafts(params, indices)
    sampler = RejectionSampler()
    for name in names if drafted_from is not None else []:
        sampler.keep(name, [np.zeros(0), drafted_from])
    tokens = sampler.bind(names, 1, drafts)(np.tile(logits, (NUM_DRAWS, 1)), params, indices)
    return tokens, float(np.mean([token == draft for token, draft in zip(tokens, drafts, strict=True)]))


@pytest.mark.parametrize(
    "weights",
    [TARGET, np.array([8, 1, 1, 1, 4, 1, 1, 1.0]), np.array([0.1, 0.2, 0.1, 0.3, 0.05, 0.05, 0.1, 0.1])],
    ids=["equal", "far", "near"],
)
def test_drawn_drafts_keep_the_distribution(weights):
    drafted_from = weights / weights.sum()

    def draw(params, indices):
        with np.errstate(divide="ignore"):
            logits = np.tile(np.log(drafted_from).astype(np.float32), (NUM_DRAWS, 1))
        return Sampler(Purpose.DRAFT).sample(logits, params, indices)

    tokens, accepted = draw_all(drafted_from, draw)
    assert chi_square(tokens, TARGET) < LIMIT
    assert accepted == pytest.approx(np.minimum(drafted_from, TARGET).sum(), abs=0.03)


def test_a_certain_draft_keeps_the_distribution():
    tokens, accepted = draw_all(None, lambda params, indices: [3] * NUM_DRAWS)
    assert chi_square(tokens, TARGET) < LIMIT
    assert accepted == pytest.approx(TARGET[3], abs=0.03)


def test_the_test_finds_a_wrong_distribution():
    wrong = np.array([0.1, 0.25, 0.1, 0.25, 0.0, 0.02, 0.2, 0.08])
    tokens, _ = draw_all(None, lambda params, indices: [3] * NUM_DRAWS)
    assert chi_square(tokens, wrong) > LIMIT


def test_a_replacement_is_never_the_draft():
    target, drafted_from = np.array([0.2, 0.5, 0.3]), np.array([0.6, 0.1, 0.3])
    for number in np.linspace(0, 0.999, 50):
        assert accept_or_redraw(target, 0, drafted_from, (0.9, number)) == 1
    assert accept_or_redraw(target, 0, drafted_from, (0.3, 0.5)) == 0


def test_equal_distributions_accept_whatever_rounding_says():
    target = np.array([0.5, 0.5])
    assert accept_or_redraw(target, 1, target * (1 + 1e-9), (1 - 1e-12, 0.0)) == 1


def test_greedy_rows_and_rows_without_a_draft_draw_as_always():
    logits = np.log(np.tile(TARGET + 0.01, (3, 1))).astype(np.float32)
    logits[2] = np.nan
    params = [CoreSamplingParams(max_tokens=9, seed=seed, temperature=seed % 2) for seed in (2, 3, 5)]
    indices = np.array([0, 1, 2])
    tokens = RejectionSampler().bind(["a", "b", "c"], 0, [5, None, 5])(logits, params, indices)
    assert tokens == Sampler().sample(logits, params, indices)


def test_filters_shape_both_distributions():
    logits = np.arange(8, dtype=np.float32)
    params = CoreSamplingParams(max_tokens=1, seed=1, temperature=1.0, top_k=2)
    probabilities = distribution(logits, params)
    assert np.flatnonzero(probabilities).tolist() == [6, 7]
    assert probabilities.sum() == pytest.approx(1.0)


def test_ended_requests_are_forgotten():
    sampler = RejectionSampler()
    sampler.keep("a", [TARGET])
    sampler.forget(["a", "b"])
    assert not sampler._proposed
