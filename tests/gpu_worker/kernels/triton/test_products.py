"""Products of few rows, and those of experts, against PyTorch's, in float16 and float32."""

import pytest
import torch
import torch.nn.functional as F

from tests.pairwise import pairs
from tokenloom.gpu_worker.checkpoint.files.quantized_weight import FloatWeight, QuantizedWeight
from tokenloom.gpu_worker.kernels.compiler import KernelsUnavailable
from tokenloom.gpu_worker.layers import triton_linear
from tokenloom.gpu_worker.layers.activation import ACTIVATIONS
from tokenloom.gpu_worker.layers.expert_routes import ExpertRoutes
from tokenloom.gpu_worker.layers.fp8_linear import round_rows, round_weight
from tokenloom.gpu_worker.layers.norm import RowNorm, rms_norm
from tokenloom.gpu_worker.layers.triton_linear import (
    ExpertTiles,
    GroupedLinear,
    TritonExperts,
    TritonLinear,
    choose_experts,
)
from tokenloom.gpu_worker.parallel.sharding import ShardedDimension

TOLERANCE = {torch.float32: {"rtol": 1e-5, "atol": 2e-5}, torch.float16: {"rtol": 5e-3, "atol": 1e-2}}


def random(dtype, *size):
    return torch.randn(*size, generator=torch.Generator().manual_seed(sum(size))).to(dtype)


def places(chosen, experts):
    return ExpertRoutes(experts, chosen.shape[1], 1).layers[0].places(chosen)


@pytest.fixture(autouse=True)
def kernel_for_float32(monkeypatch):
    monkeypatch.setattr(triton_linear, "_DTYPES", tuple(TOLERANCE))


@pytest.mark.parametrize(
    ("dtype", "rows", "inputs", "outputs", "has_bias"),
    pairs(TOLERANCE, [1, 2, 7, 16], [128, 256, 100], [64, 1, 50], [False, True]),
)
def test_few_rows(dtype, rows, inputs, outputs, has_bias):
    x, weight = random(dtype, rows, inputs), random(dtype, outputs, inputs) / 8
    bias = random(dtype, outputs) if has_bias else None
    linear = TritonLinear(weight, bias)
    assert linear.takes(x)
    expected = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    torch.testing.assert_close(linear(x), expected.to(dtype), **TOLERANCE[dtype])
    torch.testing.assert_close(linear(x, torch.float32), expected.float(), **TOLERANCE[dtype])


@pytest.mark.parametrize(("dtype", "activation"), pairs(TOLERANCE, ["silu", "gelu", "gelu_new", "relu"]))
@pytest.mark.parametrize("has_bias", [False, True])
def test_few_rows_with_gates(dtype, activation, has_bias):
    x, weight = random(dtype, 3, 160), random(dtype, 2 * 40, 160) / 8
    bias = random(dtype, 2 * 40) if has_bias else None
    gates, ups = F.linear(x.float(), weight.float(), None if bias is None else bias.float()).to(dtype).chunk(2, dim=1)
    expected = ACTIVATIONS[activation](gates) * ups
    found = TritonLinear(weight, bias).gated(x, activation)
    torch.testing.assert_close(found, expected, **TOLERANCE[dtype])


