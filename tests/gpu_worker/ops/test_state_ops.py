"""Layers that keep a state: the kernels compute what PyTorch and transformers compute, and the same bits however their
tokens are cut into runs, for every level of processors."""

import functools
import shutil
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from torch import Tensor
from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan
from transformers.models.qwen3_next.modeling_qwen3_next import (
    torch_chunk_gated_delta_rule,
    torch_recurrent_gated_delta_rule,
)

from tests.gpu_worker.kernels.emulation import build_emulated
from tokenloom.gpu_worker.attention.states import FROM_ZERO, StatePlan
from tokenloom.gpu_worker.kernels import library
from tokenloom.gpu_worker.kernels.levels import processor_features
from tokenloom.gpu_worker.ops import state_ops
from tokenloom.gpu_worker.ops.state_ops import Convolution, CPUStateOps, Mamba2Weights, StateOps

pytestmark = pytest.mark.skipif(not shutil.which("g++"), reason="no C++ compiler")

LEVELS = {"x86-64": set(), "x86-64-v3": {"avx2", "fma"}, "x86-64-v4": {"avx512f", "avx512dq"}, "native": set()}
NUM_TOKENS = 130
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 6e-3}
Compute = Callable[[StateOps, slice, StatePlan], Tensor]


@pytest.fixture(scope="module", params=[*LEVELS, "emulated"])
def kernels(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StateOps]:
    if request.param != "emulated":
        if not LEVELS[request.param] <= processor_features():
            pytest.skip("the processor lacks the instructions")
        yield CPUStateOps(request.param)
        return
    if not {"avx2", "fma"} <= processor_features():
        pytest.skip("the emulation needs AVX2")
    path = build_emulated("states", tmp_path_factory.mktemp("kernels"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library, "build", lambda *_: path)
        patch.setattr(state_ops, "load_states", functools.cache(library.load_states.__wrapped__))
        yield CPUStateOps()


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def random(dtype: torch.dtype, *size: int) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(sum(size))).to(dtype)


def plan(lengths: Sequence[int], read: Sequence[int], written: Sequence[int]) -> StatePlan:
    return StatePlan.make(lengths, read, written, [])


class Layer:
    """Holds the inputs of a layer for ``NUM_TOKENS`` tokens, and makes its states."""

    def __init__(self, dtype: torch.dtype, shape: tuple[int, ...], compute: Callable[..., Tensor]) -> None:
        self.dtype, self.shape, self._compute = dtype, shape, compute

    def states(self, num_slots: int = 6) -> Tensor:
        return random(self.dtype, num_slots, *self.shape)

    def run(self, ops: StateOps, tokens: slice, states: Tensor, runs: StatePlan) -> Tensor:
        return self._compute(ops, tokens, states, runs)


def delta(dtype: torch.dtype, *, by_channel: bool, sizes: tuple[int, int, int, int] = (4, 2, 16, 64)) -> Layer:
    heads, key_heads, key_size, value_size = sizes
    widths = [key_heads * key_size, key_heads * key_size, heads * value_size]
    query, key, value = random(dtype, NUM_TOKENS, sum(widths)).split(widths, 1)
    query, key = (each.unflatten(1, (key_heads, key_size)) for each in (query, key))
    value = value.unflatten(1, (heads, value_size))
    of_channels = (key_size,) if by_channel else ()
    decay = -random(torch.float32, NUM_TOKENS, heads, *of_channels).abs() * 0.3
    # Of all tokens at once: PyTorch's sigmoid of a token depends on how many there are.
    beta = random(torch.float32, NUM_TOKENS, heads).sigmoid()

    def compute(ops: StateOps, tokens: slice, states: Tensor, runs: StatePlan) -> Tensor:
        gates = decay[tokens], beta[tokens]
        return ops.gated_delta(query[tokens], key[tokens], value[tokens], gates, states, runs)

    return Layer(torch.float32, (heads, key_size, value_size), compute)


