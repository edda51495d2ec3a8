"""All experts in one call compute what their layers compute one after the other, and each row by itself."""

import pytest
import torch

from tests.gpu_worker.layers.test_quantized_linear import floats4, integers, needs_kernel, random
from tokenloom.gpu_worker.checkpoint.files.quantized_weight import Float4Weight, QuantizedWeight
from tokenloom.gpu_worker.kernels import library
from tokenloom.gpu_worker.layers import quantized_linear
from tokenloom.gpu_worker.layers.activation import gated
from tokenloom.gpu_worker.layers.linear import make_linear
from tokenloom.gpu_worker.layers.quantized_experts import QuantizedExperts
from tokenloom.gpu_worker.layers.quantized_linear import QuantizedLinear
from tokenloom.gpu_worker.parallel.experts.grouped_rows import GroupedRows, mix_experts

pytestmark = needs_kernel
COUNT, HIDDEN, INNER, PER_TOKEN = 5, 64, 96, 2
Layers = list[tuple[QuantizedLinear, QuantizedLinear]]


def weight(kind: str, outputs: int, inputs: int, seed: int) -> QuantizedWeight | Float4Weight:
    if kind == "floats":
        found = floats4(outputs + seed, inputs)
        return Float4Weight(found.blocks[seed:], found.exponents[seed:].clamp(118, 122))
    scales, offsets = (
        random(outputs, inputs // 32 + seed)[:, seed:] / 64,
        random(outputs, inputs // 32 + seed)[:, seed:],
    )
    bits = 8 if kind == "int8" else 4
    values = integers(-(1 << bits - 1), (1 << bits - 1) - 1, outputs + seed, inputs)[seed:]
    return QuantizedWeight(values, scales.contiguous(), (offsets / 64).contiguous() if kind == "offsets" else None, 32)


def make(kind: str) -> Layers:
    return [
        (
            QuantizedLinear(weight(kind, 2 * INNER, HIDDEN, seed), 3 * random(2 * INNER)),
            QuantizedLinear(weight(kind, HIDDEN, INNER, seed), random(HIDDEN) if kind != "int8" else None),
        )
        for seed in range(COUNT)
    ]


def choices(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The last expert has no row, and the first one most of them."""
    shares = random(rows, COUNT)
    shares[:, 0] += 2
    shares[:, -1] = -9
    weights, chosen = shares.softmax(-1).topk(PER_TOKEN, dim=-1)
    return weights, chosen


def one_by_one(layers: Layers, x: torch.Tensor, activation: str) -> torch.Tensor:
    weights, chosen = choices(len(x))

    def compute(expert: int, rows: torch.Tensor) -> torch.Tensor:
        gate, up = layers[expert][0](rows).chunk(2, dim=-1)
        return layers[expert][1](gated(gate, up, activation))

    return mix_experts(x, GroupedRows.sort(chosen), weights, compute)


@pytest.mark.parametrize("rows", [1, 7, 700])
@pytest.mark.parametrize(
    ("kind", "activation"),
    [("floats", "clamped_swiglu"), ("int4", "silu"), ("offsets", "gelu_pytorch_tanh"), ("int8", "silu")],
)
def test_computes_what_the_layers_do(kind: str, activation: str, rows: int) -> None:
    layers = make(kind)
    experts = QuantizedExperts.of(layers, activation)
    assert experts is not None
    x = random(rows, HIDDEN)
    expected = one_by_one(layers, x, activation)
    assert (experts(x, *choices(rows)) - expected).norm() < 2e-3 * expected.norm()
    rounded = one_by_one(layers, x.bfloat16().float(), activation)
    found = experts(x.bfloat16(), *choices(rows))
    assert found.dtype == torch.bfloat16
    assert (found.float() - rounded).norm() < 1e-2 * rounded.norm()


@pytest.mark.parametrize("threads", [1, 2])
def test_a_row_depends_on_no_other(threads: int) -> None:
    experts = QuantizedExperts.of(make("floats"), "clamped_swiglu")
    assert experts is not None
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    x = random(300, HIDDEN)
    weights, chosen = choices(len(x))
    together = experts(x, weights, chosen)
    alone = [experts(x[i : i + 1], weights[i : i + 1], chosen[i : i + 1]) for i in range(0, 300, 7)]
    torch.set_num_threads(before)
    assert torch.equal(together[::7], torch.cat(alone))


def test_numbers_that_are_not_finite_stay_visible_in_their_row_only() -> None:
    experts = QuantizedExperts.of(make("floats"), "clamped_swiglu")
    assert experts is not None
    x = random(6, HIDDEN)
    before = experts(x, *choices(6))
    x[1, 40], x[4, 3] = float("nan"), float("inf")
    found = experts(x, *choices(6))
    assert not found[[1, 4]].isfinite().any()
    assert torch.equal(found[[0, 2, 3, 5]], before[[0, 2, 3, 5]])


def test_layers_of_several_kinds_are_left_to_their_layers() -> None:
    layers, other = make("floats"), make("int8")
    plain = make_linear(random(2 * INNER, HIDDEN))
    assert QuantizedExperts.of([*layers, other[0]], "silu") is None
    assert QuantizedExperts.of([*layers, (plain, layers[0][1])], "silu") is None
    assert QuantizedExperts.of(layers, "relu") is None


def test_avx2_computes_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    from tokenloom.gpu_worker.layers import quantized_experts

    x, found = random(9, HIDDEN), []
    for march in ("native", "haswell"):
        kernels = library.load_quantized(march)
        for module in (quantized_linear, quantized_experts):
            monkeypatch.setattr(module, "load_quantized", lambda kernels=kernels: kernels)
        experts = QuantizedExperts.of(make("floats"), "clamped_swiglu")
        assert experts is not None
        found.append(experts(x, *choices(len(x))))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-3)
