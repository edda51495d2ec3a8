"""The rule as tensor operations draws the tokens that the host's draws; here on tensors of the CPU."""

import numpy as np
import pytest
import torch

from tokenloom.engine_core.wire.core_sampling_params import SamplingParams
from tokenloom.gpu_worker.sampler import NO_TOKEN, Sampler
from tokenloom.gpu_worker.sampler.device_sampler import DeviceSampler

VOCAB = 1009
CASES = {
    "plain": {},
    "hot": {"temperature": 2.0},
    "cold": {"temperature": 0.05},
    "top-k": {"top_k": 20},
    "top-k of one": {"top_k": 1},
    "top-k beyond the vocabulary": {"top_k": 5000},
    "top-p": {"top_p": 0.8},
    "a small top-p": {"top_p": 1e-6},
    "min-p": {"min_p": 0.05},
    "all of them": {"temperature": 0.7, "top_k": 50, "top_p": 0.9, "min_p": 0.01},
}


def draw_both(logits, params):
    """The output index of a row is its number."""
    indices = np.arange(len(logits))
    host = Sampler().sample(logits.copy(), params, indices)
    return host, DeviceSampler().sample(torch.from_numpy(logits), params, indices)


def make_rows(count, **params):
    params = {"temperature": 1.0, **params}
    return [SamplingParams(max_tokens=4, seed=7 * row, **params) for row in range(count)]


@pytest.mark.parametrize("params", CASES.values(), ids=CASES)
def test_the_same_tokens(params):
    logits = np.random.default_rng(3).normal(0.0, 3.0, (200, VOCAB)).astype(np.float32)
    host, device = draw_both(logits, make_rows(len(logits), **params))
    assert device == host


def test_a_batch_of_all_kinds_and_greedy_rows():
    rng = np.random.default_rng(5)
    kinds = [*CASES.values(), {"temperature": 0.0}]
    rows = [make_rows(row + 1, **kinds[row % len(kinds)])[row] for row in range(110)]
    logits = rng.normal(0.0, 2.0, (len(rows), VOCAB)).astype(np.float32)
    host, device = draw_both(logits, rows)
    assert device == host


@pytest.mark.parametrize("params", CASES.values(), ids=CASES)
def test_equal_logits_go_to_the_lower_id(params):
    """Coarse logits: many are equal, also at the edge of the allowed set."""
    logits = np.random.default_rng(9).integers(0, 4, (100, 257)).astype(np.float32)
    host, device = draw_both(logits, make_rows(len(logits), **params))
    assert device == host


def test_a_row_that_is_not_finite_does_not_take_the_batch_down():
    logits = np.random.default_rng(1).normal(size=(4, 64)).astype(np.float32)
    logits[1] = np.nan
    logits[2] = -np.inf
    host, device = draw_both(logits, make_rows(4, top_p=0.9))
    assert device == host
    assert device[1:3] == [NO_TOKEN, NO_TOKEN]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_is_finite_in_part_has_the_host_s_token(temperature):
    logits = np.random.default_rng(2).normal(size=(4, 64)).astype(np.float32)
    logits[1, [9, 40]] = np.nan
    logits[2, [50, 7]] = np.inf
    host, device = draw_both(logits, make_rows(4, temperature=temperature))
    assert device == host
    assert device[1:3] == [9, 7]


def test_masked_tokens_are_never_drawn():
    logits = np.full((300, 64), -np.inf, dtype=np.float32)
    logits[:, [3, 60]] = 0.0
    _, device = draw_both(logits, make_rows(300))
    assert set(device) == {3, 60}
