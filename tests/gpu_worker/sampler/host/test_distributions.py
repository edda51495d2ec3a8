"""What is drawn, of processors and sampler together, is distributed as a plain reference says (chi-square, p > 0.01).

Seeds are fixed: a test either always passes or never.
"""

import math

import numpy as np
import pytest

from tests.gpu_worker.sampler.host import reference
from tests.gpu_worker.sampler.host.processing import Row, sample
from tokenloom.engine_core.data.core_params import CoreSamplingParams
from tokenloom.gpu_worker.sampler.host.logits_processors import make_logits_processors

VOCAB, DRAWS = 120, 10_000
PROMPT, OUTPUT = [3, 5, 5, 9, 20, 21, 22], [5, 7, 7, 7, 30, 31, 3]
CASES = {
    "plain": {},
    "temperature 0.5": {"temperature": 0.5},
    "temperature 2": {"temperature": 2.0},
    "top-k": {"top_k": 12},
    "top-p": {"top_p": 0.8},
    "min-p": {"min_p": 0.05},
    "top-k, top-p and min-p": {"temperature": 1.3, "top_k": 40, "top_p": 0.9, "min_p": 0.01},
    "presence penalty": {"presence_penalty": 1.5},
    "frequency penalty": {"frequency_penalty": 0.7},
    "repetition penalty": {"repetition_penalty": 1.8},
    "negative penalties": {"presence_penalty": -1.0, "frequency_penalty": -0.3, "repetition_penalty": 0.8},
    "logit bias": {"logit_bias": {3: 2.0, 7: -4.0, 50: 5.0, 119: -100.0}},
    "allowed tokens": {"allowed_token_ids": (3, 5, 7, 50, 51, 52)},
    "bad words": {"bad_words": ((7,), (31, 3, 5), (3, 20), (9, 9))},
    "min tokens": {"min_tokens": 9, "stop_token_ids": (5, 7)},
    "everything": {
        "temperature": 0.9,
        "top_k": 50,
        "top_p": 0.95,
        "repetition_penalty": 1.2,
        "frequency_penalty": 0.2,
        "logit_bias": {50: 2.0},
        "bad_words": ((7,),),
    },
}


def plain_logits() -> np.ndarray:
    """Peaks among what the cases change, so that they change what is likely."""
    logits = np.random.default_rng(17).standard_normal(VOCAB) * 1.2
    logits[[3, 5, 7, 30, 50, 60]] += 3.0
    return logits.astype(np.float32)


def expected_logits(logits: np.ndarray, params: CoreSamplingParams) -> np.ndarray:
    """After masks, bias and penalties, in this order, one token at a time."""
    row = np.array(logits, dtype=np.float64)
    for token in range(VOCAB):
        completes = any(
            word[-1] == token and OUTPUT[len(OUTPUT) - len(word) + 1 :] == list(word[:-1]) for word in params.bad_words
        )
        is_early = token in (params.stop_token_ids or ()) and len(OUTPUT) < params.min_tokens
        if completes or is_early or (params.allowed_token_ids and token not in params.allowed_token_ids):
            row[token] = -math.inf
        row[token] += (params.logit_bias or {}).get(token, 0.0)
    return reference.penalized(row, params, PROMPT, OUTPUT)


def draw(logits: np.ndarray, params: CoreSamplingParams) -> np.ndarray:
    """How often each token was drawn."""
    processors = make_logits_processors()
    processors.add(0, params, PROMPT + OUTPUT, len(PROMPT))
    row = logits[None].copy()
    processors.apply(row, np.array([0]))
    rows = [Row(params, index) for index in range(DRAWS)]
    return np.bincount(sample(np.tile(row, (DRAWS, 1)), rows), minlength=VOCAB)


def p_value(counts: np.ndarray, expected: np.ndarray) -> float:
    """Of Pearson's chi-square; cells of less than 10 expected draws are put together."""
    small = expected < 10
    cells, observed = expected[~small], counts[~small]
    if expected[small].sum() >= 10:
        cells, observed = np.append(cells, expected[small].sum()), np.append(observed, counts[small].sum())
    statistic = float(((observed - cells) ** 2 / cells).sum())
    return _chi_square_tail(statistic, len(cells) - 1)


def _chi_square_tail(statistic: float, freedom: int) -> float:
    """P(X >= statistic): the series of the regularized lower incomplete gamma function."""
    if statistic > freedom + 40 * math.sqrt(2 * freedom):
        return 0.0  # in effect; the series would overflow
    a, x = freedom / 2, statistic / 2
    term = total = 1 / a
    for n in range(1, 10_000):
        term *= x / (a + n)
        total += term
        if term < total * 1e-12:
            break
    return 1 - total * math.exp(a * math.log(x) - x - math.lgamma(a)) if x else 1.0


@pytest.mark.parametrize(("statistic", "freedom", "tail"), [(3.841, 1, 0.05), (16.812, 6, 0.01), (135.807, 100, 0.01)])
def test_the_tail_is_that_of_the_tables(statistic, freedom, tail):
    assert _chi_square_tail(statistic, freedom) == pytest.approx(tail, rel=1e-3)


@pytest.mark.parametrize("name", CASES)
def test_drawn_as_the_reference_says(name):
    params = CoreSamplingParams(max_tokens=100, seed=2024, **CASES[name])
    logits = plain_logits()
    expected = reference.probabilities(expected_logits(logits, params), params) * DRAWS
    counts = draw(logits, params)
    assert counts[expected == 0].sum() == 0
    assert p_value(counts, expected) > 0.01


@pytest.mark.parametrize("name", [name for name in CASES if name != "plain"])
def test_the_test_would_notice_if_nothing_were_done(name):
    params = CoreSamplingParams(max_tokens=100, seed=2024, **CASES[name])
    logits = plain_logits()
    expected = reference.probabilities(expected_logits(logits, params), params) * DRAWS
    counts = draw(logits, CoreSamplingParams(max_tokens=100, seed=2024))
    assert counts[expected == 0].sum() > 0 or p_value(counts, expected) < 1e-6
