"""Tests what the index of prefixes remembers, of each engine and of all."""

import random
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tokenloom.request.prefix_schedule import LEADING_BLOCKS, MAX_HASHES
from tokenloom.services.coordinator.prefixes.block_log import BlockHolders
from tokenloom.services.coordinator.prefixes.hash_table import HashTable, words_of
from tokenloom.services.coordinator.prefixes.prefix_index import PrefixIndex

MIB = 1 << 20
ROWS = 8


def match(index: PrefixIndex, hashes: Sequence[int], row: int) -> int:
    counts = index.num_blocks(index.find(hashes), ROWS)
    return 0 if counts is None else LEADING_BLOCKS.index(int(counts[row]))


def test_blocks_are_counted_as_the_hashes_name_them() -> None:
    index = opened(1 << 16, rows=2)
    hashes = list(range(1, MAX_HASHES + 1))
    add(index, hashes, 0)
    add(index, hashes[:200], 1)
    counts = index.num_blocks(index.find(hashes), 2)
    assert counts is not None
    assert counts.tolist() == [LEADING_BLOCKS[MAX_HASHES], LEADING_BLOCKS[200]]


def add(index: PrefixIndex, hashes: Sequence[int], row: int = 0) -> None:
    index.add(index.find(hashes), row)


def opened(num_blocks: int, rows: int = 1, max_bytes: int = MIB) -> PrefixIndex:
    index = PrefixIndex(max_bytes)
    for row in range(rows):
        index.open(row, num_blocks)
    return index


def test_it_counts_from_the_beginning() -> None:
    index = opened(100)
    add(index, [1, 2, 3, 4])
    prompts = ([1, 2, 9], [9, 2, 3], [1, 2, 3, 4, 5], [])
    assert [match(index, prompt, 0) for prompt in prompts] == [2, 0, 4, 0]


def test_engines_that_share_a_beginning_are_told_apart() -> None:
    index = opened(100, rows=3)
    add(index, [1, 2, 3, 4], 0)
    add(index, [1, 2, 3, 4, 5], 1)
    add(index, [1, 2, 7], 2)
    assert [match(index, [1, 2, 3, 4, 5], row) for row in range(3)] == [4, 5, 2]
    assert [match(index, [1, 2, 7, 8], row) for row in range(3)] == [2, 2, 3]


def test_of_an_engine_as_many_blocks_as_its_cache_holds_are_remembered_and_the_oldest_forgotten() -> None:
    index = opened(8)
    add(index, [1, 2, 3, 4])
    add(index, [11, 12, 13, 14])
    add(index, [1, 2])  # used again
    add(index, [21, 22])
    prompts = ([1, 2, 3, 4], [11, 12, 13, 14], [21, 22])
    assert [match(index, prompt, 0) for prompt in prompts] == [2, 4, 2]
    add(index, range(100, 120))  # more than it holds
    assert [match(index, prompt, 0) for prompt in (*prompts, range(100, 120))] == [0, 0, 0, 8]


def test_a_prompt_that_is_used_again_and_again_is_not_forgotten() -> None:
    index = opened(64)
    add(index, [1, 2, 3])
    for number in range(100):
        add(index, [1, 2, 3])
        add(index, [1000 * number + block for block in range(8)])
    assert match(index, [1, 2, 3], 0) == 3


def test_a_prompt_that_one_engine_gets_again_and_again_leaves_no_runs_behind() -> None:
    index = opened(2000, rows=2)
    for number in range(300):
        add(index, range(256), 0)
        add(index, range(256), number % 2)  # alone, and shared
    assert [len(index.hash_runs._runs[row]) for row in range(2)] == [1, 1]
    index.remove(range(256), 0)
    assert [match(index, range(256), row) for row in range(2)] == [0, 256]


def test_of_all_engines_the_most_recent_blocks_are_remembered_within_the_bytes() -> None:
    index = opened(1 << 16, rows=2, max_bytes=MIB)
    prompts = [[number << 32 | block for block in range(MAX_HASHES)] for number in range(300)]
    for number, prompt in enumerate(prompts):
        add(index, prompt, number % 2)
    remembered = [match(index, prompt, number % 2) for number, prompt in enumerate(prompts)]
    first = remembered.index(MAX_HASHES)
    assert remembered == [0] * first + [MAX_HASHES] * (300 - first)
    assert 36_000 <= sum(remembered) <= 74_000  # half to all of 0.75 of 1 MiB, in slots of 8 bytes that are 3/4 full
    assert match(index, prompts[-1], 1 - 299 % 2) == 0


def test_groups_of_engines_count_as_bytes_too() -> None:
    index = opened(1 << 16, rows=2, max_bytes=MIB)
    for number in range(8000):
        for row in range(2):
            add(index, [number << 32 | block for block in range(3)], row)
    held = sum(match(index, [number << 32], 0) for number in range(8000))
    assert 2500 < held < 5600  # half to all of 0.25 of 1 MiB, in groups of 48 bytes


