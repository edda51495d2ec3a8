"""Groups of requests that begin alike, and attention that reads what they share once."""

import shutil

import numpy as np
import pytest
import torch

from tests.gpu_worker.attention.steps import BLOCK_SIZE, CPU, make_step, run, shape
from tokenloom.gpu_worker.attention import shared_prefix
from tokenloom.gpu_worker.attention.cpu_backend import CPUBackend
from tokenloom.gpu_worker.attention.shared_prefix import SharedPrefixFinder, find_shared_prefixes
from tokenloom.gpu_worker.attention.torch_backend import ReferenceBackend


def find(tables, seq_lens, query_lens=None, fewest=2):
    """[(members, shared blocks)] of tables of unequal length."""
    width = max(map(len, tables))
    padded = np.array([table + [0] * (width - len(table)) for table in tables], dtype=np.int32)
    queries = np.array(query_lens or [1] * len(tables))
    found = find_shared_prefixes(queries, np.array(seq_lens), padded, BLOCK_SIZE, fewest, BLOCK_SIZE)
    bounds = zip(found.starts[:-1], found.starts[1:], found.lengths, strict=True)
    return [(found.members[a:b].tolist(), int(length) // BLOCK_SIZE) for a, b, length in bounds]


@pytest.fixture(autouse=True)
def short_prefixes(monkeypatch):
    monkeypatch.setattr(shared_prefix, "_FEWEST_TOKENS", BLOCK_SIZE)


def test_nothing_shared():
    assert find([[1, 2], [3, 4]], [20, 30]) == []


def test_few_members():
    tables = [[1, 2, 3], [1, 2, 4], [1, 2, 5]]
    assert find(tables, [40] * 3, fewest=4) == []
    assert find(tables, [40] * 3, fewest=3) == [([0, 1, 2], 2)]


def test_groups():
    tables = [[1, 2, 3, 9], [5, 6, 8], [1, 2, 3, 4], [5, 6, 7], [1, 2, 3, 10], [11]]
    assert find(tables, [50, 40, 60, 33, 50, 3]) == [([0, 2, 4], 3), ([1, 3], 2)]


def test_the_block_of_the_query_is_no_prefix():
    """A full one neither: its last position is the query's, which another request may not have written yet."""
    assert find([[1, 2], [1, 2]], [20, 20]) == [([0, 1], 1)]
    assert find([[1, 2], [1, 2]], [32, 32]) == [([0, 1], 1)]
    assert find([[1], [1]], [16, 16]) == []


def test_prefills_are_not_members():
    assert find([[1, 2, 3], [1, 2, 4], [1, 2, 5]], [40, 40, 40], [1, 8, 1]) == [([0, 2], 2)]


def test_one_that_leaves_early_does_not_shorten_the_others():
    tables = [[1, *range(10, 30)], [1, 2], [1, *range(10, 30)], [1, *range(10, 30)]]
    assert find(tables, [330, 20, 330, 330]) == [([0, 2, 3], 20)]


def test_a_short_prefix_of_many_outweighs_a_longer_one_of_few():
    tables = [[1, 2, 3, 40 + i] for i in range(8)] + [[1, 2, 3, 4, 50], [1, 2, 3, 4, 60]]
    assert find(tables, [50] * 8 + [70] * 2) == [(list(range(10)), 3)]


def test_each_has_a_block_more_in_common_with_the_next():
    """As where a conversation is asked about after each of its turns: each group lay in a call within another."""
    count = 1100
    tables = [[*range(1 + row), *[10_000 + row] * (count - row)] for row in range(count)]
    assert find(tables, [BLOCK_SIZE * count + 1] * count) == [(list(range(549, count)), 550)]


SHARED = [[*range(8), 10], [*range(8), 20]]


def finding(tables, seq_lens, query_lens=(1, 1)):
    return np.array(query_lens[: len(seq_lens)]), np.array(seq_lens), np.array(tables, dtype=np.int32)


def test_groups_stay_while_their_members_decode_on():
    finder = SharedPrefixFinder(BLOCK_SIZE, 2)
    first = finder.find(*finding(SHARED, [130, 130]))
    assert (first.members.tolist(), first.lengths.tolist()) == ([0, 1], [8 * BLOCK_SIZE])
    for length in (131, 144):
        assert finder.find(*finding(SHARED, [length, length])) is first
    assert finder.find(*finding([[*row, 30 + row[-1]] for row in SHARED], [145, 145])) is first


@pytest.mark.parametrize(
    ("tables", "seq_lens", "query_lens"),
    [
        ([[*range(8), 10], [0, 1, 2, 99, *range(4, 8), 20]], [131, 131], [1, 1]),
        (SHARED, [131, 100], [1, 1]),
        (SHARED, [131, 131], [1, 2]),
        (SHARED[:1], [131], [1]),
        ([list(range(8))] * 2, [128, 128], [1, 1]),
    ],
    ids=["another block", "shorter", "a prefill", "one left", "fewer blocks"],
)
def test_groups_are_found_anew_when_their_members_change(tables, seq_lens, query_lens):
    finder = SharedPrefixFinder(BLOCK_SIZE, 2)
    finder.find(*finding(SHARED, [130, 130]))
    step = finding(tables, seq_lens, query_lens)
    found, expected = finder.find(*step), find_shared_prefixes(*step, BLOCK_SIZE, 2, BLOCK_SIZE)
    assert (found.members.tolist(), found.lengths.tolist()) == (expected.members.tolist(), expected.lengths.tolist())


@pytest.mark.skipif(not shutil.which("g++"), reason="no C++ compiler")
@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("num_heads", [2, 4, 6, 20])
@pytest.mark.parametrize("threads", [1, 2])
def test_equals_the_reference(num_heads, window, threads):
    """Two groups, larger than a tile or not, beside others and a prefill; a member is so long that it is split."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    config = shape(2, num_heads=num_heads)
    query_lens = [1] * 24 + [30] + [1] * 3
    seq_lens = [70 + 3 * i for i in range(23)] + [1500, 90, 200, 60, 17]
    step = make_step(query_lens, seq_lens, num_heads, config)
    tables = step.arrays["block_tables"]
    tables[:20, :4] = tables[0, :4]
    tables[20:24, :8] = tables[20, :8]
    backend = CPUBackend(config, BLOCK_SIZE, CPU)
    backend.prefixes.fewest_members = 2
    found, _ = run(backend, step, window)
    expected, _ = run(ReferenceBackend(config, BLOCK_SIZE, CPU), step, window)
    torch.set_num_threads(before)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=2e-6)
