"""The kernels of layers that keep a state, on the device: against PyTorch's operations on the host, and a prompt that
is cut against the same prompt as a whole, bit for bit."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from tests.gpu_check.rows import Rows
from tests.gpu_check.target import Target
from tokenloom.gpu_worker.attention.states import FROM_ZERO, StatePlan
from tokenloom.gpu_worker.checkpoint.mixer_config import STATE_CHUNK
from tokenloom.gpu_worker.ops.state_ops import Convolution, Mamba2Weights, StateOps
from tokenloom.gpu_worker.ops.triton_ops import TritonOps

LIMITS = {torch.float32: 2e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}
"""The largest ‖found - expected‖ / ‖expected‖."""


class Layer(NamedTuple):
    inputs: list[Tensor]
    """Each with a row for each token."""
    weights: list[Tensor]
    states: Tensor
    """Of five slots."""
    compute: Callable[[StateOps, list[Tensor], list[Tensor], Tensor, StatePlan], Tensor]


def _delta(rows: Tensor, heads: int, size: int, *, by_channel: bool) -> Layer:
    query, key, value = (
        each.unflatten(1, (-1, size)) for each in rows.split([heads * size // 2] * 2 + [heads * size], 1)
    )
    channels = (size,) if by_channel else ()
    decay, beta = -torch.rand(len(rows), heads, *channels) * 0.3, torch.rand(len(rows), heads)

    def compute(ops: StateOps, inputs: list[Tensor], weights: list[Tensor], states: Tensor, plan: StatePlan) -> Tensor:
        query, key, value, decay, beta = inputs
        return ops.gated_delta(query, key, value, (decay, beta), states, plan)

    return Layer([query, key, value, decay, beta], [], torch.randn(5, heads, size, size), compute)


def _mamba2(rows: Tensor, heads: int, size: int) -> Layer:
    x, b, c, _ = rows.split([heads * size, 2 * size, 2 * size, (heads - 4) * size], 1)
    x, b, c = (each.unflatten(1, (-1, size)) for each in (x, b, c))

    def compute(ops: StateOps, inputs: list[Tensor], weights: list[Tensor], states: Tensor, plan: StatePlan) -> Tensor:
        a, d, bias = weights
        return ops.mamba2(*inputs, Mamba2Weights(a, d, bias, (0.001, 3.0)), states, plan)

    dt = torch.randn(len(rows), heads).to(rows.dtype)
    weights = [-torch.rand(heads), torch.randn(heads), torch.randn(heads)]
    return Layer([x, b, c, dt], weights, torch.randn(5, heads, size, size), compute)


def _conv(rows: Tensor) -> Layer:
    channels = rows.shape[1]

    def compute(ops: StateOps, inputs: list[Tensor], weights: list[Tensor], states: Tensor, plan: StatePlan) -> Tensor:
        return ops.short_conv(inputs[0], Convolution(weights[0], weights[1], True), states, plan)

    weights = [torch.randn(4, channels).to(rows.dtype), torch.randn(channels).to(rows.dtype)]
    return Layer([rows], weights, torch.randn(5, 3, channels).to(rows.dtype), compute)


def recurrences(rows: Tensor, heads: int, size: int) -> dict[str, Layer]:
    """Return layers with a recurrence over the tokens of ``rows`` [T, 2 * heads * size]."""
    return {
        "gated delta": _delta(rows, heads, size, by_channel=False),
        "gated delta by channel": _delta(rows, heads, size, by_channel=True),
        "mamba-2": _mamba2(rows, heads, size),
    }


def _check_chunks(
    rows: Rows, target: Target, name: str, layer: Layer, sizes: tuple[int, int], dtype: torch.dtype
) -> list[str]:
    """Compare a prompt in chunks beside a row that decodes with the scan of the host, and with the prompt that is cut
    behind so many chunks, bit for bit. ``sizes``: the tokens of the prompt, and the number of chunks."""
    prompt, num_chunks = sizes
    cut, ops, device = num_chunks * STATE_CHUNK, TritonOps("chunks").states, target.device
    plan = StatePlan.make([1, prompt], [3, FROM_ZERO], [3, 2], [], STATE_CHUNK)
    parts = StatePlan.make([1, cut, prompt - cut], [3, FROM_ZERO, 1], [3, 1, 4], [], STATE_CHUNK)
    expected_states = layer.states.clone()
    expected = layer.compute(StateOps(), layer.inputs, layer.weights, expected_states, plan).double()
    inputs, weights = ([each.to(device) for each in part] for part in (layer.inputs, layer.weights))
    states, cut_states = layer.states.to(device, copy=True), layer.states.to(device, copy=True)
    found = layer.compute(ops, inputs, weights, states, plan.send(device))
    in_parts = layer.compute(ops, inputs, weights, cut_states, parts.send(device))
    different = int((in_parts != found).sum()) + int((cut_states[4] != states[2]).sum())
    errors = [
        float((one.double().cpu() - other.double()).norm() / other.double().norm())
        for one, other in ((found, expected), (states[2:4], expected_states[2:4]))
    ]
    rows.add(name, error=max(errors), different_when_cut=different)
    return [] if max(errors) <= LIMITS[dtype] and not different else [name]  # NaN does not pass


def check_states(rows: Rows, target: Target, dtype: torch.dtype) -> list[str]:
    """Return the names of what is wrong."""
    torch.manual_seed(3)
    heads, size = target.pick((32, 128), (4, 16))
    prompt, cut = target.pick((500, 301), (37, 33))
    # Two chunks at least; a scan of so many tokens takes Triton's interpreter long.
    longer, num_chunks = target.pick((500, 4), (66, 1))
    random = torch.randn(prompt + 1, 2 * heads * size).to(dtype)
    layers = recurrences(random, heads, size) | {"convolution": _conv(random)}
    # A row that decodes in place, and a prompt in two runs that keeps the state between them.
    plan = StatePlan.make([1, cut, prompt - cut], [3, FROM_ZERO, 1], [3, 1, 2], [])
    whole = StatePlan.make([prompt], [FROM_ZERO], [4], [])
    wrong = []
    for name, layer in recurrences(torch.randn(longer + 1, 2 * heads * size).to(dtype), heads, size).items():
        full = f"{name}, {str(dtype).removeprefix('torch.')}, in chunks"
        wrong += _check_chunks(rows, target, full, layer, (longer, num_chunks), dtype)
    for name, layer in layers.items():
        full = f"{name}, {str(dtype).removeprefix('torch.')}"
        expected_states = layer.states.clone()
        expected = layer.compute(StateOps(), layer.inputs, layer.weights, expected_states, plan).double()
        inputs, weights = ([each.to(target.device) for each in part] for part in (layer.inputs, layer.weights))
        ops, states = TritonOps().states, layer.states.to(target.device)
        found = layer.compute(ops, inputs, weights, states, plan.send(target.device))
        after = [each[1:] for each in inputs]
        alone = layer.compute(ops, after, weights, states, whole.send(target.device))
        different = int((alone != found[1:]).sum()) + int((states[4] != states[2]).sum())
        errors = [
            float((one.double().cpu() - other.double()).norm() / other.double().norm())
            for one, other in ((found, expected), (states[:4], expected_states[:4]))
        ]
        rows.add(full, error=max(errors), different_when_cut=different)
        wrong += [] if max(errors) <= LIMITS[dtype] and not different else [full]  # NaN does not pass
    return wrong
