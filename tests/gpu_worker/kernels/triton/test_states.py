"""The kernels of layers that keep a state against PyTorch's operations, in float32 and float16: the same values, and
the same bits however tokens are cut into runs."""

import functools

import pytest
import torch

from tests.gpu_worker.ops import test_state_ops as layers_of
from tests.gpu_worker.ops.test_state_ops import conv, delta, error, mamba2, random
from tokenloom.gpu_worker.attention.states import FROM_ZERO, StatePlan
from tokenloom.gpu_worker.ops import triton_ops
from tokenloom.gpu_worker.ops.state_ops import StateOps
from tokenloom.gpu_worker.ops.triton_ops import TritonOps

TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3}
NUM_TOKENS = 10
LAYERS = {
    "delta": functools.partial(delta, by_channel=False, sizes=(2, 1, 16, 16)),
    "delta by channel": functools.partial(delta, by_channel=True, sizes=(2, 1, 16, 16)),
    "delta of odd sizes": functools.partial(delta, by_channel=False, sizes=(2, 1, 12, 9)),
    "mamba2": functools.partial(mamba2, sizes=(2, 2, 16, 16)),
    "mamba2 of odd sizes": functools.partial(mamba2, sizes=(3, 1, 9, 10)),
    "conv": functools.partial(conv, channels=300),
    "gated conv": functools.partial(conv, channels=19, has_gates=True),
}
dtypes = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
kinds = pytest.mark.parametrize("kind", LAYERS)


@pytest.fixture(autouse=True)
def few_tokens(monkeypatch):
    monkeypatch.setattr(layers_of, "NUM_TOKENS", NUM_TOKENS)
    monkeypatch.setattr(triton_ops, "_CONV_TOKENS", 4)  # several programs of a convolution compute a prompt


@pytest.fixture
def kernels():
    return TritonOps().states


def plan(lengths, read, written):
    return StatePlan.make(lengths, read, written, []).send(torch.device("cpu"))


@kinds
@dtypes
def test_kernels_compute_what_pytorch_computes(kernels, kind, dtype):
    layer, results = LAYERS[kind](dtype), []
    for ops in (kernels, StateOps()):
        states = layer.states()
        # The runs of three requests: two that are alone, and one that keeps a state on its way, in the slot it read.
        runs = plan([2, 1, 4, 3], [FROM_ZERO, 3, 4, 4], [1, 2, 4, 0])
        results.append((layer.run(ops, slice(None), states, runs), states))
    (out, states), (expected, expected_states) = results
    assert error(out, expected) < TOLERANCE[dtype]
    assert error(states, expected_states) < 2e-6
    assert torch.equal(states[[3, 5]], layer.states()[[3, 5]])


@kinds
@dtypes
def test_bits_do_not_depend_on_cuts(kernels, kind, dtype):
    """Nor on the requests beside, nor on whether a state changes in place."""
    layer = LAYERS[kind](dtype)
    whole = layer.states()
    expected = layer.run(kernels, slice(None), whole, plan([NUM_TOKENS], [FROM_ZERO], [1]))

    kept = layer.states()
    found = layer.run(kernels, slice(None), kept, plan([1, 2, 3, 4], [FROM_ZERO, 2, 2, 3], [2, 2, 3, 4]))
    assert torch.equal(found, expected)
    assert torch.equal(kept[4], whole[1])
    continued = layer.run(kernels, slice(6, None), kept, plan([4], [3], [3]))
    assert torch.equal(continued, expected[6:])
    assert torch.equal(kept[3], whole[1])

    states, parts = layer.states(), []
    for t in range(NUM_TOKENS):
        parts.append(layer.run(kernels, slice(t, t + 1), states, plan([1], [5 if t else FROM_ZERO], [5])))
    assert torch.equal(torch.cat(parts), expected)
    assert torch.equal(states[5], whole[1])


@kinds
def test_rows_decode_side_by_side(kernels, kind):
    layer, alone = LAYERS[kind](torch.float16), []
    for slot in range(4):
        states = layer.states()
        alone.append(layer.run(kernels, slice(slot, slot + 1), states, plan([1], [slot], [slot])))
    states = layer.states()
    together = layer.run(kernels, slice(4), states, plan([1] * 4, range(4), range(4)))
    assert torch.equal(together, torch.cat(alone))


def test_a_plan_knows_which_runs_follow_each_other():
    sent = plan([3, 1, 20, 12, 5, 2], [FROM_ZERO, 3, 4, 4, FROM_ZERO, 0], [1, 2, 4, 0, 3, 5]).sent
    assert sent.chains.tolist() == [[0, 1], [1, 2], [2, 4], [4, 5], [5, 6]]
    assert sent.scanned is sent.chains
    assert sent.most_tokens == 32
    assert sent.chunks is None


@dtypes
def test_gates_of_the_delta_rule(kernels, dtype):
    a, b = random(dtype, 9, 14).chunk(2, 1)
    a[0], a[1] = 50.0, -12.0  # beyond which softplus is its argument, and where it is small
    rates, bias = -random(torch.float32, 7).exp(), random(torch.float32, 7)
    for found, expected in zip(
        kernels.delta_gates(a, b, rates, bias), StateOps().delta_gates(a, b, rates, bias), strict=True
    ):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)


@dtypes
@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("size", [128, 20])
def test_gated_norm(kernels, dtype, norm_first, size):
    x, gate = random(dtype, 5, 4, size), random(dtype, 5, 5 * size)[:, size:].unflatten(1, (4, size))
    for weight in (random(dtype, size), random(dtype, 4, size)):
        expected = StateOps().gated_norm(x, gate, weight, 1e-6, norm_first=norm_first)
        found = kernels.gated_norm(x, gate, weight, 1e-6, norm_first=norm_first)
        assert error(found, expected) < TOLERANCE[dtype]