def test_an_engine_that_is_gone_has_nothing_and_its_row_can_be_used_again() -> None:
    index = opened(100, rows=2)
    add(index, [1, 2, 3], 0)
    add(index, [1, 2, 3], 1)
    index.close(0)
    assert [match(index, [1, 2, 3], row) for row in range(2)] == [0, 3]
    index.open(0, 100)
    assert match(index, [1, 2, 3], 0) == 0
    add(index, [1], 0)
    assert [match(index, [1, 2, 3], row) for row in range(2)] == [1, 3]


def test_what_an_engine_evicted_attracts_no_more() -> None:
    index = opened(100, rows=2)
    for row in range(2):
        add(index, [1, 2, 3, 4], row)
    index.remove([4, 3, 99], 0)
    assert [match(index, [1, 2, 3, 4], row) for row in range(2)] == [2, 4]
    index.remove([1], 1)
    assert [match(index, [1, 2, 3, 4], row) for row in range(2)] == [2, 0]
    add(index, [1, 2, 3], 1)
    assert [match(index, [1, 2, 3, 4], row) for row in range(2)] == [2, 4]


def test_what_an_engine_stored_attracts_if_the_block_before_it_is_known() -> None:
    index = opened(100, rows=2)
    index.store(None, [1, 2], 0)
    index.store(2, [3], 0)
    index.store(2, [3], 1)  # it does not have what comes before
    index.store(7, [8], 1)
    assert [match(index, [1, 2, 3, 4], row) for row in range(2)] == [3, 0]
    assert match(index, [7, 8], 1) == 0


def test_blocks_that_continue_a_forgotten_one_are_left_out() -> None:
    index = opened(100)
    add(index, [1, 2])
    index._rotate()
    index.store(2, [3, 4], 0)
    add(index, [1, 2, 3, 4, 5])  # each block is in the table once
    index.store(5, [6], 0)
    assert match(index, [1, 2, 3, 4, 5, 6], 0) == 6


def test_a_gap_between_blocks_of_one_engine_ends_what_counts() -> None:
    index = opened(100, rows=2)
    for row in range(2):
        add(index, [1, 2, 3], row)
    index.remove([2], 0)
    assert [match(index, [1, 2, 3], row) for row in range(2)] == [1, 3]
    index.remove([2], 1)
    assert [match(index, [1, 2, 3], row) for row in range(2)] == [1, 1]
    add(index, [1, 2, 3], 1)
    assert [match(index, [1, 2, 3], row) for row in range(2)] == [1, 3]


def test_what_was_forgotten_and_is_evicted_later_leaves_the_others_alone() -> None:
    index = opened(8, rows=2)
    add(index, [1, 2], 0)
    add(index, [1, 2], 1)
    for block in range(10, 30):
        add(index, [block], 0)  # its cache has no room for the first prompt any more
    index.remove([1, 2], 0)
    index.remove([2, 1], 0)
    assert [match(index, [1, 2], row) for row in range(2)] == [0, 2]
    add(index, [1, 2], 0)
    assert [match(index, [1, 2], row) for row in range(2)] == [2, 2]


def test_hashes_that_no_engine_sends_do_no_harm() -> None:
    index = opened(100)
    add(index, [5, 5, 5, 0, (1 << 64) - 1])
    add(index, [0, 5])
    add(index, [])
    assert match(index, [5], 0) == 1


@pytest.mark.parametrize("count", [1, 300, 6000])
def test_a_table_finds_what_was_inserted_however_full_it_is(count: int) -> None:
    generator = random.Random(count)
    hashes = [generator.getrandbits(64) for _ in range(count)]
    table = HashTable(count)
    for begin in range(0, count, 256):
        part = hashes[begin : begin + 256]
        table.insert(words_of(part), np.arange(begin, begin + len(part)))
    assert table.num_entries == count
    assert table.find(words_of(hashes)).tolist() == list(range(count))
    others = words_of([generator.getrandbits(64) for _ in range(500)])
    assert (table.find(others) == -1).all()
    assert [table.get(int(word)) for word in words_of(hashes[-20:])] == list(range(count))[-20:]
    assert table.get(int(others[0])) == -1


def test_a_table_finds_what_was_added_one_by_one() -> None:
    generator = random.Random(1)
    words = words_of([generator.getrandbits(64) for _ in range(2000)])
    table = HashTable(2000)
    for value, word in enumerate(words[:1500].tolist()):
        table.add(word, value)
    table.insert(words[1500:], np.arange(1500, 2000))
    assert table.find(words).tolist() == list(range(2000))
    assert [table.get(word) for word in words.tolist()] == list(range(2000))


