"""The oracle itself, against one dense softmax."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tokenloom.gpu_worker.attention.attention_backend import ScoreRule
from tokenloom.gpu_worker.attention.reference import ReferenceBackend

CONFIG: Any = SimpleNamespace(num_layers=1, num_kv_heads=2, head_size=8, cache_head_size=16, dtype=torch.float32)
CONFIG.kv_dtype, CONFIG.kv_row_bytes = CONFIG.dtype, 16 * 4


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("num_queries", [1, 4, 10])
def test_equals_dense_attention(num_queries: int, window: int | None) -> None:
    generator = torch.Generator().manual_seed(3)
    query = torch.randn(num_queries, 4, 8, generator=generator)
    key, value = torch.randn(2, 10, 2, 8, generator=generator)
    backend = ReferenceBackend(CONFIG, block_size=4, device=torch.device("cpu"))
    table = np.array([[5, 0, 3]])
    slots = np.array([table[0, p // 4] * 4 + p % 4 for p in range(10)])
    (cache,) = backend.allocate(6)
    backend.plan(np.array([0, 10]), np.array([10]), table, slots).write_kv(key, value, cache)
    plan = backend.plan(np.array([0, num_queries]), np.array([10]), table, slots[-num_queries:])
    found = plan.attend(query, cache, ScoreRule(0.3, window))

    behind = torch.arange(10 - num_queries, 10)[:, None] - torch.arange(10)
    mask = (behind >= 0) & (behind < (window or 10))
    key, value = (x.repeat_interleave(2, dim=1).transpose(0, 1) for x in (key, value))
    expected = F.scaled_dot_product_attention(query.transpose(0, 1), key, value, attn_mask=mask, scale=0.3)
    torch.testing.assert_close(found, expected.transpose(0, 1))


def test_softcap_and_sinks_by_hand() -> None:
    """One query over three positions: two heads, each with its own sink."""
    query = torch.tensor([[[2.0] * 8, [-1.0] * 8]])
    key = torch.linspace(-1, 1, 48).view(3, 2, 8)
    value = torch.linspace(0, 5, 48).view(3, 2, 8)
    backend = ReferenceBackend(CONFIG, block_size=4, device=torch.device("cpu"))
    (cache,) = backend.allocate(1)
    backend.plan(np.array([0, 3]), np.array([3]), np.array([[0]]), np.arange(3)).write_kv(key, value, cache)
    sinks = torch.tensor([0.5, -1.0])
    plan = backend.plan(np.array([0, 1]), np.array([3]), np.array([[0]]), np.array([2]))
    found = plan.attend(query, cache, ScoreRule(0.7, softcap=2.0, sinks=sinks))
    for head in range(2):
        weights = (2.0 * torch.tanh(key[:, head] @ query[0, head] * 0.7 / 2.0)).exp()
        expected = (weights[:, None] * value[:, head]).sum(0) / (weights.sum() + sinks[head].exp())
        torch.testing.assert_close(found[0, head], expected)
