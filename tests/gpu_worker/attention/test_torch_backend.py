"""The torch backend against the reference, over random block tables."""

import numpy as np
import pytest
import torch

from tests.gpu_worker.attention.steps import (
    BATCHES,
    BLOCK_SIZE,
    CPU,
    HEAD_SIZE,
    make_step,
    owned_slots,
    rules,
    run,
    run_rule,
    shape,
)
from tokenloom.gpu_worker.attention import torch_backend
from tokenloom.gpu_worker.attention.attention_backend import ScoreRule
from tokenloom.gpu_worker.attention.reference import ReferenceBackend
from tokenloom.gpu_worker.attention.torch_backend import TorchBackend


@pytest.mark.parametrize("window", [None, 1, 7, 16, 40, 1000])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize("batch", BATCHES)
def test_equals_the_reference(batch: str, num_heads: int, num_kv_heads: int, window: int | None) -> None:
    config = shape(num_kv_heads)
    step = make_step(*BATCHES[batch], num_heads, config)
    expected, expected_cache = run(ReferenceBackend(config, BLOCK_SIZE, CPU), step, window)
    found, cache = run(TorchBackend(config, BLOCK_SIZE, CPU), step, window)
    owned = owned_slots(step)
    assert torch.equal(cache.transpose(2, 3)[:, owned], expected_cache.transpose(2, 3)[:, owned])
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


@pytest.mark.parametrize("foreign", [[], [1], [0, 2]])
def test_only_tails_that_are_foreign_are_zeroed(foreign: list[int]) -> None:
    config = shape(2)
    step = make_step([1, 1, 7], [5, 20, 23], 4, config)
    cache = step.cache.clone()
    plan = TorchBackend(config, BLOCK_SIZE, CPU).plan(**step.arrays, foreign_tails=np.array(foreign, dtype=np.int64))
    plan.attend(step.query, cache, ScoreRule(1.0))
    for request, (table, end) in enumerate(zip(step.arrays["block_tables"], (5, 4, 7), strict=True)):
        block = cache[:, table[-1] if request else table[0]]
        assert (block[:, :, end:] == 0).all() == (request in foreign)
        assert (block[:, :, :end] != 0).all()


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
    assert torch.equal(plan.attend(step.query, cache, ScoreRule(HEAD_SIZE**-0.5)), expected)


def test_heads_that_are_no_whole_16s_are_padded() -> None:
    config = shape(2, head_size=20)
    step = make_step(*BATCHES["decodes between prefills"], 4, config)
    expected, _ = run(ReferenceBackend(config, BLOCK_SIZE, CPU), step, None)
    found, cache = run(TorchBackend(config, BLOCK_SIZE, CPU), step, None)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=2e-6)
    assert found.shape == step.query.shape
    assert cache.shape[-1] == 32
    assert not cache[..., 20:].any()


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("rule", ["softcap", "sinks", "both"])
@pytest.mark.parametrize("batch", ["decodes of many lengths", "one prefill", "decodes between prefills"])
def test_softcap_and_sinks(batch: str, rule: str, window: int | None) -> None:
    config = shape(2)
    step = make_step(*BATCHES[batch], 4, config)
    expected, _ = run_rule(ReferenceBackend(config, BLOCK_SIZE, CPU), step, rules(4, window)[rule])
    found, _ = run_rule(TorchBackend(config, BLOCK_SIZE, CPU), step, rules(4, window)[rule])
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=2e-6)