@pytest.mark.parametrize(
    ("dtype", "inputs", "kind", "shift"), pairs(TOLERANCE, [256, 100], ["none", "silu"], [0.0, 1.0])
)
def test_few_rows_after_a_norm(dtype, inputs, kind, shift):
    x, weight, norm = random(dtype, 3, inputs), random(dtype, 2 * 24, inputs) / 8, random(dtype, inputs)
    expected = F.linear(rms_norm(x.float(), norm.float(), 1e-5, shift), weight.float())
    if kind != "none":
        gates, ups = expected.chunk(2, dim=1)
        expected = F.silu(gates) * ups
    found = triton_linear.multiply_few(x, weight, None, None, kind, norm=RowNorm(norm, 1e-5, shift))
    torch.testing.assert_close(found, expected.to(dtype), **TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_few_rows_are_added_to_a_stream(dtype):
    x, weight, bias, stream = (random(dtype, *size) for size in ((3, 64), (40, 64), (40,), (3, 40)))
    expected = stream + F.linear(x.float(), weight.float(), bias.float()).to(dtype)
    assert triton_linear.multiply_few(x, weight, None, bias, into=stream) is stream
    torch.testing.assert_close(stream, expected, **TOLERANCE[dtype])


def test_a_row_does_not_depend_on_the_others():
    x, linear = random(torch.float16, 16, 128), TritonLinear(random(torch.float16, 32, 128))
    together = linear(x)
    for row in (0, 7):
        assert torch.equal(linear(x[row : row + 1])[0], together[row])


def test_more_rows_are_pytorch_s():
    linear = TritonLinear(random(torch.float16, 32, 64), random(torch.float16, 32))
    x = random(torch.float16, 17, 64)
    assert not linear.takes(x)
    assert linear(x).shape == (17, 32)


def test_logits_are_not_rounded_in_any_batch(monkeypatch):
    """Two tokens whose logits differ by less than 16 bits can say: the larger one wins with few rows and with many."""
    multiply = torch.mm
    monkeypatch.setattr(  # as on a GPU; the host has no such product
        torch, "mm", lambda x, weight, out_dtype: multiply(x.float(), weight.float()).to(out_dtype)
    )
    weight = torch.full((3, 64), 0.25, dtype=torch.float16)
    weight[1, 0] += 2**-11
    linear = TritonLinear(weight, random(torch.float16, 1).expand(3).contiguous())
    assert len((logits := torch.full((64, 64), 1.0, dtype=torch.float16) @ weight.t())[0].unique()) == 1, logits
    for count in (1, 16, 17, 64):
        found = linear(torch.ones(count, 64, dtype=torch.float16), torch.float32)
        assert found.dtype == torch.float32
        assert found.argmax(1).tolist() == [1] * count


@pytest.mark.parametrize(("tokens", "per_token", "experts"), [(1, 1, 1), (1, 3, 8), (40, 2, 5), (9, 4, 64), (70, 2, 3)])
def test_tiles_hold_each_place_once_and_one_expert_each(tokens, per_token, experts):
    generator = torch.Generator().manual_seed(tokens)
    chosen = torch.stack([torch.randperm(experts, generator=generator)[:per_token] for _ in range(tokens)])
    chosen[tokens // 2 :] = chosen[0].clone()  # so that some experts have many rows, and others none
    counts, num_real = torch.zeros(experts, dtype=torch.int64), torch.tensor([tokens], dtype=torch.int32)
    tiles = ExpertTiles.sort(chosen, experts, counts, num_real)
    flat, seen = chosen.flatten(), []
    for places, expert in zip(tiles.places.view(-1, tiles.rows).tolist(), tiles.experts.tolist(), strict=True):
        real = [place for place in places if place < len(flat)] if expert >= 0 else []  # nothing reads the others
        assert all(flat[place] == expert for place in real)
        seen += real
    assert sorted(seen) == list(range(len(flat)))
    assert counts.tolist() == torch.bincount(flat, minlength=experts).tolist()


def test_padding_has_no_expert():
    """Behind the tokens of a step a graph computes padding: no expert reads its weights for it, and it does not
    count."""
    chosen = torch.tensor([[0, 2], [2, 1], [0, 1], [1, 2]])
    counts, num_real = torch.full((3,), 10), torch.tensor([2], dtype=torch.int32)
    tiles = ExpertTiles.sort(chosen, 3, counts, num_real)
    seen = [place for place in tiles.places.tolist()[: 16 * int((tiles.experts >= 0).sum())] if place < 8]
    assert sorted(seen) == [0, 1, 2, 3]
    assert tiles.experts.tolist() == [0, 1, 2, -1, -1, -1][: len(tiles.experts)]
    assert counts.tolist() == [11, 11, 12]


@pytest.mark.parametrize(("tokens", "experts", "per_token"), [(1, 8, 2), (5, 60, 4), (3, 128, 8), (2, 4, 1)])
@pytest.mark.parametrize("normalizes", [False, True])
def test_a_router_s_choice_is_that_of_pytorch(tokens, experts, per_token, normalizes):
    logits = 3 * random(torch.float32, tokens, experts)
    expected, numbers = logits.softmax(-1).topk(per_token, dim=-1)
    weights, chosen = choose_experts(logits, per_token, normalizes=normalizes)
    assert torch.equal(chosen, numbers)
    torch.testing.assert_close(weights, expected / expected.sum(-1, keepdim=True) if normalizes else expected)


def test_rows_that_are_not_finite_choose_experts_all_the_same():
    logits = torch.tensor([[1.0, float("nan"), 0.0], [float("inf"), 0.0, 0.0], [-float("inf")] * 3, [0.0, 0.0, 0.0]])
    weights, chosen = choose_experts(logits, 2, normalizes=True)
    assert ((chosen >= 0) & (chosen < 3)).all()
    assert (chosen[:, 0] != chosen[:, 1]).all()
    assert weights.isnan().all(1).tolist() == [True, True, True, False]
    assert chosen[3].tolist() == [0, 1], "among equals the lower number"


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("tokens", "experts", "hidden", "size"), [(1, 4, 64, 64), (20, 2, 64, 72), (9, 7, 40, 24)])
def test_experts(dtype, tokens, experts, hidden, size):
    x, generator = random(dtype, tokens, hidden), torch.Generator().manual_seed(size)
    gate_up, down = random(dtype, experts, 2 * size, hidden) / 8, random(dtype, experts, hidden, size) / 8
    chosen = torch.randint(experts, (tokens, 2), generator=generator)
    weights = torch.rand(tokens, 2, generator=generator)
    expected = torch.zeros(tokens, hidden)
    for token in range(tokens):
        for place in range(2):
            expert = chosen[token, place]
            gates, ups = (x[token].float() @ gate_up[expert].float().T).to(dtype).chunk(2)
            inner = (F.silu(gates) * ups).float()
            expected[token] += weights[token, place] * (inner @ down[expert].float().T)
    found = TritonExperts(gate_up, down, "silu")(x, weights, chosen, *places(chosen, experts))
    torch.testing.assert_close(found, expected.to(dtype), **TOLERANCE[dtype])


@pytest.mark.parametrize(
    ("dtype", "rows", "inputs", "outputs", "has_bias"), pairs(TOLERANCE, [1, 16], [128, 112], [64, 48], [False, True])
)
def test_few_rows_of_8_bit_floats(dtype, rows, inputs, outputs, has_bias):
    x, weight = random(dtype, rows, inputs), random(dtype, outputs, inputs) / 8
    bias = random(dtype, outputs) if has_bias else None
    values, scales = round_weight(weight)
    expected = F.linear(x.double(), values.double() * scales[:, None], None if bias is None else bias.double())
    found = triton_linear.multiply_few(x, values, scales, bias)
    torch.testing.assert_close(found, expected.to(dtype), **TOLERANCE[dtype])
    gates, ups = expected.to(dtype).chunk(2, dim=1)
    gated = triton_linear.multiply_few(x, values, scales, bias, "silu")
    torch.testing.assert_close(gated, F.silu(gates) * ups, **TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_experts_of_8_bit_floats(dtype):
    """Against the same numbers in the dtype of the activations."""
    x, chosen = random(dtype, 9, 64), torch.tensor([[0, 2], [1, 0], [2, 1]]).repeat(3, 1)
    weights = torch.rand(9, 2, generator=torch.Generator().manual_seed(1))
    gate_up, down = random(dtype, 3, 2 * 48, 64) / 8, random(dtype, 3, 64, 48) / 8
    rounded = [round_rows(matrices) for matrices in (gate_up, down)]
    plain = [(values.float() * scales[..., None]) for values, scales in rounded]
    held = places(chosen, 3)
    expected = TritonExperts(plain[0], plain[1], "silu")(x.float(), weights, chosen, *held)
    eight_bits = TritonExperts(rounded[0][0], rounded[1][0], "silu", rounded[0][1], rounded[1][1])
    found = eight_bits(x, weights, chosen, *held)
    torch.testing.assert_close(found, expected.to(dtype), **TOLERANCE[dtype])
    exact = TritonExperts(gate_up.float(), down.float(), "silu")(x.float(), weights, chosen, *held)
    assert (found.float() - exact).norm() / exact.norm() < 0.05  # what rounding the weights costs


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("size", [16, 3000])
def test_rows_are_rounded_as_without_the_kernel(dtype, size):
    x = random(dtype, 5, size) * torch.tensor([[1e-3], [1.0], [100.0], [0.0], [1.0]]).to(dtype)
    x[4, 3] = float("inf")
    numbers, scales = triton_linear.round_rows_at_once(x)
    expected, expected_scales = round_rows(x)
    torch.testing.assert_close(scales, expected_scales, rtol=1e-6, atol=0, equal_nan=True)
    assert torch.equal(numbers[:4].view(torch.uint8), expected[:4].view(torch.uint8))


@pytest.mark.parametrize(("capability", "most"), [((8, 0), 16), ((9, 0), 0), ((10, 0), 16)])
def test_a_gpu_on_which_cublas_is_faster_leaves_few_rows_to_it(monkeypatch, capability, most):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert triton_linear._most_rows.__wrapped__(torch.device("cuda", 0)) == most


def quantized(outputs, inputs, group, *, has_offsets):
    generator = torch.Generator().manual_seed(outputs + inputs)
    values = torch.randint(-8, 8, (outputs, inputs), generator=generator).to(torch.int8)
    values[0, :16] = torch.arange(-8, 8)
    scales = torch.rand(outputs, inputs // group, generator=generator) / 16
    return QuantizedWeight(values, scales, torch.randn(scales.shape) / 32 if has_offsets else None, group)


@pytest.mark.parametrize(
    ("dtype", "rows", "inputs", "outputs", "group", "has_offsets", "has_bias"),
    pairs(TOLERANCE, [1, 16, 17, 70, 257], [256, 512, 1024], [64, 50, 130], [32, 128, 256], *[[False, True]] * 2),
)
def test_integers_of_4_bits(dtype, rows, inputs, outputs, group, has_offsets, has_bias):
    """Of few rows in one tile, of more in several, and of many after the weight is written out."""
    x, weight = random(dtype, rows, inputs), quantized(outputs, inputs, group, has_offsets=has_offsets)
    bias = random(dtype, outputs) if has_bias else None
    linear = GroupedLinear(weight, bias, torch.device("cpu"))
    expected = F.linear(x.double(), weight.dequantize().double(), None if bias is None else bias.double())
    if rows > 256:  # the weight is rounded to the rows' dtype then
        expected = F.linear(x.double(), weight.dequantize(dtype).double(), None if bias is None else bias.double())
    for _ in range(2):  # the counters of what is split are zeros again
        torch.testing.assert_close(linear(x), expected.to(dtype), **TOLERANCE[dtype])
    assert linear._weight.numel() * 2 == outputs * inputs, "half a byte each"
    assert not linear._arrived.any()


@pytest.mark.parametrize("rows", [1, 17, 257])
@pytest.mark.parametrize(("inputs", "group"), [(256, 128), (320, 96), (384, 384)])
def test_floats_of_8_bits_in_groups(rows, inputs, group):
    """The last group may be shorter."""
    x, values = random(torch.float32, rows, inputs), random(torch.float32, 70, inputs).to(torch.float8_e4m3fn)
    scales = torch.rand(70, -(-inputs // group), generator=torch.Generator().manual_seed(rows)) / 8
    linear = GroupedLinear(FloatWeight(values, scales, group), None, torch.device("cpu"))
    expected = F.linear(x, values.float() * scales[:, torch.arange(inputs) // group])
    torch.testing.assert_close(linear(x), expected, rtol=1e-4, atol=1e-4)
    assert linear._weight.dtype == torch.float8_e4m3fn
    assert linear.state().tensors[0].dtype == torch.uint8
    torch.testing.assert_close(linear.with_state(linear.state())(x), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("has_offsets", [False, True])
def test_a_rank_has_a_part_of_the_inputs(has_offsets):
    """Which begins and ends within a group."""
    weight, x = quantized(50, 512, 128, has_offsets=has_offsets), random(torch.float32, 3, 256)
    part = weight.part(50, ShardedDimension(512, ((96, 352),)))
    assert part.group == 32
    found = GroupedLinear(part, None, torch.device("cpu"))(x)
    torch.testing.assert_close(found, F.linear(x, weight.dequantize()[:, 96:352]), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("splits", [1, 2, 3])
def test_the_parts_of_a_split_are_added_up(monkeypatch, splits):
    monkeypatch.setattr(triton_linear, "_splits", lambda *shape: splits)
    x, weight = random(torch.float32, 20, 1280), quantized(100, 1280, 128, has_offsets=False)
    found = GroupedLinear(weight, None, torch.device("cpu"))(x)
    torch.testing.assert_close(found, F.linear(x, weight.dequantize()), rtol=1e-4, atol=1e-4)


def test_splits_keep_all_multiprocessors_busy():
    """Outputs and inputs of the layers of an 8B, in blocks of 256 inputs."""
    splits = {shape: triton_linear._splits(*shape, 128) for shape in ((4096, 4096), (6144, 4096), (28672, 4096))}
    assert splits == {(4096, 4096): 4, (6144, 4096): 2, (28672, 4096): 1}
    assert triton_linear._splits(64, 256, 128) == 1, "a block is not divided"


@pytest.mark.parametrize(("inputs", "group", "half"), [(256, 128, 128), (384, 128, 64), (96, 32, 16), (64, 32, 32)])
def test_halves_share_a_scale(inputs, group, half):
    linear = GroupedLinear(quantized(3, inputs, group, has_offsets=True), None, torch.device("cpu"))
    assert linear._half == half
    x = random(torch.float32, 2, inputs)
    weight = quantized(3, inputs, group, has_offsets=False)
    torch.testing.assert_close(
        GroupedLinear(weight, None, torch.device("cpu"))(x), F.linear(x, weight.dequantize()), rtol=1e-4, atol=1e-4
    )


def test_groups_that_no_kernel_divides_are_refused():
    with pytest.raises(KernelsUnavailable, match="a weight of 48 inputs in groups of 24"):
        GroupedLinear(quantized(3, 48, 24, has_offsets=False), None, torch.device("cpu"))


def test_new_weights_take_the_place_of_others():
    one, other = (quantized(40, 256, 64, has_offsets=True) for _ in range(2))
    other.values.neg_().clamp_(-8, 7)
    layer = GroupedLinear(one, None, torch.device("cpu"))
    moved = layer.with_state(GroupedLinear(other, None, torch.device("cpu")).state())
    x = random(torch.float32, 3, 256)
    torch.testing.assert_close(moved(x), F.linear(x, other.dequantize()), rtol=1e-4, atol=1e-4)
    wider = GroupedLinear(quantized(40, 256, 128, has_offsets=True), None, torch.device("cpu"))
    with pytest.raises(ValueError, match="do not fit a layer"):
        layer.with_state(wider.state())
