"""Fused operations compute what PyTorch's do."""

import shutil
from types import SimpleNamespace

import pytest
import torch
from transformers.models.gpt_oss.configuration_gpt_oss import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from tokenloom.gpu_worker.attention.attention_backend import TOKENWISE
from tokenloom.gpu_worker.attention.cache import write_slots
from tokenloom.gpu_worker.kernels.compiler import KernelsUnavailable
from tokenloom.gpu_worker.ops import cpu_ops
from tokenloom.gpu_worker.ops.cpu_ops import CPUOps, TokenwiseOps, make_ops
from tokenloom.gpu_worker.ops.ops import HeadNorm
from tokenloom.gpu_worker.ops.torch_ops import TorchOps

pytestmark = pytest.mark.skipif(not shutil.which("g++"), reason="no C++ compiler")

CPU = torch.device("cpu")
BLOCK_SIZE = 16
TOLERANCE = {torch.float32: {"rtol": 1e-5, "atol": 1e-5}, torch.bfloat16: {"rtol": 2e-2, "atol": 5e-2}}
dtypes = pytest.mark.parametrize("dtype", TOLERANCE)
builds = pytest.mark.parametrize("march", ["native", "x86-64"])
rows = pytest.mark.parametrize("num_rows", [1, 5, 300])


@pytest.fixture(autouse=True)
def threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def random(dtype, *size):
    return torch.randn(*size, generator=torch.Generator().manual_seed(sum(size))).to(dtype)


@dtypes
@builds
@rows
@pytest.mark.parametrize("size", [256, 100, 7])
@pytest.mark.parametrize(("with_delta", "shift"), [(False, 0.0), (True, 0.0), (True, 1.0)])
def test_add_norm(dtype, march, num_rows, size, with_delta, shift):
    residual, weight = random(dtype, num_rows, size), random(dtype, size)
    delta = random(dtype, num_rows + 1, size)[1:] if with_delta else None
    results = []
    for ops in (TorchOps(), CPUOps(march)):
        stream = residual.clone()
        results.append((ops.add_norm(stream, delta, weight, 1e-5, shift), stream))
    (expected, expected_stream), (found, stream) = results
    assert torch.equal(stream, expected_stream)
    torch.testing.assert_close(found, expected, **TOLERANCE[dtype])


@dtypes
@builds
@rows
@pytest.mark.parametrize("size", [256, 100, 7])
@pytest.mark.parametrize("activation", ["silu", "swish", "gelu", "gelu_pytorch_tanh", "clamped_swiglu"])
def test_gate(dtype, march, num_rows, size, activation):
    gate_up = 4 * random(dtype, num_rows, 2 * size)
    found = CPUOps(march).gate(gate_up, activation)
    torch.testing.assert_close(found, TorchOps().gate(gate_up, activation), **TOLERANCE[dtype])


def test_the_clamped_gate_is_that_of_transformers():
    """``models/gpt_oss/modeling_gpt_oss.py``, whose gates and ups take turns."""
    experts = GptOssExperts(GptOssConfig(hidden_size=8, intermediate_size=8, num_local_experts=1))
    gate_up = 6 * random(torch.float32, 9, 64)
    gate_up[0, 3], gate_up[1, 40], gate_up[2, 5] = 1e30, -1e30, float("nan")
    expected = experts._apply_gate(gate_up.view(9, 2, 32).transpose(1, 2).flatten(1))
    for ops in (CPUOps(), TorchOps()):
        found = ops.gate(gate_up, "clamped_swiglu")
        torch.testing.assert_close(found, expected, equal_nan=True, **TOLERANCE[torch.float32])


def test_gates_of_any_size():
    gate_up = torch.tensor([[-1e30, -100.0, 0.0, 100.0, 1e30, 1.0, 1.0, 1.0, 1.0, 1.0]])
    expected = torch.tensor([[0.0, 0.0, 0.0, 100.0, 1e30]])
    for activation in ("silu", "gelu_pytorch_tanh"):
        torch.testing.assert_close(CPUOps().gate(gate_up, activation), expected, rtol=1e-6, atol=1e-6)


