"""Free blocks leave in the order of their next use: those of sessions by when turns are likely, others by their last
one."""

from collections import OrderedDict

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tokenloom.engine_core.data.request import SessionReturn
from tokenloom.engine_core.kv_cache.block_pool import BlockPool
from tokenloom.engine_core.kv_cache.kept_blocks import KEPT_WEIGHT, OTHERS_WEIGHT


class Clock:
    """Nanoseconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 1000

    def __call__(self) -> int:
        return self.now


def turn_at(now: int, branch: int, returns: int, keep: int = 0) -> SessionReturn:
    return SessionReturn(branch, now, now + returns, now + keep if keep else 0)


class Cache:
    """A pool, and prompts that run in it."""

    def __init__(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.clock = self.pool.kept.now = Clock()

    def run(self, *names: str, branch: int = 0, after: int = 0, returns: int = 0, keep: int = 0) -> list[int]:
        """Run a prompt of blocks with these contents. ``after``: nanoseconds before it; ``returns``: of a turn, until
        the next; ``keep``: for which the client wants it kept."""
        self.clock.now += after
        hits = list[int]()
        for name in names:
            if (block_id := self.pool.find(name.encode())) is None:
                break
            hits.append(block_id)
        self.pool.share(hits)
        fresh = self.pool.allocate(len(names) - len(hits))
        for block_id, name in zip(fresh, names[len(hits) :], strict=True):
            self.pool.register(block_id, name.encode())
        table = [*hits, *fresh]
        if branch:
            self.pool.release_turn(table, turn_at(self.clock.now, branch, returns, keep))
        else:
            self.pool.release(table)
        return hits

    def evict(self, count: int) -> set[str]:
        """Return what so many more blocks evict."""
        before = set(self.pool._by_hash)
        self.pool.allocate(self.pool.num_blank + count)
        return {name.decode() for name in before - set(self.pool._by_hash)}


def names(letter: str, count: int) -> list[str]:
    return [f"{letter}{index}" for index in range(count)]


def test_a_turn_that_is_due_sooner_keeps_its_blocks() -> None:
    cache = Cache(8)
    cache.run(*names("a", 4), branch=1, returns=100)
    cache.run(*names("b", 4), branch=2, returns=500, after=1)
    assert cache.evict(4) == set(names("b", 4)), "the one used last is due last"


def test_an_overdue_turn_is_as_far_away_as_the_one_before() -> None:
    cache = Cache(8)
    cache.run(*names("a", 4), branch=1, returns=10)
    cache.run(*names("b", 4), branch=2, returns=400, after=1)
    cache.clock.now += 150
    assert cache.evict(2) == {"b3", "b2"}, "151 since the one, 250 until the other"
    cache.clock.now += 100
    assert cache.evict(2) == {"a3", "a2"}


def test_the_end_of_a_turn_goes_before_its_beginning_and_comes_back_to_the_rest() -> None:
    cache = Cache(8)
    cache.run(*names("a", 8), branch=1, returns=10)
    assert cache.evict(3) == {"a7", "a6", "a5"}
    assert cache.pool.find(b"a4") is not None


def test_the_beginning_that_lines_share_outlives_each_of_them() -> None:
    cache = Cache(8)
    for branch, letter in enumerate("abc", 1):
        cache.run("s0", "s1", *names(letter, 2), branch=branch, returns=1000, after=10)
    assert cache.evict(6) == {*names("a", 2), *names("b", 2), *names("c", 2)}
    assert cache.evict(2) == {"s0", "s1"}


def test_blocks_without_a_session_count_as_unused_for_longer() -> None:
    cache = Cache(8)
    cache.run(*names("a", 4), branch=1, returns=100)
    cache.run(*names("p", 4), after=1)
    cache.clock.now += 20
    assert cache.evict(2) == {"p3", "p2"}, "80 of 4 * 20 against 79 until the turn"
    assert OTHERS_WEIGHT == 4


def test_a_session_that_never_returns_loses_its_blocks() -> None:
    cache = Cache(8)
    cache.run(*names("a", 4), branch=1, returns=10)
    for _ in range(60):
        cache.run(*names("p", 4), after=10)
    cache.clock.now += 1
    assert cache.evict(4) == set(names("a", 4))


def test_a_returning_turn_takes_its_blocks_and_leaves_none_behind() -> None:
    cache = Cache(8)
    cache.run(*names("a", 4), branch=1, returns=10)
    assert len(cache.run(*names("a", 6), branch=1, returns=10, after=5)) == 4
    kept = cache.pool.kept
    assert (kept.num_blocks, len(kept._to_come), len(kept._overdue)) == (6, 1, 0)


def test_forgotten_content_is_kept_no_more() -> None:
    cache = Cache(8)
    cache.run(*names("a", 4), branch=1, returns=10)
    cache.pool.forget_content([b"a1", b"a3"])
    assert (cache.pool.kept.num_blocks, cache.pool.num_blank, cache.pool.num_free) == (2, 6, 8)
    cache.pool.forget_all()
    assert (cache.pool.kept.num_blocks, cache.pool.num_blank, cache.pool.num_free) == (0, 8, 8)
    assert not cache.pool.kept._users
    assert not cache.pool.kept._to_come


def test_what_a_client_wants_kept_counts_as_unused_for_a_quarter_of_the_time_while_it_does() -> None:
    cache = Cache(8)
    cache.run(*names("a", 4), branch=1, keep=100)
    cache.run(*names("b", 4), branch=2, after=50)
    cache.clock.now += 20
    assert cache.evict(1) == {"b3"}, "70 // 4 against 20"
    cache.clock.now += 30
    assert cache.evict(1) == {"a3"}, "its time is over: 100 against 50"
    assert KEPT_WEIGHT == 4


def test_a_beginning_that_a_client_wants_kept_stays_with_the_line_that_used_it_last() -> None:
    cache = Cache(8)
    cache.run("s0", "s1", *names("a", 2), branch=1, keep=1000)
    cache.run("s0", "s1", *names("b", 2), branch=2, keep=1000, after=100)
    cache.run(*names("c", 2), branch=3, after=100)
    cache.clock.now += 60
    assert cache.evict(4) == {"a1", "a0", "c1", "c0"}, "260 // 4, then 60, and 160 // 4 for the rest"
    assert cache.pool.find(b"s1") is not None


BLOCKS = 12
letters, counts = st.sampled_from("abcd"), st.integers(1, 6)
times = st.integers(0, 30)
keeps = st.sampled_from([0, 0, 20, 200])


class PlainMachine(RuleBasedStateMachine):
    """Without sessions the order is that of an ordered dictionary: the least recently used content goes first."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = Cache(BLOCKS)
        self.order = OrderedDict[str, None]()

    @rule(letter=letters, count=counts, after=times)
    def run(self, letter: str, count: int, after: int) -> None:
        prompt = names(letter, count)
        num_hits = next((index for index, name in enumerate(prompt) if name not in self.order), count)
        assert len(self.cache.run(*prompt, after=after)) == num_hits
        for name in prompt[:num_hits]:
            del self.order[name]
        while len(self.order) + count > BLOCKS:
            self.order.popitem(last=False)
        # A prompt whose middle was evicted computes a second copy of what follows, which nothing finds.
        for name in reversed(prompt):
            if name not in self.order:
                self.order[name] = None

    @invariant()
    def is_least_recently_used(self) -> None:
        pool = self.cache.pool
        assert [pool.content_of(block_id) for block_id in pool._cached] == [name.encode() for name in self.order]
        assert set(pool._cached.values()) <= {None}, "the clock was not read"


