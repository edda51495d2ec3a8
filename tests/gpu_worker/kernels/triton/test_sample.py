"""The kernel draws the tokens that the host's rule draws."""

import numpy as np
import pytest
import torch

from tokenloom.engine_core.data.core_params import CoreSamplingParams
from tokenloom.gpu_worker.sampler.device.device_sampler import NO_CHOICE
from tokenloom.gpu_worker.sampler.device.sampler_kernels import draw
from tokenloom.gpu_worker.sampler.device.sampling_arrays import SamplingArrays
from tokenloom.gpu_worker.sampler.host.sampler import NO_TOKEN, Sampler

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


def draw_both(logits, params, width=128):
    """The output index of a row is its number."""
    indices = np.arange(len(logits))
    host = Sampler().sample(logits.copy(), params, indices)
    columns = [torch.from_numpy(each) for each in SamplingArrays.of(params, indices)]
    return host, draw(torch.from_numpy(logits), columns, width).tolist()


def make_rows(count, **params):
    params = {"temperature": 1.0, **params}
    return [CoreSamplingParams(max_tokens=4, seed=7 * row, **params) for row in range(count)]


def test_random_rows_of_all_kinds():
    rng = np.random.default_rng(5)
    kinds = [*CASES.values(), {"temperature": 0.0}]
    rows = [make_rows(row + 1, **kinds[row % len(kinds)])[row] for row in range(22)]
    logits = rng.normal(0.0, 2.0, (len(rows), 317)).astype(np.float32)
    host, device = draw_both(logits, rows, 256)
    assert device == host


@pytest.mark.parametrize("params", CASES.values(), ids=CASES)
def test_equal_logits_go_to_the_lower_id(params):
    """Coarse logits: many are equal, also at the edge of the allowed set, in several parts of the row."""
    logits = np.random.default_rng(9).integers(0, 4, (3, 60)).astype(np.float32)
    host, device = draw_both(logits, make_rows(len(logits), **params), 32)
    assert device == host


def test_both_zeros_are_equal():
    logits = np.array([[-0.0, 0.0, -0.0, -1.0]] * 8, dtype=np.float32)
    host, device = draw_both(logits, make_rows(8, top_k=2), 16)
    assert device == host
    assert set(device) <= {0, 1}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_is_not_finite_has_the_host_s_token(temperature):
    logits = np.random.default_rng(2).normal(size=(6, 200)).astype(np.float32)
    logits[1, [9, 140]] = np.nan
    logits[2, [150, 7]] = np.inf
    logits[3] = np.nan
    logits[4] = -np.inf
    host, device = draw_both(logits, make_rows(6, temperature=temperature, top_p=0.9))
    assert [max(token_id, NO_TOKEN) for token_id in device] == host
    assert device[1:5] == [9, 7, NO_TOKEN, NO_CHOICE]


def test_masked_tokens_are_never_drawn():
    logits = np.full((12, 300), -np.inf, dtype=np.float32)
    logits[:, [3, 260]] = 0.0
    host, device = draw_both(logits, make_rows(12))
    assert device == host
    assert set(device) == {3, 260}