@dtypes
@builds
@rows
@pytest.mark.parametrize(("head_size", "rotated"), [(64, 64), (24, 24), (6, 6), (64, 16), (26, 6)])
@pytest.mark.parametrize("shift", [None, 0.0, 1.0])
def test_rotate_and_write(dtype, march, num_rows, head_size, rotated, shift):
    heads = random(dtype, num_rows, 4 + 2 * 2, head_size)
    angles = random(torch.float32, num_rows, 1, rotated // 2)
    norm = None if shift is None else HeadNorm(random(dtype, 6, head_size), 1e-6, shift)
    num_blocks = -(-num_rows // BLOCK_SIZE) + 2
    slots = torch.randperm(num_blocks * BLOCK_SIZE, generator=torch.Generator().manual_seed(1))[:num_rows]
    results = []
    for ops in (TorchOps(), CPUOps(march)):
        cache = torch.zeros(2, num_blocks, 2, BLOCK_SIZE, -(-head_size // 16) * 16, dtype=dtype)

        def write_kv(key, value, kv_cache):
            write_slots(key, value, kv_cache, slots // BLOCK_SIZE, slots % BLOCK_SIZE)

        plan = SimpleNamespace(slots_of=lambda kv_cache: slots, write_kv=write_kv)
        query = ops.rotate_and_write(heads.clone(), norm, (angles.cos(), angles.sin()), cache, plan)
        results.append((query, cache))
    (expected, expected_cache), (found, cache) = results
    torch.testing.assert_close(found, expected, **TOLERANCE[dtype])
    torch.testing.assert_close(cache[0], expected_cache[0], **TOLERANCE[dtype])
    assert torch.equal(cache[1], expected_cache[1])


@pytest.mark.parametrize(("backend", "kind"), [("auto", CPUOps), ("cpu", CPUOps), ("torch", TorchOps)])
def test_which_go_with_a_backend(backend, kind):
    assert isinstance(make_ops(backend, CPU), kind)
    assert isinstance(make_ops(backend, torch.device("meta")), TorchOps)


def test_torch_takes_the_place_of_missing_kernels(monkeypatch):
    def fail():
        raise KernelsUnavailable("there is no C++ compiler (g++)")

    monkeypatch.setattr(cpu_ops, "CPUOps", fail)
    assert isinstance(make_ops("auto", CPU), TorchOps)


def changed_rows(function, x):
    """Count the rows that have other bits in one of several parts of ``x`` than in the whole."""
    whole = function(x.clone())
    parts = [(first, rows) for rows in (1, 2, 33, 200) for first in (0, 1, 90)]
    return sum(not torch.equal(function(x[i : i + n].clone()), whole[i : i + n]) for i, n in parts)


@pytest.mark.parametrize("function", [torch.sigmoid, torch.tanh_, torch.log1p])
@pytest.mark.parametrize("size", [(), (1,), (8,), (60,), (20_000,)])
def test_rows_of_elements_have_the_same_bits_among_others(function, size):
    x = random(torch.float32, 300 if size != (20_000,) else 8, *size).abs()
    computed = TokenwiseOps().rowwise(function)
    assert changed_rows(computed, x) == 0
    torch.testing.assert_close(computed(x.clone()), function(x.clone()))
    assert computed(x[:0]).shape == (0, *size)


def test_pytorch_s_rows_of_elements_have_not():
    assert TorchOps().rowwise(torch.sigmoid) is torch.sigmoid
    assert changed_rows(torch.sigmoid, random(torch.float32, 300, 1)) > 0


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_pytorch_tanh", "relu", "clamped_swiglu"])
@pytest.mark.parametrize("size", [40, 1000])
def test_gates_have_the_same_bits_among_others(activation, size):
    ops, gate_up = TokenwiseOps(), random(torch.float32, 300, 2 * size)
    assert changed_rows(lambda rows: ops.gate(rows, activation), gate_up) == 0
    torch.testing.assert_close(
        ops.gate(gate_up, activation), TorchOps().gate(gate_up, activation), **TOLERANCE[gate_up.dtype]
    )


@pytest.mark.parametrize("half", [8, 20, 64])
def test_rotations_have_the_same_bits_among_others(half):
    ops, frequencies = TokenwiseOps(), 1 / 10000 ** (torch.arange(half) / half)
    assert changed_rows(lambda rows: torch.cat(ops.rotation(rows, frequencies, 1.0), 1), torch.arange(300) * 37) == 0


@dtypes
def test_products_of_each_head(dtype):
    matrices, rows = random(dtype, 3, 40, 24), random(dtype, 300, 3, 40)
    multiply = TokenwiseOps().per_head(matrices)
    assert changed_rows(multiply, rows) == 0
    torch.testing.assert_close(multiply(rows), TorchOps().per_head(matrices)(rows), **TOLERANCE[dtype])


def test_batch_invariant_engines_need_the_kernels(monkeypatch):
    assert isinstance(make_ops(TOKENWISE, CPU), TokenwiseOps)

    def fail():
        raise KernelsUnavailable("no compiler")

    monkeypatch.setattr(cpu_ops, "TokenwiseOps", fail)
    with pytest.raises(ValueError, match="batch_invariant: needs the C\\+\\+ kernels: no compiler"):
        make_ops(TOKENWISE, CPU)
