"""The C++ kernels against the reference, over random block tables; also as built for lesser processors."""

import platform
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.gpu_worker.attention.steps import (
    BATCHES,
    BLOCK_SIZE,
    CPU,
    HEAD_SIZE,
    Step,
    make_step,
    rules,
    run,
    run_rule,
    sees_images,
    shape,
    with_images,
)
from tests.pairwise import pairs
from tokenloom.gpu_worker.attention.attention_backend import ScoreRule
from tokenloom.gpu_worker.attention.cpu_backend import CPUBackend, TokenwiseBackend
from tokenloom.gpu_worker.attention.torch_backend import ReferenceBackend
from tokenloom.gpu_worker.kernels.compiler import KernelsUnavailable

pytestmark = pytest.mark.skipif(not shutil.which("g++"), reason="no C++ compiler")

CPUINFO = Path("/proc/cpuinfo").read_text()
LONG = {
    "split decodes": ([1, 1, 1], [3000, 700, 20]),
    "a split decode beside a prefill": ([1, 90], [2000, 90]),
}
ALL = BATCHES | LONG
SHARED = {"decodes that share a prefix": ([1] * 30, list(range(150, 180)))}
"""Of 9 blocks."""
BENT = ["decodes of many lengths", "chunks of longer prompts", *LONG, *SHARED]


