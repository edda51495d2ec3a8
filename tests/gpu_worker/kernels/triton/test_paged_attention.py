"""The attention kernel against the reference, over random block tables, in float32 and float16."""

import random

import numpy as np
import pytest
import torch

from tests.gpu_worker.attention import steps
from tests.gpu_worker.attention.steps import CPU, make_step, rules, run_rule, sees_images, shape, with_images
from tokenloom.gpu_worker.attention import triton_backend
from tokenloom.gpu_worker.attention import triton_backend as attention_work
from tokenloom.gpu_worker.attention.attention_backend import ScoreRule
from tokenloom.gpu_worker.attention.torch_backend import ReferenceBackend
from tokenloom.gpu_worker.attention.triton_backend import TritonBackend, key_parts, most_parts, work_entries
from tokenloom.gpu_worker.kernels.compiler import KernelsUnavailable
from tokenloom.gpu_worker.kernels.triton.paged_attention import attend

TOLERANCE = {torch.float32: {"rtol": 1e-5, "atol": 1e-5}, torch.float16: {"rtol": 3e-3, "atol": 3e-3}}
HEADS = [(4, 4), (4, 2), (6, 2), (7, 1), (8, 1)]


def compare(query_lens, seq_lens, config, rule, block_size=16):
    step = make_step(query_lens, seq_lens, config.num_heads, config)
    if rule.sees_images:
        with_images(step)
    expected, expected_cache = run_rule(ReferenceBackend(config, block_size, CPU), step, rule)
    found, cache = run_rule(TritonBackend(config, block_size, CPU), step, rule)
    if cache.dtype == torch.float8_e4m3fn:
        cache, expected_cache = cache.view(torch.uint8), expected_cache.view(torch.uint8)
    assert torch.equal(cache, expected_cache)
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, **TOLERANCE[config.dtype])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("seed", range(6))
def test_equals_the_reference(seed, dtype, monkeypatch):
    """A random batch, shape and rule; blocks of 16, 32 and 64, heads from 16 to 256."""
    rng = random.Random(seed)
    block_size = [16, 32, 64][seed % 3]
    monkeypatch.setattr(steps, "BLOCK_SIZE", block_size)
    num_heads, num_kv_heads = HEADS[seed % len(HEADS)]
    config = shape(num_kv_heads, dtype, num_heads, [64, 32, 128, 20, 256, 80][seed % 6])
    seq_lens = [rng.randint(1, 100) for _ in range(rng.randint(1, 3))]
    query_lens = [rng.choice([1, 1, rng.randint(1, length)]) for length in seq_lens]
    window = rng.choice([None, 1, 17, 70])
    rule = rng.choice([ScoreRule(config.head_size**-0.5, window), *rules(num_heads, window).values()])
    compare(query_lens, seq_lens, config, rule, block_size)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("window", [None, 90])
@pytest.mark.parametrize("rule", ["softcap", "sinks", "both"])
def test_split_decodes(rule, window, dtype):
    """Some of the splits have no keys."""
    config = shape(1, dtype, num_heads=3)
    compare([1, 1, 2], [130, 20, 70], config, rules(3, window)[rule])


@pytest.mark.parametrize("window", [None, 7, 40])
def test_tokens_of_an_image_see_all_of_it(window):
    config = shape(1, num_heads=3)
    compare([70, 1, 20, 33], [70, 40, 90, 60], config, sees_images(ScoreRule(0.3, window)))
    compare([5, 3], [5, 60], config, sees_images(rules(3, window)["both"]))


def test_short_decodes_and_prefills_take_different_programs():
    config = shape(1, torch.float16, num_heads=2)
    backend = TritonBackend(config, 16, CPU)
    assert backend.shape(1).rows == 16
    assert backend.shape(300).rows == 128


