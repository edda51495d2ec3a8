"""The kernel draws the tokens that the host's rule draws."""

import numpy as np
import pytest
import torch

from tokenloom.engine_core.data.core_params import CoreSamplingParams
from tokenloom.gpu_worker.kernels.triton import sample as kernels
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


def draw_both(logits, params, width=128, *, divides=False):
    """The output index of a row is its number."""
    indices = np.arange(len(logits))
    host = Sampler().sample(logits.copy(), params, indices)
    columns = [torch.from_numpy(each) for each in SamplingArrays.of(params, indices)]
    return host, draw(torch.from_numpy(logits), columns, width, divides=divides).tolist()


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
@pytest.mark.parametrize("divides", [False, True])
def test_a_row_that_is_not_finite_has_the_host_s_token(divides, temperature):
    logits = np.random.default_rng(2).normal(size=(6, 200)).astype(np.float32)
    logits[1, [9, 140]] = np.nan
    logits[2, [150, 7]] = np.inf
    logits[3] = np.nan
    logits[4] = -np.inf
    logits[5, :128] = np.nan  # of this part no logit is finite
    host, device = draw_both(logits, make_rows(6, temperature=temperature, top_p=0.9), divides=divides)
    assert [max(token_id, NO_TOKEN) for token_id in device] == host
    assert device[1:] == [9, 7, NO_TOKEN, NO_CHOICE, 0]


def test_masked_tokens_are_never_drawn():
    logits = np.full((12, 300), -np.inf, dtype=np.float32)
    logits[:, [3, 260]] = 0.0
    host, device = draw_both(logits, make_rows(12))
    assert device == host
    assert set(device) == {3, 260}


@pytest.fixture
def passes(monkeypatch):
    """How often rows were read to list candidates, and to divide the interval of a threshold."""
    counts = {"_list": 0, "_measure": 0}

    def counted(name):
        function = getattr(kernels, name)

        def call(*arguments):
            counts[name] += 1
            return function(*arguments)

        return call

    for name in counts:
        monkeypatch.setattr(kernels, name, counted(name))
    return counts


def test_a_peaked_row_is_read_once_for_each_filter(passes):
    logits = np.random.default_rng(4).normal(0.0, 1.0, (2, 500)).astype(np.float32)
    logits[:, 100:110] += 12.0
    host, device = draw_both(logits, make_rows(2, top_k=20, top_p=0.9))
    assert device == host
    assert passes == {"_list": 4, "_measure": 0}


@pytest.mark.parametrize(
    ("params", "scale"),
    [
        ({"top_p": 0.9}, 1.0),
        ({"top_p": 0.9}, 0.0),
        ({"top_p": 0.999, "temperature": 2.0}, 3.0),
        ({"top_p": 0.9, "temperature": 0.01}, 1e-3),
        ({"top_k": 70}, 3.0),
        ({"top_k": 70, "top_p": 0.95, "min_p": 1e-4}, 3.0),
        ({"top_k": 100, "top_p": 0.5}, 0.0),
    ],
)
def test_more_candidates_than_a_program_holds(params, scale, passes):
    """Rows whose logits are many, all equal, or near zero, where floats are dense."""
    logits = (np.random.default_rng(6).normal(0.0, 1.0, (3, 160)) * scale).astype(np.float32)
    logits[1] = logits[1].round(1)
    logits[2, ::3] = -np.inf
    host, device = draw_both(logits, make_rows(3, **params), 32)
    assert device == host
    assert bool(passes["_measure"]) == bool(scale), "where all are equal there is nothing to divide"


def test_logits_of_every_size():
    """Random bits are floats of every exponent; some are masked."""
    random = np.random.default_rng(8)
    logits = random.integers(0, 1 << 32, (12, 120), dtype=np.uint32).view(np.float32)
    logits[~np.isfinite(logits)] = -np.inf
    logits[::2] /= np.float32(1e36)
    temperatures = [1e-310, 1e-20, 1.0, 30.0, 1e20, 1e300]
    kinds = [{"top_k": 9}, {"top_p": 0.7}, {"min_p": 0.3}, {}]
    rows = [make_rows(1, temperature=temperatures[row % 6], **kinds[row % 4])[0] for row in range(12)]
    host, device = draw_both(logits, rows, 64)
    assert device == host