@pytest.fixture(autouse=True)
def threads():
    """More than one, so that pieces and merges meet."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def compare(batch, config, window, march="native", **tolerance):
    compare_rule(batch, config, ScoreRule(config.head_size**-0.5, window), march, **tolerance)


def compare_rule(batch, config, rule, march="native", **tolerance):
    step = make_step(*(ALL | SHARED)[batch], config.num_heads, config)
    if rule.sees_images:
        with_images(step)
    if batch in SHARED:
        step.arrays["block_tables"][:, :9] = step.arrays["block_tables"][0, :9]
    expected, expected_cache = run_rule(ReferenceBackend(config, BLOCK_SIZE, CPU), step, rule)
    found, cache = run_rule(CPUBackend(config, BLOCK_SIZE, CPU, march), step, rule)
    assert torch.equal(cache, expected_cache)
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, **{"rtol": 1e-5, "atol": 2e-6, **tolerance})


@pytest.mark.parametrize(
    ("batch", "heads", "window"),
    pairs(ALL, [(4, 4), (4, 2), (6, 2), (4, 1), (6, 1), (32, 1)], [None, 1, 7, 16, 40, 1000]),
)
def test_equals_the_reference(batch, heads, window):
    num_heads, num_kv_heads = heads
    compare(batch, shape(num_kv_heads, num_heads=num_heads), window)


@pytest.mark.parametrize(("batch", "window", "head_size"), pairs(ALL, [None, 40], [16, 20, 64, 80, 128]))
def test_head_sizes(batch, window, head_size):
    compare(batch, shape(2, head_size=head_size), window)


@pytest.mark.parametrize(
    ("batch", "window", "heads"),
    pairs(
        ALL,
        [None, 7, 40, 200],
        [(4, 32), (2, 128), (6, 64), (8, 128), (10, 64), (14, 128), (32, 64), (64, 32), (6, 80)],
    ),
)
def test_bfloat16_is_close(batch, window, heads):
    """With the matrix unit where there is one, for heads of whole 32s."""
    num_heads, head_size = heads
    compare(batch, shape(2, torch.bfloat16, num_heads, head_size), window, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("rule", ["softcap", "sinks", "both"])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 4), (6, 2), (32, 1)])
@pytest.mark.parametrize("batch", BENT)
def test_softcap_and_sinks(batch, num_heads, num_kv_heads, rule, window):
    compare_rule(batch, shape(num_kv_heads, num_heads=num_heads), rules(num_heads, window)[rule])


IMAGES = ["one prefill", "chunks of longer prompts", "decodes between prefills", "a split decode beside a prefill"]


@pytest.mark.parametrize(
    ("batch", "heads", "rule", "window"),
    pairs(IMAGES, [(4, 4), (6, 2), (32, 1)], ["plain", "both"], [None, 7, 40]),
)
def test_tokens_of_an_image_see_all_of_it(batch, heads, rule, window):
    num_heads, num_kv_heads = heads
    plain = ScoreRule(0.3, window)
    chosen = sees_images(plain if rule == "plain" else rules(num_heads, window)["both"])
    config = shape(num_kv_heads, num_heads=num_heads)
    compare_rule(batch, config, chosen)
    step = with_images(make_step(*ALL[batch], num_heads, config))
    expected, _ = run_rule(ReferenceBackend(config, BLOCK_SIZE, CPU), step, chosen)
    found, _ = run_rule(TokenwiseBackend(config, BLOCK_SIZE, CPU), step, chosen)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=2e-6)
    backend = CPUBackend(config, BLOCK_SIZE, CPU)
    with_limits, _ = run_rule(backend, step, plain)
    del step.arrays["limits"]
    without, _ = run_rule(backend, step, plain)
    assert torch.equal(with_limits, without)  # in a layer whose rule sees no images


@pytest.mark.parametrize(("batch", "num_heads", "window"), pairs(IMAGES, [4, 14, 32], [None, 7, 40]))
def test_images_in_bfloat16(batch, num_heads, window):
    """With the matrix unit where there is one."""
    config = shape(2, torch.bfloat16, num_heads, 64)
    compare_rule(batch, config, sees_images(ScoreRule(0.125, window)), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("num_heads", [2, 4, 6, 8])
@pytest.mark.parametrize("batch", ["decodes of many lengths", *LONG])
def test_decodes_in_bfloat16_by_the_heads_that_share_a_key(batch, num_heads):
    for window in (None, 40):
        compare(batch, shape(2, torch.bfloat16, num_heads), window, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("num_heads", [4, 6, 32])
def test_a_shared_prefix_in_bfloat16(num_heads):
    """Of an odd number of blocks, where the matrix unit takes two at a time: nothing behind the prefix may count."""
    compare("decodes that share a prefix", shape(2, torch.bfloat16, num_heads), None, rtol=2e-2, atol=5e-3)


@pytest.mark.parametrize(
    ("heads", "kv_dtype", "rule"),
    pairs(
        [(4, 2, 64, torch.bfloat16), (6, 2, 32, torch.bfloat16), (4, 4, 32, torch.float32), (14, 2, 64, torch.float32)],
        [None, torch.int8],
        ["plain", "images", "both"],
    ),
)
def test_tiles_of_a_prompt_have_the_same_bits_side_by_side(heads, kv_dtype, rule):
    """One thread gets up to four of them in a piece, each of 64 threads a single one."""
    num_heads, num_kv_heads, head_size, dtype = heads
    config = shape(num_kv_heads, dtype, num_heads, head_size, kv_dtype)
    step = with_images(make_step([700, 1, 333, 97], [1003, 20, 333, 500], num_heads, config))
    plain = ScoreRule(head_size**-0.5, None)
    chosen = {"plain": plain, "images": sees_images(plain), **rules(num_heads, None)}[rule]
    backend = CPUBackend(config, BLOCK_SIZE, CPU)
    torch.set_num_threads(64)
    alone, _ = run_rule(backend, step, chosen)
    torch.set_num_threads(1)
    beside, _ = run_rule(backend, step, chosen)
    assert torch.equal(alone[:700], beside[:700])
    assert torch.equal(alone[701:], beside[701:])
    expected, _ = run_rule(ReferenceBackend(config, BLOCK_SIZE, CPU), step, chosen)
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 2e-6}
    torch.testing.assert_close(beside, expected, **tolerance)


@pytest.mark.parametrize("rule", ["softcap", "sinks", "both"])
@pytest.mark.parametrize("num_heads", [4, 6, 32])
@pytest.mark.parametrize("batch", BENT)
def test_softcap_and_sinks_in_bfloat16(batch, num_heads, rule):
    """With the matrix unit where there is one."""
    compare_rule(batch, shape(2, torch.bfloat16, num_heads), rules(num_heads, None)[rule], rtol=2e-2, atol=2e-2)


@pytest.mark.skipif(platform.machine() != "x86_64" or "avx2" not in CPUINFO, reason="builds for x86-64")
@pytest.mark.parametrize("march", ["x86-64", "x86-64-v3"])
@pytest.mark.parametrize("batch", ALL)
def test_builds_for_lesser_processors_are_right(batch, march):
    for window in (None, 40):
        compare(batch, shape(2), window, march)
        compare(batch, shape(1, num_heads=6), window, march)
        compare(batch, shape(2, torch.bfloat16), window, march, rtol=2e-2, atol=2e-2)
        compare_rule(batch, shape(2), rules(4, window)["both"], march)
        compare_rule(batch, shape(2), sees_images(ScoreRule(0.3, window)), march)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_another_request_s_infinities_stay_its_own(dtype):
    config = shape(2, dtype)
    step = make_step([1, 20, 1], [5, 100, 20], 4, config)
    step.cache[:, step.arrays["block_tables"][1]] = float("nan")
    step.cache[:, step.arrays["block_tables"][0][1:]] = float("nan")
    found, _ = run(CPUBackend(config, BLOCK_SIZE, CPU), step, None)
    assert found[[0, 21]].isfinite().all()
    assert found[1:21].isnan().all()


def test_queries_may_lie_within_wider_rows():
    """As they do in the output of a merged projection."""
    config = shape(2)
    step = make_step(*BATCHES["decodes between prefills"], 4, config)
    expected, _ = run(CPUBackend(config, BLOCK_SIZE, CPU), step, None)
    wide = torch.cat((step.query, step.key, step.value), dim=1)
    step.query, step.key, step.value = wide.split([4, 2, 2], dim=1)
    found, _ = run(CPUBackend(config, BLOCK_SIZE, CPU), step, None)
    assert torch.equal(found, expected)


def test_a_plan_keeps_no_reference_to_its_arrays():
    config = shape(2)
    step = make_step(*BATCHES["decodes between prefills"], 4, config)
    backend = CPUBackend(config, BLOCK_SIZE, CPU)
    expected, _ = run(backend, step, None)
    arrays = {name: values.copy() for name, values in step.arrays.items()}
    plan = backend.plan(**arrays)
    for values in arrays.values():
        values[:] = 0
    cache = step.cache.clone()
    plan.write_kv(step.key, step.value, cache)
    assert torch.equal(plan.attend(step.query, cache, ScoreRule(HEAD_SIZE**-0.5)), expected)


@pytest.mark.parametrize(("block_size", "entries"), [(8, {}), (16, {"num_heads": 33})])
def test_shapes_that_the_kernel_does_not_know(block_size, entries):
    with pytest.raises(KernelsUnavailable):
        CPUBackend(shape(1, **entries), block_size, CPU)


def differing_parts(backend: CPUBackend, step: Step, rule: ScoreRule) -> int:
    """Count the parts of a step, of one token and of several, that have other bits when each is a step by itself."""
    whole, cache = run_rule(backend, step, rule)
    starts, ends = step.arrays["cu_query_lens"].tolist(), step.arrays["seq_lens"].tolist()
    count = 0
    for request, (begin, end, length) in enumerate(zip(starts, starts[1:], ends, strict=False)):
        halves = ((begin, (begin + end + 1) // 2), ((begin + end) // 2, end))
        tokens = range(begin if end - begin < 10 else end - 1, end)
        for first, stop in (*halves, *((token, token + 1) for token in tokens)):
            plan = backend.plan(
                np.array([0, stop - first]),
                np.array([length - (end - stop)]),
                step.arrays["block_tables"][request : request + 1],
                step.arrays["slot_mapping"][first:stop],
            )
            found = plan.attend(step.query[first:stop], cache, rule)
            count += not torch.equal(found.view(torch.uint8), whole[first:stop].contiguous().view(torch.uint8))
    return count


TOKENWISE = {
    **ALL,
    **SHARED,
    "chunks behind long prompts": ([40, 1, 30, 1], [2100, 2100, 1030, 1024]),
    "drafts beside decodes": ([4, 1, 5, 9, 2], [700, 30, 1027, 2100, 2]),
}
KERNELS = [
    ((4, 2, 16), None, "plain"),
    ((2, 2, 64), None, "plain"),
    ((6, 2, 64), None, "plain"),
    ((8, 2, 64), None, "plain"),
    ((6, 1, 128), None, "plain"),
    ((4, 2, 32), None, "both"),
    ((4, 2, 32), torch.int8, "plain"),
    ((32, 4, 32), torch.int8, "both"),
]
"""Query heads, KV heads and the head size, with a kernel for decodes or of so many heads that a token is a tile; the
dtype of the cache; and the rule. Other tests build the same kernels."""


@pytest.mark.parametrize(
    ("batch", "kernel", "dtype", "window"),
    pairs(TOKENWISE, KERNELS, [torch.float32, torch.bfloat16], [None, 40, 200]),
)
def test_a_token_of_a_batch_invariant_engine_has_the_same_bits_in_every_batch(batch, kernel, dtype, window):
    (num_heads, num_kv_heads, head_size), kv_dtype, rule = kernel
    config = shape(num_kv_heads, dtype, num_heads, head_size, kv_dtype)
    step = make_step(*TOKENWISE[batch], num_heads, config)
    if batch in SHARED:
        step.arrays["block_tables"][:, :9] = step.arrays["block_tables"][0, :9]
    chosen = {"plain": ScoreRule(head_size**-0.5, window), **rules(num_heads, window)}[rule]
    backend = TokenwiseBackend(config, BLOCK_SIZE, CPU)
    assert differing_parts(backend, step, chosen) == 0
    found, expected = (run_rule(each, step, chosen)[0] for each in (backend, ReferenceBackend(config, BLOCK_SIZE, CPU)))
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("batch", ["chunks of longer prompts", *LONG, "decodes that share a prefix"])
def test_a_token_of_other_engines_has_not(batch):
    config = shape(2)
    step = make_step(*TOKENWISE[batch], 4, config)
    if batch in SHARED:
        step.arrays["block_tables"][:, :9] = step.arrays["block_tables"][0, :9]
    assert differing_parts(CPUBackend(config, BLOCK_SIZE, CPU), step, ScoreRule(HEAD_SIZE**-0.5)) > 0