def test_what_other_requests_left_in_a_block_changes_nothing():
    config = shape(2)
    step = make_step([1, 20, 1], [5, 100, 20], 4, config)
    rule = ScoreRule(0.2, 30)
    expected, _ = run_rule(ReferenceBackend(config, 16, CPU), step, rule)
    for request, (length, table) in enumerate(zip(step.arrays["seq_lens"], step.arrays["block_tables"], strict=True)):
        first = max(0, length - [1, 20, 1][request] - 30 + 1)
        for position in range(len(table) * 16):
            if not first <= position < length:
                step.cache[:, table[position // 16], :, position % 16] = float("nan")
    found, _ = run_rule(TritonBackend(config, 16, CPU), step, rule)
    torch.testing.assert_close(found, expected, **TOLERANCE[torch.float32])


def test_entries_without_a_request_compute_nothing(monkeypatch):
    """A captured graph has more entries than a step needs."""
    padded = np.full((2, 4), -1, dtype=np.int32)
    monkeypatch.setattr(
        triton_backend, "work_entries", lambda *args: np.concatenate([padded, work_entries(*args), padded])
    )
    compare([1, 3], [3, 20], shape(1, num_heads=2), ScoreRule(0.3))


def test_queries_may_lie_within_wider_rows():
    config = shape(1, num_heads=2)
    step = make_step([1, 3], [3, 20], 2, config)
    expected, _ = run_rule(TritonBackend(config, 16, CPU), step, ScoreRule(0.3))
    wide = torch.cat((step.query, step.key, step.value), dim=1)
    step.query, step.key, step.value = wide.split([2, 1, 1], dim=1)
    found, _ = run_rule(TritonBackend(config, 16, CPU), step, ScoreRule(0.3))
    assert torch.equal(found, expected)


def test_work_covers_every_query_once():
    rng = np.random.default_rng(0)
    for _ in range(50):
        lengths, queries = rng.integers(1, 70, 5), int(rng.integers(1, 40))
        entries = work_entries(lengths, queries)
        covered = [
            (r, q) for r, first, _, _ in entries.tolist() for q in range(first, min(first + queries, lengths[r]))
        ]
        assert sorted(covered) == [(r, q) for r, count in enumerate(lengths.tolist()) for q in range(count)]


def test_keys_are_split_by_work():
    def parts(*lengths, heads=8):
        return key_parts(np.array(lengths), heads).tolist()

    assert parts(8192) == [32], "one long decode fills the device"
    assert parts(64) == [1]
    assert parts(65) == [2]
    assert parts(*[512] * 16) == [2] * 16
    assert parts(*[512] * 128) == [1] * 128, "many fill it without"
    assert parts(131_072, *[500] * 128) == [23, *[1] * 128], "but for one that would take as long as all others"
    rng = np.random.default_rng(0)
    for _ in range(100):
        lengths, heads = (
            rng.integers(1, 1 << int(rng.integers(1, 18)), int(rng.integers(1, 200))),
            int(rng.integers(1, 33)),
        )
        assert sum(parts(*lengths, heads=heads)) <= len(lengths) + most_parts(heads)


def test_a_list_of_parts():
    parts = np.array([3, 1, 2])
    assert work_entries(np.array([1, 1, 1]), 1, parts).tolist() == [
        [0, 0, 0, 3],
        [0, 0, 1, 3],
        [0, 0, 2, 3],
        [1, 0, 0, 1],
        [2, 0, 0, 2],
        [2, 0, 1, 2],
    ]
    of_prompts = work_entries(np.array([1, 5, 1]), 2, np.array([2, 1, 1])).tolist()
    assert of_prompts == [[2, 0, 0, 1], [1, 4, 0, 1], [1, 2, 0, 1], [1, 0, 0, 1], [0, 0, 0, 2], [0, 0, 1, 2]]


def test_parts_leave_the_counters_as_they_found_them():
    """Layers and steps share them."""
    config = shape(2, torch.float32, 4, 32)
    step = make_step([1, 1, 3], [700, 40, 130], 4, config)
    backend = TritonBackend(config, 16, CPU)
    expected, _ = run_rule(ReferenceBackend(config, 16, CPU), step, ScoreRule(0.3))
    for _ in range(2):
        found, _ = run_rule(backend, step, ScoreRule(0.3))
        torch.testing.assert_close(found, expected)
    assert len(backend._counters) == 1
    assert not backend._counters[0].any()
    work, num_wide = backend.work(np.array([1, 1, 3]), np.array([700, 40, 130]), 3)
    assert (int(work[:, 3].max()) > 1, num_wide) == (True, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("batch", [([1, 20, 1, 40], [900, 30, 5, 60]), ([20, 40], [30, 60]), ([1, 30], [300, 300])])
def test_decodes_beside_prompts_have_programs_of_their_own(batch, dtype, monkeypatch):
    grids, launch = [], triton_backend.launch

    def count(kernel, grid, *arguments, **constants):
        if kernel is attend:
            grids.append((grid[0], constants["ROWS"], constants["CAN_SPLIT"]))
        launch(kernel, grid, *arguments, **constants)

    monkeypatch.setattr(triton_backend, "launch", count)
    config = shape(1, dtype, num_heads=4)
    compare(*batch, config, ScoreRule(0.3))
    num_queries, lengths = map(np.array, batch)
    num_parts = key_parts(lengths[num_queries == 1], 1).sum()
    if dtype == torch.float32:  # one shape for all
        assert [grid[1:] for grid in grids] == [(16, True)]
    else:
        assert grids[0] == ((-(-num_queries[num_queries > 1] // 32)).sum(), 128, False)
        assert grids[1] == (num_parts, 16, True)


def test_there_is_room_for_padding_before_the_decodes():
    backend = TritonBackend(shape(1, torch.float16, num_heads=4), 16, CPU)
    entries, num_wide = backend.work(np.array([1, 40]), np.array([9, 40]), 64, room=4)
    assert num_wide == 4
    assert entries.tolist() == [[1, 32, 0, 1], [1, 0, 0, 1], [-1] * 4, [-1] * 4, [0, 0, 0, 1]]


def test_a_decode_of_many_query_heads_has_rows_for_all_of_them():
    assert attention_work.program_shape(1, 32, 128, torch.bfloat16).rows == 32


@pytest.mark.parametrize("head_size", [16, 144])
def test_a_prompt_of_more_query_heads_than_a_program_has_rows(head_size):
    group = 130 if head_size <= 128 else 66
    compare([3, 1], [20, 9], shape(1, torch.float16, group, head_size), ScoreRule(head_size**-0.5))


@pytest.mark.parametrize("wrong", [{"head_size": 264}, {"kv_dtype": torch.int8}])
def test_shapes_that_the_kernel_does_not_know(wrong):
    with pytest.raises(KernelsUnavailable):
        TritonBackend(shape(1, **wrong), 16, CPU)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("batch", [([1, 20, 1], [5, 100, 20]), ([1], [300])])
def test_keys_and_values_of_8_bits(dtype, batch):
    """The kernel rounds and reads as the reference does; what rounding costs is measured elsewhere."""
    config = shape(2, dtype, 4, 32, torch.float8_e4m3fn)
    compare(*batch, config, ScoreRule(0.3, 30))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_not_finite_keys_stay_so(value):
    """8-bit floats have no infinity: NaN takes its place."""
    for kv_dtype in (None, torch.float8_e4m3fn):
        config = shape(1, num_heads=2, kv_dtype=kv_dtype)
        step = make_step([1, 3], [130, 20], 2, config)
        step.key[0, 0, 3] = value
        expected, expected_cache = run_rule(ReferenceBackend(config, 16, CPU), step, ScoreRule(0.3))
        found, cache = run_rule(TritonBackend(config, 16, CPU), step, ScoreRule(0.3))
        assert (~cache.float().isfinite()).sum() == 1
        assert torch.equal(cache.float().isfinite(), expected_cache.float().isfinite())
        if kv_dtype is None:  # the interpreter reads a NaN of 8 bits as a number
            assert torch.equal(found.isfinite(), expected.isfinite())
