"""Tests what the index knows of an engine whose cache changes."""

import random
from collections.abc import Iterable

import numpy as np

from tokenloom.request.prefix_schedule import specimen_hash
from tokenloom.services.coordinator.cache_followers import SLICE_BLOCKS, EngineCache
from tokenloom.services.coordinator.prefixes.prefix_index import PrefixIndex
from tokenloom.services.coordinator.prefixes.state_boundaries import StateBoundaries
from tokenloom.v1.coordinator_pb2 import EngineIdentity
from tokenloom.v1.engine_pb2 import PrefixChain, PrefixChanges, WatchKVEventsResponse
from tokenloom.v1.types_pb2 import Fingerprint

IDENTITY = EngineIdentity(engine_id="a", epoch=7, fingerprint=Fingerprint(block_size=16), num_kv_blocks=10_000)


class Followed:
    """A cache, and the index that it keeps."""

    def __init__(self) -> None:
        self.index = PrefixIndex(1 << 20)
        self.index.open(0, IDENTITY.num_kv_blocks)
        self.states = StateBoundaries()
        self.states.open(0, 10, 16)
        self.cache = EngineCache(self.index, self.states, IDENTITY, 0)

    def pick(self, blocks: Iterable[int]) -> None:
        self.index.add(self.index.find(list(blocks)), 0)

    def num_known(self, blocks: Iterable[int]) -> int:
        counts = self.index.num_blocks(self.index.find(list(blocks)), 1)
        return 0 if counts is None else int(counts[0])

    def num_begun(self, blocks: list[int]) -> int:
        """Returns after how many blocks a kept state lies."""
        counts = np.zeros(1, np.int64)
        self.states.put_into(counts, blocks)
        return int(counts[0])

    def take(self, first: int, last: int, **changes: object) -> int:
        """Returns the number of slices."""
        prefix_changes = PrefixChanges(first_sequence=first, **changes)  # type: ignore[arg-type]
        response = WatchKVEventsResponse(sequence=last, engine_epoch=7, prefix_changes=prefix_changes)
        return len(list(self.cache.take(response)))


def test_evicted_blocks_attract_no_more_and_stored_ones_do() -> None:
    followed = Followed()
    followed.pick([1, 2, 3])
    followed.take(5, 6, removed=[3, 2, 99], stored=[PrefixChain(parent=1, blocks=[4, 5]), PrefixChain(blocks=[11])])
    assert [followed.num_known(each) for each in ([1, 2, 3], [1, 4, 5], [11])] == [1, 3, 1]
    assert followed.cache.wanted == 7


def test_after_a_gap_only_what_comes_then_is_known() -> None:
    followed = Followed()
    followed.take(1, 2, stored=[PrefixChain(blocks=[1, 2])])
    followed.pick([5, 6])
    followed.take(4, 4, stored=[PrefixChain(blocks=[7])])  # without the third batch
    assert [followed.num_known(each) for each in ([1, 2], [5, 6], [7])] == [0, 0, 1]
    followed.pick([1, 2])
    followed.take(5, 5)
    assert followed.num_known([1, 2]) == 2


def test_a_cleared_cache_is_known_to_be_empty() -> None:
    followed = Followed()
    followed.pick([1, 2])
    followed.take(1, 1, all_cleared=True, stored=[PrefixChain(blocks=[3])])
    assert [followed.num_known(each) for each in ([1, 2], [3])] == [0, 1]


def test_kept_states_are_followed() -> None:
    followed = Followed()
    followed.take(1, 1, states_stored=[2, 4])
    assert [followed.num_begun(each) for each in ([1, 2, 3, 4, 5], [1, 2, 3], [1])] == [4, 2, 0]
    followed.take(2, 2, states_removed=[4])
    assert followed.num_begun([1, 2, 3, 4, 5]) == 2
    followed.take(3, 3, all_cleared=True, states_stored=[7])
    assert [followed.num_begun(each) for each in ([1, 2], [6, 7])] == [0, 2]
    followed.take(5, 5)
    assert followed.num_begun([6, 7]) == 0, "after a gap"


def test_many_changes_are_applied_in_slices_and_may_be_applied_again() -> None:
    followed = Followed()
    generator = random.Random(1)
    prompts = [[generator.getrandbits(64) for _ in range(100)] for _ in range(40)]
    followed.take(1, 1, stored=[PrefixChain(blocks=blocks) for blocks in prompts])
    assert all(followed.num_known(blocks) == 100 for blocks in prompts)
    gone = [block for blocks in prompts[1:] for block in blocks]
    changes = PrefixChanges(first_sequence=2, removed=gone)
    half = followed.cache.take(WatchKVEventsResponse(sequence=2, engine_epoch=7, prefix_changes=changes))
    next(half)
    half.close()  # the call ended before all was applied
    assert followed.take(2, 2, removed=gone) == -(-len(gone) // SLICE_BLOCKS)
    assert [followed.num_known(blocks) for blocks in prompts] == [100] + [0] * 39


def test_events_of_no_use_are_seen_at_once() -> None:
    cache = Followed().cache

    def objection(epoch: int, specimen: bytes) -> str:
        changes = PrefixChanges(first_sequence=1, specimen_hash=specimen)
        return cache.objection(WatchKVEventsResponse(engine_epoch=epoch, prefix_changes=changes))

    assert not objection(7, specimen_hash(16))
    assert "incarnation" in objection(8, specimen_hash(16))
    for foreign in (specimen_hash(16, b"seed"), specimen_hash(32), b""):
        assert "hashes" in objection(7, foreign)