def mamba2(dtype: torch.dtype, sizes: tuple[int, int, int, int] = (4, 2, 32, 48)) -> Layer:
    heads, groups, head_size, state_size = sizes
    widths = [heads * head_size, groups * state_size, groups * state_size]
    x, b, c = random(dtype, NUM_TOKENS, sum(widths)).split(widths, 1)
    x, b, c = x.unflatten(1, (heads, head_size)), b.unflatten(1, (groups, -1)), c.unflatten(1, (groups, -1))
    dt = random(dtype, NUM_TOKENS, heads)
    a, d, bias = random(torch.float32, 3, heads)
    weights = Mamba2Weights(-a.exp(), d, bias, (0.001, 3.0))

    def compute(ops: StateOps, tokens: slice, states: Tensor, runs: StatePlan) -> Tensor:
        return ops.mamba2(x[tokens], b[tokens], c[tokens], dt[tokens], weights, states, runs)

    return Layer(torch.float32, (heads, head_size, state_size), compute)


def conv(dtype: torch.dtype, channels: int = 600, *, has_gates: bool = False) -> Layer:
    gate, x, after = random(dtype, NUM_TOKENS, 3 * channels).chunk(3, 1)
    convolution = Convolution(random(dtype, 4, channels), random(dtype, channels), has_silu=not has_gates)

    def compute(ops: StateOps, tokens: slice, states: Tensor, runs: StatePlan) -> Tensor:
        gates = (gate[tokens], after[tokens]) if has_gates else None
        return ops.short_conv(x[tokens], convolution, states, runs, gates)

    return Layer(dtype, (3, channels), compute)


LAYERS = {
    "delta": functools.partial(delta, by_channel=False),
    "delta by channel": functools.partial(delta, by_channel=True),
    "delta of odd sizes": functools.partial(delta, by_channel=False, sizes=(2, 1, 12, 24)),
    "mamba2": mamba2,
    "mamba2 of odd sizes": functools.partial(mamba2, sizes=(3, 1, 20, 10)),
    "conv": conv,
    "conv of odd sizes": functools.partial(conv, channels=19),
    "gated conv": functools.partial(conv, has_gates=True),
}
layers = pytest.mark.parametrize("kind", LAYERS)
dtypes = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)


def error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


@layers
@dtypes
def test_kernels_compute_what_pytorch_computes(kernels: StateOps, kind: str, dtype: torch.dtype) -> None:
    layer, results = LAYERS[kind](dtype), []
    for ops in (kernels, StateOps()):
        states = layer.states()
        runs = plan([60, 1, 69], [FROM_ZERO, 3, 4], [1, 2, 4])
        results.append((layer.run(ops, slice(None), states, runs), states))
    (out, states), (expected, expected_states) = results
    assert error(out, expected) < TOLERANCE[dtype]
    assert error(states, expected_states) < 2e-6
    untouched = [0, 3, 5]
    assert torch.equal(states[untouched], layer.states()[untouched])


@layers
@dtypes
def test_bits_do_not_depend_on_cuts(kernels: StateOps, kind: str, dtype: torch.dtype) -> None:
    """Nor on threads, nor on the requests beside, nor on whether a state changes in place."""
    layer = LAYERS[kind](dtype)
    whole = layer.states()
    expected = layer.run(kernels, slice(None), whole, plan([NUM_TOKENS], [FROM_ZERO], [1]))

    snapshots = layer.states()
    found = layer.run(kernels, slice(None), snapshots, plan([37, 63, 30], [FROM_ZERO, 2, 3], [2, 3, 4]))
    assert torch.equal(found, expected)
    assert torch.equal(snapshots[4], whole[1])
    continued = layer.run(kernels, slice(100, None), snapshots, plan([30], [3], [0]))
    assert torch.equal(continued, expected[100:])
    assert torch.equal(snapshots[0], whole[1])

    torch.set_num_threads(1)
    states, parts = layer.states(), []
    for t in range(NUM_TOKENS):
        parts.append(layer.run(kernels, slice(t, t + 1), states, plan([1], [5 if t else FROM_ZERO], [5])))
    assert torch.equal(torch.cat(parts), expected)
    assert torch.equal(states[5], whole[1])


