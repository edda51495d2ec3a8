"""Log probabilities against torch's, ranks and order against a full sort."""

import math

import numpy as np
import pytest
import torch

from tokenloom.engine_core.data.core_params import CoreSamplingParams
from tokenloom.gpu_worker.sampler.host.logprobs import LogprobRows, logprobs_of


def coarse_logits(rows, vocab):
    """With many equals, as in bf16."""
    generator = np.random.default_rng(vocab)
    return (generator.integers(-40, 40, (rows, vocab)) / 4).astype(np.float32)


@pytest.mark.parametrize("vocab", [5, 100, 20_011])
@pytest.mark.parametrize("num_top", [0, 1, 20, 10**6])
def test_values_ranks_and_order(vocab, num_top):
    logits, token_ids = coarse_logits(4, vocab), [0, 3, 4, vocab - 1]
    expected = torch.from_numpy(logits).double().log_softmax(-1).numpy()
    told = logprobs_of(logits, token_ids, num_top, also=(3, 1))
    k = min(num_top, vocab)
    assert told.top == k + 2
    np.testing.assert_allclose(told.sampled, expected[range(4), token_ids], atol=1e-5)
    for row, token_id in enumerate(token_ids):
        order = np.argsort(-logits[row], kind="stable")
        assert told.rank[row] == 1 + order.tolist().index(token_id)
        ids = told.token_ids[row * told.top : (row + 1) * told.top]
        assert ids == [*order[:k].tolist(), 3, 1]
        np.testing.assert_allclose(told.logprobs[row * told.top : (row + 1) * told.top], expected[row, ids], atol=1e-5)


@pytest.mark.parametrize("vocab", [257, 1021, 40_009])  # several rows a chunk, and one
def test_a_row_is_the_same_alone_and_in_any_chunk(vocab):
    logits = np.random.default_rng(vocab).standard_normal((150, vocab), dtype=np.float32)
    logits[3, 5] = np.inf
    token_ids = [(7 * row) % vocab for row in range(len(logits))]
    alone = [logprobs_of(row[None], [token_id], 5) for row, token_id in zip(logits, token_ids, strict=True)]
    together = list(logprobs_of(logits, token_ids, 5).positions())
    assert repr(together) == repr(alone)  # NaN is not equal to itself


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_row_that_is_not_finite_tells_nothing_and_harms_no_other(bad):
    logits = np.zeros((2, 8), dtype=np.float32)
    logits[0, 5] = bad
    told = logprobs_of(logits, [5, 5], 2)
    assert math.isnan(told.sampled[0])
    assert told.sampled[1] == pytest.approx(-math.log(8))
    assert told.token_ids == [0, 1, 0, 1]


def test_what_the_model_rules_out_has_no_probability():
    logits = np.array([[0.0, -np.inf, 0.0]], dtype=np.float32)
    told = logprobs_of(logits, [1], 3)
    assert told.sampled == [-np.inf]
    assert told.token_ids == [0, 2, 1]


def params(**values):
    return CoreSamplingParams(max_tokens=1, seed=1, **values)


def test_only_rows_that_ask_are_kept_as_the_model_gave_them():
    rows = LogprobRows()
    rows[6] = params(logprobs=1)
    rows[4] = params(logprobs=0, logprob_token_ids=(3,))
    logits = coarse_logits(3, 10)
    raw = logits.copy()
    kept = rows.keep(logits, np.array([4, 2, 6]))
    logits[:] = 0
    told = kept.logprobs_of([7, 8, 9])
    assert told == {0: logprobs_of(raw[:1], [7], 0, (3,)), 2: logprobs_of(raw[2:], [9], 1)}


def test_nobody_asks():
    rows = LogprobRows()
    rows[1] = params(logprobs=5)
    del rows[1]
    assert rows.keep(coarse_logits(1, 10), np.array([1])) is None