class SessionMachine(RuleBasedStateMachine):
    """Each evicted block is the one whose next use is furthest away, by a plain reading of the rule."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = Cache(BLOCKS)
        self.held: list[list[int]] = []

    @rule(letter=letters, count=counts, after=times, branch=st.integers(0, 3), returns=st.integers(0, 60), keep=keeps)
    def run(self, letter: str, count: int, after: int, branch: int, returns: int, keep: int) -> None:
        if count <= self.cache.pool.num_free:
            self.cache.run(*names(letter, count), branch=branch, after=after, returns=returns, keep=keep)

    @rule(letter=letters, count=counts)
    def hold(self, letter: str, count: int) -> None:
        pool = self.cache.pool
        found = [block_id for name in names(letter, count) if (block_id := pool.find(name.encode())) is not None]
        pool.share(found)
        self.held.append(found)

    @precondition(lambda self: self.held)
    @rule(branch=st.integers(0, 3), returns=st.integers(0, 60), keep=keeps)
    def give_back(self, branch: int, returns: int, keep: int) -> None:
        pool, now = self.cache.pool, self.cache.clock.now
        if branch:
            pool.release_turn(self.held.pop(), turn_at(now, branch, returns, keep))
        else:
            pool.release(self.held.pop())

    @rule(letter=letters, count=counts)
    def forget(self, letter: str, count: int) -> None:
        self.cache.pool.forget_content([name.encode() for name in names(letter, count)])

    @rule(after=times)
    def evict_one(self, after: int) -> None:
        self.cache.clock.now += after
        pool, kept, now = self.cache.pool, self.cache.pool.kept, self.cache.clock.now
        if pool.num_blank or not pool.num_free:
            return
        away = dict[int, float]()
        if pool._cached:
            block_id, since = next(iter(pool._cached.items()))
            away[block_id] = float("inf") if since is None else OTHERS_WEIGHT * (now - since)
        for line in kept._kept.values():
            turn = line.turn
            since = (now - turn.began_ns) // (KEPT_WEIGHT if turn.keep_ns > now else 1)
            away[next(iter(line.blocks))] = since if turn.due_ns <= now else turn.due_ns - now
        if kept._shared:
            block_id, since = next(iter(kept._shared.items()))
            away[block_id] = now - since
        (chosen,) = pool.allocate(1)
        assert away[chosen] == max(away.values())
        pool.release([chosen])

    @invariant()
    def everything_is_counted_once(self) -> None:
        pool, kept = self.cache.pool, self.cache.pool.kept
        assert pool.num_free == pool.num_blank + len(pool._cached) + kept.num_blocks
        lines = [block_id for line in kept._kept.values() for block_id in line.blocks]
        assert sorted([*lines, *kept._shared]) == sorted(kept._kept_in)
        assert len(kept._kept_in) == kept.num_blocks
        assert all(line.blocks for line in kept._kept.values())
        keys = sorted(line.key for line in kept._kept.values())
        assert keys == sorted([*kept._to_come, *kept._overdue, *kept._wanted])
        assert len(kept._wanted_until) == len(kept._wanted)
        assert kept._wanted_until == sorted(kept._wanted_until)
        assert kept._wanted == sorted(kept._wanted)
        assert kept._to_come == sorted(kept._to_come)
        assert kept._overdue == sorted(kept._overdue)
        assert all(not pool.ref_counts[block_id] and pool.content_of(block_id) for block_id in kept._kept_in)
        assert all(pool.content_of(block_id) for block_id in kept._users), "what is lost is forgotten"


@pytest.mark.parametrize("machine", [PlainMachine, SessionMachine])
def test_the_order_is_that_of_a_plain_reading(machine: type[RuleBasedStateMachine]) -> None:
    case = machine.TestCase
    case.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
    case().runTest()
