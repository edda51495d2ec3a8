"""Attention that reads once what decodes share, against the reference, and when it does so."""

import numpy as np
import pytest
import torch

from tests.gpu_worker.attention import steps
from tests.gpu_worker.attention.steps import CPU, prefixes_of, rules, shape, shared_plan, shared_step
from tests.gpu_worker.kernels.triton.test_paged_attention import TOLERANCE
from tokenloom.gpu_worker.attention import triton_backend
from tokenloom.gpu_worker.attention.attention_backend import FP8_KV, ScoreRule
from tokenloom.gpu_worker.attention.torch_backend import ReferenceBackend
from tokenloom.gpu_worker.attention.triton_backend import TritonBackend, is_worth_sharing, shared_shape
from tokenloom.gpu_worker.kernels.triton.paged_attention import attend, attend_shared

GROUPS = [([0, 2, 3], 5), ([4, 1], 9)]
"""Requests, and how many blocks they share."""
LENGTHS = [81, 160, 100, 200, 145, 30]


def compare(config, rule, block_size=16, padded=0, groups=GROUPS):
    step = shared_step(config, LENGTHS, groups)
    expected, _ = steps.run_rule(ReferenceBackend(config, block_size, CPU), step, rule)
    backend, cache = TritonBackend(config, block_size, CPU), step.cache.clone()
    plan = shared_plan(backend, step.arrays, prefixes_of(groups), padded)
    plan.write_kv(step.key, step.value, cache)
    torch.testing.assert_close(plan.attend(step.query, cache, rule), expected, **TOLERANCE[config.dtype])


@pytest.fixture(autouse=True)
def few_are_enough(monkeypatch):
    monkeypatch.setattr(triton_backend, "FEWEST_SHARING", 2)


@pytest.fixture
def grids(monkeypatch):
    found, launch = {}, triton_backend.launch

    def count(kernel, grid, *arguments, **constants):
        found[kernel.__name__] = (*grid, constants.get("SHARED_ROWS"))
        launch(kernel, grid, *arguments, **constants)

    monkeypatch.setattr(triton_backend, "launch", count)
    return found


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("rule", ["plain", "softcap", "sinks", "both"])
def test_equals_the_reference(rule, dtype, grids):
    config = shape(2, dtype, num_heads=6)
    compare(config, {"plain": ScoreRule(0.3), **rules(6, None)}[rule], padded=8)
    assert grids.keys() == {"write_kv", attend.__name__, attend_shared.__name__}


@pytest.mark.parametrize("heads", [(4, 4, 20), (7, 1, 80), (8, 1, 256)])
def test_heads_of_other_sizes_and_numbers(heads):
    num_heads, num_kv_heads, size = heads
    compare(shape(num_kv_heads, torch.float16, num_heads, size), ScoreRule(size**-0.5))


def test_longer_blocks(monkeypatch):
    monkeypatch.setattr(steps, "BLOCK_SIZE", 32)
    compare(shape(1, num_heads=2), ScoreRule(0.3), block_size=32, groups=[([0, 2], 2), ([1, 3], 4)])


def test_keys_and_values_of_8_bits():
    compare(shape(2, torch.float16, 4, 32, FP8_KV), ScoreRule(0.3))


def test_a_layer_with_a_window_reads_each_request_alone(grids):
    """Of two groups of layers the one with windows has other tables, in which nothing is known to be shared."""
    compare(shape(2, num_heads=4), ScoreRule(0.3, 70))
    assert attend_shared.__name__ not in grids
    assert grids["attend"][-1] == 0


def test_parts_of_shared_keys_and_of_own_ones(grids):
    """So many programs that a request merges several of both kinds, and programs that find no key in their part."""
    config = shape(1, num_heads=2)
    groups, lengths = [([0, 1], 20)], [900, 330]
    step, rule = shared_step(config, lengths, groups), ScoreRule(0.3)
    expected, _ = steps.run_rule(ReferenceBackend(config, 16, CPU), step, rule)
    backend, cache = TritonBackend(config, 16, CPU), step.cache.clone()
    plan = shared_plan(backend, step.arrays, prefixes_of(groups))
    shares = plan.requests.tolist()
    assert shares[0][2] == shares[1][2] == 5
    plan.write_kv(step.key, step.value, cache)
    for _ in range(2):  # layers share the counters, which each leaves as it found them
        torch.testing.assert_close(plan.attend(step.query, cache, rule), expected)
    assert not backend._counters[0].any()


def test_a_request_that_shares_nothing_merges_nothing():
    config = shape(1, num_heads=2)
    step, rule = shared_step(config, [40, 20], []), ScoreRule(0.3)
    plan, cache = shared_plan(TritonBackend(config, 16, CPU), step.arrays, prefixes_of([])), step.cache.clone()
    plan.write_kv(step.key, step.value, cache)
    expected, _ = steps.run_rule(TritonBackend(config, 16, CPU), step, rule)
    assert torch.equal(plan.attend(step.query, cache, rule), expected)