def test_rooms_of_groups_are_used_again() -> None:
    holders, owner, generator = BlockHolders(), np.arange(300), random.Random(4)
    groups: dict[int, list[int]] = {}
    for step in range(3000):
        if len(groups) < 20 or (len(groups) < 40 and generator.random() < 0.5):
            members = generator.sample(range(1, 300), generator.randrange(1, 40))
            number = holders.add(members, 2)
            assert number not in groups
            groups[number] = members
        elif generator.random() < 0.3:
            number = generator.choice(sorted(groups))
            at = generator.randrange(-1, len(groups[number]))
            holders.put(number, at, 1000 + step if at >= 0 else 299, owner)
            groups[number][at:] = [1000 + step, *groups[number][at + 1 :]] if at >= 0 else [groups[number][-1], 299]
            if at >= 0:  # a run that is known, so that it is not left out as a forgotten one
                holders.put(number, at, 298, owner)
                groups[number][at] = 298
        else:
            number = generator.choice(sorted(groups))
            holders.leave(number, 1)
            assert holders.members(number).tolist() == groups[number]
            holders.leave(number, 1)
            assert not len(holders.members(number))
            del groups[number]
        for number in generator.sample(sorted(groups), 3) if len(groups) > 3 else ():
            assert holders.members(number).tolist() == groups[number]
    assert len(holders.begins) <= 64
    assert len(holders.runs) <= 8192
    for number in groups:
        holders.leave(number, 2)
    assert holders.num_bytes == 0


def test_a_group_leaves_out_what_was_forgotten_before_it_needs_more_room() -> None:
    holders, owner = BlockHolders(), np.array([-1, 0, 1, -1, 3, 4])
    number = holders.add([1, 2, 3, 4], 1)
    holders.put(number, -1, 5, owner)
    assert holders.members(number).tolist() == [1, 2, 4, 5]
    assert holders.rooms[number] == 4
    holders.put(number, -1, 5, owner)
    assert (holders.members(number).tolist(), holders.rooms[number]) == ([1, 2, 4, 5, 5], 8)


class PrefixIndexMachine(RuleBasedStateMachine):
    """Any history of picks, evictions and restarts, in caches that are never full: a set of blocks for each engine."""

    prompts = st.lists(st.integers(0, 2), min_size=1, max_size=6)
    rows = st.integers(0, 3)

    def __init__(self) -> None:
        super().__init__()
        self.index = opened(1000, rows=4)
        self.held: list[set[int]] = [set() for _ in range(4)]
        self.asked: set[tuple[int, ...]] = set()

    @staticmethod
    def hashes(prompt: list[int]) -> tuple[int, ...]:
        """Chained, as those of real prompts."""
        return tuple(hash(tuple(prompt[: end + 1])) & 0xFFFFFFFF for end in range(len(prompt)))

    @rule(prompt=prompts, row=rows)
    def add(self, prompt: list[int], row: int) -> None:
        hashes = self.hashes(prompt)
        self.asked.add(hashes)
        add(self.index, hashes, row)
        self.held[row].update(hashes)

    @precondition(lambda self: self.asked)
    @rule(data=st.data(), row=rows)
    def store(self, data: st.DataObject, row: int) -> None:
        hashes = data.draw(st.sampled_from(sorted(self.asked)))
        first = data.draw(st.integers(0, len(hashes) - 1))
        self.index.store(hashes[first - 1] if first else None, hashes[first:], row)
        if self.count(hashes[:first], row) == first:
            self.held[row].update(hashes)

    @precondition(lambda self: self.asked)
    @rule(data=st.data(), row=rows)
    def remove(self, data: st.DataObject, row: int) -> None:
        hashes = data.draw(st.sampled_from(sorted(self.asked)))
        first = data.draw(st.integers(0, len(hashes) - 1))
        # A cache evicts a block after all that continue it.
        continued = [each for each in self.asked if each[: first + 1] == hashes[: first + 1]]
        evicted = sorted({block for each in continued for block in each[first:]})
        self.index.remove(evicted, row)
        self.held[row].difference_update(evicted)

    @rule(row=rows)
    def restart(self, row: int) -> None:
        self.index.open(row, 1000)
        self.held[row].clear()

    @rule()
    def rotate(self) -> None:
        self.index._rotate()
        for hashes in sorted(self.asked):  # whatever is used again stays
            for row in range(4):
                if count := self.count(hashes, row):
                    add(self.index, hashes[:count], row)

    def count(self, hashes: tuple[int, ...], row: int) -> int:
        return next((end for end, each in enumerate(hashes) if each not in self.held[row]), len(hashes))

    @invariant()
    def every_prompt_is_matched_as_far_as_the_engine_has_it(self) -> None:
        for hashes in self.asked:
            assert [match(self.index, hashes, row) for row in range(4)] == [self.count(hashes, row) for row in range(4)]


TestPrefixIndexMachine = PrefixIndexMachine.TestCase
TestPrefixIndexMachine.settings = settings(max_examples=50, stateful_step_count=25, deadline=None)
