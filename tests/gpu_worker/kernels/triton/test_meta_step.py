"""Whole steps of every family with the kernels of a GPU, on a device that finds tensors of another one."""

from collections import Counter

import numpy as np
import pytest
import torch

from tests.gpu_worker.kernels.triton.meta_launch import META, use_kernels_on_meta
from tests.gpu_worker.models.test_models import MODELS
from tokenloom.gpu_worker.attention import triton_backend
from tokenloom.gpu_worker.attention.attention_backends import make_attention_backend
from tokenloom.gpu_worker.layers import triton_experts, triton_linear
from tokenloom.gpu_worker.models.architectures import load_model
from tokenloom.gpu_worker.ops import triton_ops
from tokenloom.gpu_worker.ops.ops_choice import make_ops
from tokenloom.gpu_worker.ops.triton_ops import TritonOps

STEPS = {
    "one decode": ([1], [40]),
    "many decodes": ([1] * 20, [40] * 20),
    "prompts and decodes": ([1, 20, 1], [40, 60, 32]),
}


@pytest.fixture
def launched(monkeypatch):
    return use_kernels_on_meta(monkeypatch, (triton_backend, triton_experts, triton_linear, triton_ops))


@torch.inference_mode()
def compute(path, query_lens, seq_lens, dtype="bfloat16"):
    model = load_model(path, dtype, META, make_ops("auto", META))
    backend = make_attention_backend("auto", model.config, 16, META)
    assert backend.name == "triton"
    caches = backend.allocate(100)
    width = -(-max(seq_lens) // 16)
    tables = np.arange(len(seq_lens))[:, None] + np.zeros((1, width), dtype=np.int32)
    total = sum(query_lens)
    plan = backend.plan(np.cumsum([0, *query_lens]), np.array(seq_lens), tables, np.zeros(total, dtype=np.int64))
    ids, positions = torch.zeros(2, total, dtype=torch.int64, device=META)
    return model.compute_logits(model.forward(ids, positions, caches, plan))


@pytest.mark.parametrize("name", MODELS)
def test_a_step_stays_on_the_device(name, launched, save_checkpoint):
    model_type, entries = MODELS[name]
    path = save_checkpoint(model_type, **entries)
    for query_lens, seq_lens in STEPS.values():
        logits = compute(path, query_lens, seq_lens)
        assert logits.device == META
        assert logits.dtype == torch.float32
    assert "attend" in launched


@pytest.mark.parametrize("length", [40, 400])
@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
def test_a_layer_is_at_most_nine_kernels(length, model_type, launched, save_checkpoint):
    compute(save_checkpoint(model_type), [1], [length])
    counts = Counter(launched)
    assert counts["attend"] == 3
    assert counts["merge_splits"] == (3 if length > 64 else 0)
    in_layers = len(launched) - 2  # without the last norm and the logits
    assert in_layers <= 9 * 3


def test_the_operations_follow_the_device():
    assert not isinstance(make_ops("auto", META), TritonOps)
    assert not isinstance(make_ops("torch", torch.device("cuda")), TritonOps)
