"""The torch backend against the reference, over random block tables."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tokenloom.gpu_worker.attention import torch_backend
from tokenloom.gpu_worker.attention.interface import AttentionBackend
from tokenloom.gpu_worker.attention.reference import ReferenceBackend
from tokenloom.gpu_worker.attention.torch_backend import TorchBackend
from torch import Tensor

BLOCK_SIZE = 16
HEAD_SIZE = 32
CPU = torch.device("cpu")


@dataclass
class Step:
    """A batch over a cache that holds random earlier keys and values."""

    arrays: dict[str, Any]
    query: Tensor
    key: Tensor
    value: Tensor
    cache: Tensor


def shape(num_kv_heads: int, dtype: torch.dtype = torch.float32) -> Any:
    return SimpleNamespace(
        num_layers=1,
        num_kv_heads=num_kv_heads,
        head_size=HEAD_SIZE,
        dtype=dtype,
        kv_bytes_per_token=2 * num_kv_heads * HEAD_SIZE * dtype.itemsize,
    )


def make_step(query_lens: list[int], seq_lens: list[int], num_heads: int, config: Any) -> Step:
    rng = np.random.default_rng(sum(query_lens) + sum(seq_lens))
    generator = torch.Generator().manual_seed(sum(seq_lens))
    width = max(-(-length // BLOCK_SIZE) for length in seq_lens)
    num_blocks = len(seq_lens) * width
    tables = rng.permutation(num_blocks).reshape(len(seq_lens), width).astype(np.int32)
    positions = [np.arange(end - count, end) for count, end in zip(query_lens, seq_lens, strict=True)]
    slots = [table[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for table, p in zip(tables, positions, strict=True)]
    arrays = {
        "cu_query_lens": np.cumsum([0, *query_lens]).astype(np.int32),
        "seq_lens": np.array(seq_lens, dtype=np.int32),
        "block_tables": tables,
        "slot_mapping": np.concatenate(slots),
    }

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator).to(config.dtype)

    total = sum(query_lens)
    return Step(
        arrays,
        query=normal(total, num_heads, HEAD_SIZE),
        key=normal(total, config.num_kv_heads, HEAD_SIZE),
        value=normal(total, config.num_kv_heads, HEAD_SIZE),
        cache=normal(2, num_blocks, config.num_kv_heads, BLOCK_SIZE, HEAD_SIZE),
    )


def run(backend: AttentionBackend, step: Step, window: int | None) -> tuple[Tensor, Tensor]:
    cache = step.cache.clone()
    plan = backend.plan(**step.arrays)
    plan.write_kv(step.key, step.value, cache)
    return plan.attend(step.query, cache, HEAD_SIZE**-0.5, window), cache


BATCHES = {
    "one decode": ([1], [37]),
    "first token": ([1], [1]),
    "decodes of many lengths": ([1] * 9, [1, 16, 17, 32, 33, 100, 101, 250, 500]),
    "decodes of one length": ([1] * 4, [48] * 4),
    "one prefill": ([77], [77]),
    "prefills": ([5, 16, 64, 33], [5, 16, 64, 33]),
    "chunks of longer prompts": ([10, 16, 1, 50], [200, 32, 90, 51]),
    "decodes between prefills": ([1, 20, 1, 7, 1], [64, 20, 5, 130, 17]),
}


@pytest.mark.parametrize("window", [None, 1, 7, 16, 40, 1000])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize("batch", BATCHES)
def test_equals_the_reference(batch: str, num_heads: int, num_kv_heads: int, window: int | None) -> None:
    config = shape(num_kv_heads)
    step = make_step(*BATCHES[batch], num_heads, config)
    expected, expected_cache = run(ReferenceBackend(config, BLOCK_SIZE, CPU), step, window)
    found, cache = run(TorchBackend(config, BLOCK_SIZE, CPU), step, window)
    assert torch.equal(cache, expected_cache)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("window", [None, 30])
def test_a_long_prefill_is_cut(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_backend, "_QUERY_ROWS", 24)
    config = shape(2)
    step = make_step([100, 1, 61], [100, 40, 90], 4, config)
    expected, _ = run(ReferenceBackend(config, BLOCK_SIZE, CPU), step, window)
    found, _ = run(TorchBackend(config, BLOCK_SIZE, CPU), step, window)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("limit", [0, 20_000, 1 << 30])
def test_how_decodes_are_grouped_changes_nothing(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_backend, "_GATHER_BYTES", limit)
    config = shape(2)
    step = make_step(*BATCHES["decodes of many lengths"], 4, config)
    expected, _ = run(ReferenceBackend(config, BLOCK_SIZE, CPU), step, None)
    found, _ = run(TorchBackend(config, BLOCK_SIZE, CPU), step, None)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=2e-6)


def test_bfloat16_is_close() -> None:
    config = shape(2, torch.bfloat16)
    step = make_step(*BATCHES["decodes between prefills"], 4, config)
    expected, _ = run(ReferenceBackend(config, BLOCK_SIZE, CPU), step, None)
    found, _ = run(TorchBackend(config, BLOCK_SIZE, CPU), step, None)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)


def test_another_request_s_infinities_stay_its_own() -> None:
    """Requests of a group are padded to the longest: what stands in the others' blocks must not be read."""
    config = shape(2)
    step = make_step([1, 1, 1], [5, 100, 20], 4, config)
    step.cache[:, step.arrays["block_tables"][1]] = float("nan")
    step.cache[:, step.arrays["block_tables"][0][1:]] = float("nan")
    found, _ = run(TorchBackend(config, BLOCK_SIZE, CPU), step, None)
    assert found[[0, 2]].isfinite().all()
    assert found[1].isnan().all()


def test_a_plan_keeps_no_reference_to_its_arrays() -> None:
    config = shape(2)
    step = make_step(*BATCHES["decodes between prefills"], 4, config)
    backend = TorchBackend(config, BLOCK_SIZE, CPU)
    expected, _ = run(backend, step, None)
    arrays = {name: values.copy() for name, values in step.arrays.items()}
    plan = backend.plan(**arrays)
    for values in arrays.values():
        values[:] = 0
    cache = step.cache.clone()
    plan.write_kv(step.key, step.value, cache)
    assert torch.equal(plan.attend(step.query, cache, HEAD_SIZE**-0.5), expected)
