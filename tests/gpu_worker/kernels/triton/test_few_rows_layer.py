"""Layers of few rows in six kernels against PyTorch's operations one by one."""

from collections import Counter

import numpy as np
import pytest
import torch

from tokenloom.gpu_worker.attention import triton_backend
from tokenloom.gpu_worker.attention.torch_backend import ReferenceBackend
from tokenloom.gpu_worker.attention.triton_backend import TritonBackend
from tokenloom.gpu_worker.layers import fp8_linear, linear, triton_linear
from tokenloom.gpu_worker.models.load_model import load_model
from tokenloom.gpu_worker.ops import triton_ops
from tokenloom.gpu_worker.ops.torch_ops import TorchOps
from tokenloom.gpu_worker.ops.triton_ops import FewRowsLayer, TritonOps

CPU = torch.device("cpu")
CHUNKS = ((0, 7), (7, 1), (8, 20), (28, 1))
"""A prompt of few rows, a decode, many rows, and a decode behind them."""


@pytest.fixture
def launched(monkeypatch):
    """The kernels that are launched. Those of a GPU are used for tensors of the CPU."""
    counts, launch = Counter(), triton_linear.launch

    def count(kernel, grid, *arguments, **constants):
        counts[kernel.__name__] += 1
        launch(kernel, grid, *arguments, **constants)

    for module in (triton_linear, triton_ops, triton_backend):
        monkeypatch.setattr(module, "launch", count)
    for module in (linear, fp8_linear):
        monkeypatch.setattr(module, "uses_triton", lambda device: True)
    monkeypatch.setattr(triton_linear, "_DTYPES", (torch.float32, torch.float16))
    multiply = torch.mm  # of which the host has no kind that rounds to another dtype
    monkeypatch.setattr(torch, "mm", lambda x, weight, out_dtype: multiply(x.float(), weight.float()).to(out_dtype))
    monkeypatch.setattr(triton_ops, "_FUSED", (torch.float32, torch.float16))
    return counts


@torch.inference_mode()
def compute(path, ops, make_backend, quantization=None, launched=None):
    """Return the logits of every chunk, and the kernels of each."""
    model = load_model(path, "float32", CPU, ops, quantization)
    backend = make_backend(model.config, 16, CPU)
    caches, found, counts = backend.allocate(8), [], []
    for cache in caches:
        cache.zero_()
    ids = torch.randint(0, 199, (40,), generator=torch.Generator().manual_seed(5))
    for start, count in CHUNKS:
        if launched is not None:
            launched.clear()
        positions = np.arange(start, start + count)
        tables = np.array([[5, 2, 3]])
        slots = tables[0][positions // 16] * 16 + positions % 16
        plan = backend.plan(np.array([0, count]), np.array([start + count]), tables, slots)
        hidden = model.forward(ids[start : start + count], torch.from_numpy(positions), caches, plan)
        found.append(model.compute_logits(hidden).float())
        counts.append(Counter(launched))
    return found, counts


@pytest.mark.parametrize(
    ("model_type", "entries"),
    [
        ("llama", {}),
        ("llama", {"attention_bias": True, "mlp_bias": True, "hidden_size": 128, "intermediate_size": 256}),
        ("qwen3", {"head_dim": 16}),
    ],
)
def test_the_same_logits(model_type, entries, launched, save_checkpoint):
    path = save_checkpoint(model_type, num_hidden_layers=2, **entries)
    found, counts = compute(path, TritonOps(), TritonBackend, launched=launched)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linear, "uses_triton", lambda device: False)
        expected, _ = compute(path, TorchOps(), ReferenceBackend)
    for mine, other in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, other, rtol=2e-4, atol=2e-4)
    for chunk, (_, count) in zip(counts, CHUNKS, strict=True):
        if count <= 16:
            layers = {"few_rows": 4 * 2 + 1, "rotate_and_write": 2, "attend": 2, "add_norm": 1}
            assert chunk == layers, "the last norm and the logits are no part of a layer"
        else:
            assert chunk["add_norm"] == 5
            assert not chunk["few_rows"]


def test_8_bit_floats(launched, save_checkpoint):
    path = save_checkpoint("llama", num_hidden_layers=2)
    found, counts = compute(path, TritonOps(), TritonBackend, "fp8", launched)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_ops, "_FUSED", ())
        expected, apart = compute(path, TritonOps(), TritonBackend, "fp8", launched)
    assert (counts[1]["add_norm"], apart[1]["add_norm"]) == (1, 5)
    for index in (0, 1, 3):
        torch.testing.assert_close(found[index], expected[index], rtol=2e-3, atol=2e-3)


def test_layers_of_other_parts_stay_as_they_are(launched, save_checkpoint):
    for model_type in ("gemma2", "qwen3_moe", "olmo2"):
        model = load_model(save_checkpoint(model_type), "float32", CPU, TritonOps())
        assert not any(isinstance(layer, FewRowsLayer) for layer in model._layers)