def llama(kv_heads=8, heads=32):
    return TritonBackend(shape(kv_heads, torch.bfloat16, heads, 128), 16, CPU)


def found(count, shared, own=40, backend=None):
    """What so many requests read together that share so many tokens."""
    total = (shared + own) // 16 + 1
    tables = np.arange(count * total).reshape(count, total).astype(np.int32)
    tables[:, : shared // 16] = np.arange(shared // 16)
    return (backend or llama()).find_shared(np.full(count, shared + own), tables)


def test_it_pays_from_so_many_requests_and_tokens_on(monkeypatch):
    monkeypatch.setattr(triton_backend, "FEWEST_SHARING", 8)
    assert found(128, 2048).lengths.tolist() == [2048]
    assert found(8, 8192).starts.tolist() == [0, 8]
    assert found(7, 8192) is None, "too few requests"
    assert found(128, 240) is None, "too few tokens"
    assert found(8, 512) is None, "another call takes longer than these bytes"
    assert found(32, 256).lengths.tolist() == [256]
    assert found(128, 0) is None
    assert found(128, 8192, backend=llama(1, 64)) is None, "a program has rows for one request only"
    assert found(128, 2048, backend=llama(1, 32)).lengths.tolist() == [2048]


def test_what_several_groups_save_is_added():
    two = prefixes_of([(list(range(8)), 20), (list(range(8, 16)), 20)])
    saved = 2 * 7 * 320
    limit = triton_backend._LEAST_SAVED / saved
    assert is_worth_sharing(two, 16, int(limit) + 1)
    assert not is_worth_sharing(two, 16, int(limit) - 1)
    assert not is_worth_sharing(two, 1, 1 << 30)


def test_the_room_suffices_and_every_key_is_read_once():
    rng = np.random.default_rng(0)
    for kv_heads, heads in ((8, 32), (1, 3), (2, 64), (32, 32)):
        backend = llama(kv_heads, heads)
        queries = backend.shared_shape.rows // backend.group
        for _ in range(20):
            count = int(rng.integers(2, 120))
            order, groups, at = rng.permutation(count).tolist(), [], 0
            while at + 2 <= count:
                size = int(rng.integers(2, count - at + 1))
                groups.append((order[at : at + size], int(rng.integers(1, 200))))
                at += size + int(rng.integers(0, 3))
            prefixes, room = prefixes_of(groups), backend.shared_room(count)
            seq_lens = np.full(count, 16 * 200 + 5)
            work = backend.shared_work(prefixes, seq_lens, room)
            programs, members, shares = np.split(work[: sum(room)], np.cumsum(room)[:-1])
            assert len(work) - sum(room) <= backend.room(1, count)[1]
            members = members.reshape(-1)
            for ids, blocks in groups:
                for request in ids:
                    tokens, first, parts, place = shares[request].tolist()
                    assert tokens == 16 * blocks
                    mine = programs[first : first + parts]
                    assert (mine[:, 1] == tokens).all()
                    assert mine[:, 2].tolist() == list(range(parts))
                    assert (mine[:, 3] == parts).all()
                    assert place < queries
                    assert (members[mine[:, 0] + place] == request).all()
            alone = sorted({*range(count)} - {request for ids, _ in groups for request in ids})
            assert not shares[alone].any()


@pytest.mark.parametrize(
    ("capability", "chosen", "narrow"), [((8, 0), (8, 2), 8), ((9, 0), (4, 3), 8), ((10, 0), (4, 3), 4)]
)
def test_a_gpu_has_the_warps_and_stages_with_which_it_does_not_spill(monkeypatch, capability, chosen, narrow):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    backend = TritonBackend(shape(4, torch.bfloat16, 8, 256), 16, torch.device("cuda", 0))
    assert (backend.shape(512).warps, backend.shape(512).stages) == chosen
    assert backend.shared_shape.warps == 8
    assert TritonBackend(shape(8, torch.bfloat16, 64, 64), 16, torch.device("cuda", 0)).shape(512).warps == narrow


def test_shapes():
    assert shared_shape(4, 128, torch.bfloat16).rows == 64
    assert shared_shape(80, 128, torch.bfloat16).rows == 128
    assert shared_shape(3, 64, torch.float32) == triton_backend.program_shape(1, 3, 64, torch.float32)


def test_few_requests_have_no_room_for_it(monkeypatch):
    monkeypatch.setattr(triton_backend, "FEWEST_SHARING", 8)
    assert llama().shared_room(7) is None
    assert llama().shared_room(8).requests == 8
