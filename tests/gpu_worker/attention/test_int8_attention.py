"""Attention over keys and values in 8 bits against plain attention over the elements that they stand for."""

import shutil
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.gpu_worker.attention.steps import (
    BATCHES,
    BLOCK_SIZE,
    CPU,
    Step,
    make_step,
    owned_slots,
    rules,
    run_rule,
    shape,
)
from tests.pairwise import pairs
from tokenloom.gpu_worker.attention.attention_backend import ScoreRule
from tokenloom.gpu_worker.attention.attention_backends import make_attention_backend
from tokenloom.gpu_worker.attention.cache import elements, numbers_of, quantize, scales_of
from tokenloom.gpu_worker.attention.cpu_backend import CPUBackend
from tokenloom.gpu_worker.attention.torch_backend import ReferenceBackend

HAS_COMPILER = bool(shutil.which("g++"))
BACKENDS = ["torch", "reference", *(["cpu"] if HAS_COMPILER else [])]
LONG = {"split decodes": ([1, 1, 1], [3000, 700, 20]), "a split decode beside a prefill": ([1, 90], [2000, 90])}
SHARED = {"decodes that share a prefix": ([1] * 30, list(range(150, 180)))}
"""Of 9 blocks."""
ALL = BATCHES | LONG | SHARED
HEADS = [(4, 4, 32), (4, 2, 32), (6, 2, 20), (4, 1, 32), (6, 1, 32), (32, 1, 20)]
"""Query heads, KV heads and the head size, of which 20 is padded to 32."""
TOLERANCE = {torch.float32: {"rtol": 1e-5, "atol": 3e-6}, torch.bfloat16: {"rtol": 2e-2, "atol": 2e-2}}


@pytest.fixture(autouse=True)
def threads() -> Any:
    """More than one, so that pieces and merges meet."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def make_int8_step(batch: str, heads: tuple[int, int, int], dtype: torch.dtype) -> tuple[Any, Step]:
    num_heads, num_kv_heads, head_size = heads
    config = shape(num_kv_heads, dtype, num_heads, head_size, torch.int8)
    step = make_step(*ALL[batch], num_heads, config)
    if batch in SHARED:
        step.arrays["block_tables"][:, :9] = step.arrays["block_tables"][0, :9]
    return config, step


def expected_of(config: Any, step: Step, rule: ScoreRule) -> Tensor:
    """What float32 attention makes of the rounded cache, to which the step's rounded keys and values are added."""
    plain = shape(config.num_kv_heads, torch.float32, config.num_heads, config.head_size)
    key, value = (numbers * scales[..., None] for numbers, scales in map(quantize, (step.key, step.value)))
    step = replace(step, query=step.query.float(), key=key, value=value, cache=elements(step.cache))
    return run_rule(ReferenceBackend(plain, BLOCK_SIZE, CPU), step, rule)[0]


def compare(backend: Any, config: Any, step: Step, rule: ScoreRule) -> None:
    found, _ = run_rule(backend, step, rule)
    assert found.dtype == config.dtype
    torch.testing.assert_close(found.float(), expected_of(config, step, rule), **TOLERANCE[config.dtype])


@pytest.mark.parametrize(
    ("batch", "kernel", "heads", "window"),
    pairs(ALL, [*product(BACKENDS, TOLERANCE)], HEADS, [None, 1, 7, 16, 40, 1000]),
)
def test_equals_attention_over_the_elements(
    batch: str, kernel: tuple[str, torch.dtype], heads: tuple[int, int, int], window: int | None
) -> None:
    name, dtype = kernel
    config, step = make_int8_step(batch, heads, dtype)
    backend = make_attention_backend(name, config, BLOCK_SIZE, CPU)
    compare(backend, config, step, ScoreRule(heads[2] ** -0.5, window))


@pytest.mark.parametrize(
    ("batch", "name", "heads", "window", "rule"),
    pairs(ALL, BACKENDS, [HEADS[1], HEADS[4], HEADS[5]], [None, 40], ["softcap", "sinks", "both"]),
)
def test_softcap_and_sinks(batch: str, name: str, heads: tuple[int, int, int], window: int | None, rule: str) -> None:
    config, step = make_int8_step(batch, heads, torch.float32)
    compare(make_attention_backend(name, config, BLOCK_SIZE, CPU), config, step, rules(heads[0], window)[rule])


@pytest.mark.skipif(not HAS_COMPILER, reason="no C++ compiler")
@pytest.mark.parametrize("batch", ALL)
def test_a_build_for_lesser_processors_is_right(batch: str) -> None:
    for heads in (HEADS[1], HEADS[4]):
        config, step = make_int8_step(batch, heads, torch.float32)
        compare(CPUBackend(config, BLOCK_SIZE, CPU, "x86-64"), config, step, ScoreRule(0.2, 40))


@pytest.mark.parametrize(("name", "batch", "window"), pairs(BACKENDS, BATCHES, [None, 7]))
def test_what_earlier_owners_left_is_not_read(name: str, batch: str, window: int | None) -> None:
    config, step = make_int8_step(batch, HEADS[1], torch.float32)
    backend, rule = make_attention_backend(name, config, BLOCK_SIZE, CPU), ScoreRule(0.2, window)
    clean, _ = run_rule(backend, step, rule)
    unowned = ~owned_slots(step)
    numbers_of(step.cache).transpose(2, 3)[:, unowned] = -128
    scales_of(step.cache).transpose(2, 3)[:, unowned] = float("nan")
    found, _ = run_rule(backend, step, rule)
    assert clean.isfinite().all()
    assert torch.equal(found, clean)


@pytest.mark.parametrize("name", BACKENDS)
def test_a_prompt_in_chunks_attends_to_the_same_bytes_as_in_one_piece(name: str) -> None:
    """A chunk reads its own keys and values rounded, as a later chunk reads them."""
    config, whole = make_int8_step("one prefill", HEADS[1], torch.float32)
    backend, rule = make_attention_backend(name, config, BLOCK_SIZE, CPU), ScoreRule(0.2)
    expected, expected_cache = run_rule(backend, whole, rule)
    cache, parts = torch.zeros_like(whole.cache), []
    for begin, end in ((0, 30), (30, 31), (31, 77)):
        arrays = make_step([end - begin], [end], 4, config).arrays
        arrays["block_tables"] = whole.arrays["block_tables"]
        arrays["slot_mapping"] = whole.arrays["slot_mapping"][begin:end]
        plan = backend.plan(**arrays)
        plan.write_kv(whole.key[begin:end], whole.value[begin:end], cache)
        parts.append(plan.attend(whole.query[begin:end], cache, rule))
    torch.testing.assert_close(torch.cat(parts), expected, rtol=1e-5, atol=2e-6)
    written = owned_slots(whole)
    for view in (numbers_of, scales_of):
        assert torch.equal(view(cache).transpose(2, 3)[:, written], view(expected_cache).transpose(2, 3)[:, written])