@layers
def test_rows_decode_side_by_side(kernels: StateOps, kind: str) -> None:
    layer, states, alone = LAYERS[kind](torch.bfloat16), None, []
    for slot in range(4):
        states = layer.states()
        alone.append(layer.run(kernels, slice(slot, slot + 1), states, plan([1], [slot], [slot])))
    states = layer.states()
    together = layer.run(kernels, slice(4), states, plan([1] * 4, range(4), range(4)))
    assert torch.equal(together, torch.cat(alone))


def test_gated_delta_is_that_of_transformers(kernels: StateOps) -> None:
    query, key = random(torch.float32, 2, 100, 2, 128)
    value = random(torch.float32, 100, 4, 128)
    decay, beta = -random(torch.float32, 100, 4).abs() * 0.3, random(torch.float32, 100, 4).sigmoid()
    states = torch.zeros(2, 4, 128, 128)
    found = kernels.gated_delta(query, key, value, (decay, beta), states, plan([100], [FROM_ZERO], [1]))
    for rule in (torch_chunk_gated_delta_rule, torch_recurrent_gated_delta_rule):
        inputs = (each[None] for each in (query, key, value))
        expected, state = rule(
            *inputs, g=decay[None], beta=beta[None], output_final_state=True, use_qk_l2norm_in_kernel=True
        )
        assert error(found, expected[0]) < 2e-6
        assert error(states[1], state[0]) < 2e-6


def test_mamba2_is_that_of_transformers(kernels: StateOps) -> None:
    x, (b, c), dt = (
        random(torch.float32, 128, 4, 64),
        random(torch.float32, 2, 128, 2, 128),
        random(torch.float32, 128, 4),
    )
    a, d, bias = random(torch.float32, 3, 4)
    weights, states = Mamba2Weights(-a.exp(), d, bias), torch.zeros(2, 4, 64, 128)
    found = kernels.mamba2(x, b, c, dt, weights, states, plan([128], [FROM_ZERO], [1]))
    inputs = (x[None], dt[None], weights.a, b[None], c[None])
    expected, state = mamba2_chunk_scan(
        *inputs, chunk_size=64, D=d, z=None, return_final_states=True, dt_bias=bias, dt_softplus=True
    )
    assert error(found.flatten(), expected.flatten()) < 2e-6
    assert error(states[1], state[0]) < 2e-6


@dtypes
def test_gates_of_the_delta_rule(kernels: StateOps, dtype: torch.dtype) -> None:
    a, b = random(dtype, 9, 14).chunk(2, 1)
    a[0, 0] = 50.0  # beyond which softplus is its argument
    rates, bias = -random(torch.float32, 7).exp(), random(torch.float32, 7)
    for found, expected in zip(
        kernels.delta_gates(a, b, rates, bias), StateOps().delta_gates(a, b, rates, bias), strict=True
    ):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)


@dtypes
@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("size", [128, 20])
def test_gated_norm(dtype: torch.dtype, norm_first: bool, size: int) -> None:
    ops, x = CPUStateOps(), random(dtype, 300, 4, size)
    gate = random(dtype, 300, 5 * size)[:, size:].unflatten(1, (4, size))
    for weight in (random(dtype, size), random(dtype, 4, size)):
        expected = StateOps().gated_norm(x, gate, weight, 1e-6, norm_first=norm_first)
        found = ops.gated_norm(x, gate, weight, 1e-6, norm_first=norm_first)
        assert error(found, expected) < TOLERANCE[dtype]
        alone = ops.gated_norm(x[7:8], gate[7:8], weight, 1e-6, norm_first=norm_first)
        assert torch.equal(alone, found[7:8])
