"""The torch backend against the reference, over random block tables."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

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
    sees_images,
    shape,
    with_images,
)
from tokenloom.gpu_worker.attention import torch_backend
from tokenloom.gpu_worker.attention.attention_backend import ScoreRule
from tokenloom.gpu_worker.attention.torch_backend import ReferenceBackend, TorchBackend, attend_dense


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


IMAGES = ["one prefill", "prefills", "chunks of longer prompts", "decodes between prefills"]


@pytest.mark.parametrize("window", [None, 7, 40])
@pytest.mark.parametrize("batch", IMAGES)
def test_tokens_of_an_image_see_all_of_it(batch: str, window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference against one dense mask, and the backend, in segments that cut images, against the reference."""
    monkeypatch.setattr(torch_backend, "_QUERY_ROWS", 24)
    config = shape(2)
    step = with_images(make_step(*BATCHES[batch], 4, config))
    rule = sees_images(ScoreRule(0.3, window))
    expected, cache = run_rule(ReferenceBackend(config, BLOCK_SIZE, CPU), step, rule)
    starts, limits = step.arrays["cu_query_lens"].tolist(), torch.from_numpy(step.arrays["limits"])
    for request, length in enumerate(step.arrays["seq_lens"].tolist()):
        rows = slice(*starts[request : request + 2])
        places = torch.arange(length)
        table = torch.from_numpy(step.arrays["block_tables"][request].astype(np.int64))
        key, value = cache[:, table[places // BLOCK_SIZE], :, places % BLOCK_SIZE].permute(1, 2, 0, 3)
        own = torch.arange(length - (rows.stop - rows.start), length)[:, None]
        sees = places <= limits[rows, None]
        if window is not None:
            sees &= places > own - window
        dense = attend_dense(step.query[rows].transpose(0, 1)[None], key[None], value[None], sees, rule)
        torch.testing.assert_close(expected[rows], dense[0].transpose(0, 1), rtol=1e-5, atol=2e-6)
    found, _ = run_rule(TorchBackend(config, BLOCK_SIZE, CPU), step, rule)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=2e-6)
    causal, _ = run_rule(ReferenceBackend(config, BLOCK_SIZE, CPU), step, ScoreRule(0.3, window))
    assert not torch.allclose(causal, expected)


def test_a_layer_whose_rule_sees_no_images_stays_causal() -> None:
    config = shape(2)
    step = make_step(*BATCHES["prefills"], 4, config)
    expected, _ = run(TorchBackend(config, BLOCK_SIZE, CPU), step, None)
    found, _ = run(TorchBackend(config, BLOCK_SIZE, CPU), with_images(step), None)
    assert torch.equal(found, expected)


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


CONFIG: Any = SimpleNamespace(num_layers=1, num_kv_heads=2, head_size=8, cache_head_size=16, dtype=torch.float32)
CONFIG.kv_dtype, CONFIG.kv_row_bytes, CONFIG.kv_planes = CONFIG.dtype, 16 * 4, 2


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
