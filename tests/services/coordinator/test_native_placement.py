"""Native code finds the same prefixes and chooses the same engines as Python, after any history."""

import asyncio
import random
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import invariant

from tests.services.coordinator.engines.test_engine_registry import Clock, identity, report
from tests.services.coordinator.prefixes.test_prefix_index import PrefixIndexMachine, opened
from tokenloom.gpu_worker.kernels.compiler import KernelsUnavailable
from tokenloom.process.fall_backs import FallBacks
from tokenloom.request.errors import TokenloomError
from tokenloom.request.prefix_schedule import MAX_HASHES
from tokenloom.services.coordinator import native_placement
from tokenloom.services.coordinator.engines.engine_placement import Policy
from tokenloom.services.coordinator.engines.engine_record import EngineRecord
from tokenloom.services.coordinator.engines.engine_registry import Registry
from tokenloom.services.coordinator.native_placement import (
    NativeComparison,
    NativeIndex,
    load_library,
    use_natively,
)
from tokenloom.services.coordinator.prefixes.hash_table import words_of
from tokenloom.services.coordinator.prefixes.prefix_index import PrefixIndex
from tokenloom.services.coordinator.service import place_natively
from tokenloom.services.runtime.placement import pairing
from tokenloom.services.runtime.placement.engine_columns import EngineColumns
from tokenloom.services.runtime.placement.pool import Candidates
from tokenloom.services.runtime.placement.rules import Ask, Home, Rule, cost, score
from tokenloom.v1.coordinator_pb2 import EngineRef, EngineState, PickRequest
from tokenloom.v1.engine_pb2 import PickId
from tokenloom.v1.types_pb2 import EngineRole

BOTH, PREFILL, DECODE = EngineRole.ENGINE_ROLE_BOTH, EngineRole.ENGINE_ROLE_PREFILL, EngineRole.ENGINE_ROLE_DECODE
ROWS = 8


class Counted:
    """The library, which counts the engines that it has chosen and the prompts that it has added."""

    def __init__(self) -> None:
        self._library = load_library()
        self.find_prefix, self.count_prefix = self._library.find_prefix, self._library.count_prefix
        self.num_compared = self.num_added = 0

    def add_prefix(self, *arguments: int) -> int:
        num_emptied = int(self._library.add_prefix(*arguments))
        self.num_added += num_emptied >= 0
        return num_emptied

    def best_engine(self, *addresses: int) -> int:
        self.num_compared += 1
        return int(self._library.best_engine(*addresses))


def random_columns(generator: random.Random, count: int) -> EngineColumns:
    """Engines of few different loads, so that many are equal; some are late, full or without a measured speed."""
    columns = EngineColumns()
    most, late = generator.choice((2, 40)), generator.choice((0.0, 0.1))
    for _ in range(count):
        row = columns.add()
        columns.waiting[row], columns.running[row] = generator.randrange(most), generator.randrange(most)
        columns.seats[row] = generator.choice((0, 8, 64))
        columns.free_tokens[row] = generator.choice((100_000, 100_000, 90_000, generator.choice((700, -3))))
        columns.uncached_tokens[row] = generator.choice((0.0, 500.0, generator.random() * 9000))
        columns.session_share[row] = generator.choice((0.0, 0.3, generator.random() * 6))
        columns.computed_rate[row] = generator.choice((0.0, 3000.0, 9000.0))
        columns.step_seconds[row] = generator.choice((0.0, 0.01, 0.03))
        columns.last_turn[row] = generator.choice((row, generator.randrange(100), -(1 << 62) + row))
        columns.set_late(row, generator.random() < late)
    return columns


def random_ask(generator: random.Random, columns: EngineColumns, count: int) -> Ask:
    prompt_tokens = generator.choice((1, 600, 40_000, 100_000))
    cached = None
    if generator.random() < 0.6:
        cached = np.zeros(columns.capacity, np.int64)
        for row in generator.sample(range(count), generator.randrange(count + 1)):
            cached[row] = generator.choice((prompt_tokens, prompt_tokens // 2, 16))
    rows = range(-1, count)
    home = Home(generator.choice((None, *range(count))), generator.randrange(prompt_tokens + 1), generator.random())
    return Ask(
        generator.choice((PREFILL, DECODE, BOTH)),
        prompt_tokens,
        cached,
        generator.choice(((), generator.sample(rows, 2))),
        generator.choice((None, home)),
    )


@pytest.mark.parametrize("rule", [score, cost])
@pytest.mark.parametrize("count", [2, 3, 40, 300])
def test_the_same_engine_is_best(rule: Rule, count: int) -> None:
    generator, library = random.Random(count), Counted()
    native = NativeComparison(library)  # type: ignore[arg-type]
    for _ in range(40 if count < 100 else 10):
        columns = random_columns(generator, count)
        leaves_out = generator.choice((0, count // 3))  # drained, or not of the pool
        rows = sorted(generator.sample(range(count), count - leaves_out))
        candidates = Candidates(np.array(rows, np.intp))
        for _ in range(10):
            ask = random_ask(generator, columns, count)
            expected = pairing.best(columns, Candidates(candidates.rows), ask, rule)
            assert native.best(columns, candidates, ask, rule) == expected, ask
            columns.waiting[expected] += 1  # seen without another look
    assert library.num_compared > 90


def test_engines_that_are_all_full_have_the_speeds_that_they_had() -> None:
    """Speeds are measured anew by the number of reports, on both sides: an overloaded mesh is no exception."""
    generator, native = random.Random(2), NativeComparison(load_library())
    for _ in range(20):
        columns = random_columns(generator, 12)
        columns.free_tokens[:] = 10
        candidates, others = Candidates(np.arange(12)), Candidates(np.arange(12))
        ask = Ask(PREFILL, 1000)
        for _ in range(6):
            assert native.best(columns, candidates, ask, cost) == pairing.best(columns, others, ask, cost)
            row = generator.randrange(12)
            columns.step_seconds[row], columns.computed_rate[row] = generator.random() / 10, generator.random() * 9000


def test_columns_that_grow_are_seen() -> None:
    generator, native = random.Random(1), NativeComparison(load_library())
    columns = random_columns(generator, 16)
    candidates = Candidates(np.arange(16))
    ask = Ask(PREFILL, 10)
    assert native.best(columns, candidates, ask, score) == pairing.best(columns, candidates, ask, score)
    columns.add()
    columns.waiting[:] = 50
    columns.waiting[5], columns.is_late[:], columns.free_tokens[:] = 0, False, 1000
    columns.running[5] = 0
    assert native.best(columns, candidates, ask, score) == 5


class NativeIndexMachine(PrefixIndexMachine):
    """The histories of an index to which native code adds, each prompt of which is looked up both ways."""

    def __init__(self) -> None:
        super().__init__()
        self.native = self.index.native = NativeIndex(load_library())

    @invariant()
    def native_lookups_see_the_same(self) -> None:
        for hashes in self.asked:
            assert_same(self.index, self.native, hashes)


TestNativeIndexMachine = NativeIndexMachine.TestCase
TestNativeIndexMachine.settings = settings(max_examples=20, stateful_step_count=25, deadline=None)


def assert_same(index: PrefixIndex, native: NativeIndex, hashes: Sequence[int], num_rows: int = ROWS) -> None:
    path = index.find(hashes)
    counts = index.num_blocks(path, num_rows)
    found, found_counts = native.lookup(index, words_of(hashes), num_rows)
    assert (found.num_known, found.runs) == (path.num_known, path.runs)
    assert (None if counts is None else counts.tolist()) == (None if found_counts is None else found_counts.tolist())


def assert_equal(one: PrefixIndex, other: PrefixIndex) -> None:
    """The same blocks, groups and runs, at the same places."""
    for ours, theirs in ((one.young, other.young), (one.old, other.old)):
        assert ours.log.num_blocks == theirs.log.num_blocks
        assert ours.log.starts.num_entries == theirs.log.starts.num_entries
        assert np.array_equal(ours.log.starts.rows, theirs.log.starts.rows)
        assert np.array_equal(ours.log.starts.used, theirs.log.starts.used)
        assert np.array_equal(ours.log.words, theirs.log.words)
        assert np.array_equal(ours.log.values, theirs.log.values)
        assert np.array_equal(ours.groups.state, theirs.groups.state)
        assert np.array_equal(ours.groups.free_rooms, theirs.groups.free_rooms)
        num_groups, num_runs = ours.groups.state.tolist()[:2]
        for name in ("begins", "sizes", "rooms", "num_blocks"):
            assert np.array_equal(getattr(ours.groups, name)[:num_groups], getattr(theirs.groups, name)[:num_groups])
        assert np.array_equal(ours.groups.runs[:num_runs], theirs.groups.runs[:num_runs])
    assert np.array_equal(one.hash_runs.owner, other.hash_runs.owner)
    assert np.array_equal(one.hash_runs.counts, other.hash_runs.counts)
    assert one.hash_runs._runs == other.hash_runs._runs


def test_long_prompts_in_full_generations_are_found() -> None:
    """Two generations of some thousand blocks, which rotate again and again; beginnings that many engines have."""
    generator, index = random.Random(5), opened(3000, rows=40, max_bytes=1 << 17)
    beside, library = opened(3000, rows=40, max_bytes=1 << 17), Counted()
    native = index.native = NativeIndex(library)  # type: ignore[arg-type]
    prefixes = [[generator.getrandbits(64) for _ in range(MAX_HASHES)] for _ in range(5)]
    rotations = 0
    for _ in range(400):
        length = generator.randrange(MAX_HASHES + 1)
        prompt = generator.choice(prefixes)[:length] + [generator.getrandbits(64) for _ in range(MAX_HASHES - length)]
        assert_same(index, native, prompt, 40)
        young, row, other = index.young, generator.randrange(40), generator.randrange(40)
        drawn = generator.random()
        for each in (index, beside):
            each.add(each.lookup(words_of(prompt), 40)[0], row)
            if drawn < 0.05:
                each.remove(prompt[max(length - 3, 0) : length + 3], other)
            elif drawn < 0.1:
                each.store(prompt[5], prompt[6:], other)
            elif drawn < 0.12:
                each.open(other, 3000)
        rotations += index.young is not young
        assert_equal(index, beside)
    assert rotations > 5
    assert library.num_added > 390


class History:
    """Makes the same random things happen to several registries."""

    def __init__(self, registries: Sequence[Registry], clock: Clock, seed: int) -> None:
        self.registries, self.clock, self.generator = registries, clock, random.Random(seed)
        self.records: dict[str, list[EngineRecord]] = {}
        self.prompts = [[self.generator.getrandbits(64) for _ in range(MAX_HASHES)] for _ in range(6)]
        self.placed: dict[str, list[PickId]] = {}

    def each(self, act: Callable[[Registry, int], object]) -> list[object]:
        return [act(registry, number) for number, registry in enumerate(self.registries)]

    def join(self) -> None:
        name = f"e{self.generator.randrange(48)}"
        if name in self.records:
            return
        engine = identity(name, epoch=self.generator.randrange(1, 1 << 30))
        engine.num_kv_blocks = self.generator.choice((64, 4096))
        first = self.report(name)
        self.records[name] = [registry.join(engine, first) for registry in self.registries]

    def leave(self) -> None:
        name = self.generator.choice(sorted(self.records))
        records = self.records.pop(name)
        self.placed.pop(name, None)
        self.each(lambda registry, number: registry.leave(records[number]))

    def report(self, name: str) -> object:
        draw = self.generator.randrange
        states = EngineState.ENGINE_STATE_SERVING, EngineState.ENGINE_STATE_DRAINING
        return report(
            waiting=draw(3),
            running=draw(4),
            free_kv_blocks=self.generator.choice((4096, 40)),
            state=states[not draw(12)],
            computed_tokens_per_second=self.generator.choice((0, 4000)),
            picks_arrived=self.placed.pop(name, []),
        )

    def tell(self) -> None:
        name = self.generator.choice(sorted(self.records))
        told = self.report(name)
        self.each(lambda registry, number: registry.report(self.records[name][number], told))  # type: ignore[arg-type]

    def wait(self) -> None:
        self.clock.now += self.generator.choice((0.01, 0.4))
        self.each(lambda registry, _: registry.refresh())

    def pick(self) -> None:
        length = self.generator.randrange(MAX_HASHES + 1)
        end = self.generator.randrange(MAX_HASHES - length + 1)
        hashes = self.generator.choice(self.prompts)[:length] + [self.generator.getrandbits(64) for _ in range(end)]
        if end and not self.generator.randrange(3):
            self.prompts[self.generator.randrange(len(self.prompts))] = hashes + self.prompts[0][: MAX_HASHES - end]
        excluded = [self.records[name][0].identity for name in sorted(self.records) if not self.generator.randrange(9)]
        request = PickRequest(
            role=self.generator.choice((PREFILL, DECODE, BOTH)),
            prompt_tokens=self.generator.choice((len(hashes) * 16 + 7, 100_000 if length > 200 else 30)),
            block_hash_prefixes=hashes,
            session=self.generator.choice((0, 0, 1, 2)),
            exclude=[EngineRef(engine_id=each.engine_id, epoch=each.epoch) for each in excluded],
        )
        first, *others = self.each(lambda registry, _: _outcome(registry, request))
        assert all(other == first for other in others), request
        if not isinstance(first, str):
            name, number = first[0], first[2]  # type: ignore[index]
            self.placed.setdefault(name, []).append(PickId(coordinator_epoch=1, number=number))


def _outcome(registry: Registry, request: PickRequest) -> object:
    try:
        placed = registry.pick(request)
    except TokenloomError as error:
        return error.reason
    return placed.engine.engine_id, placed.whole_request, placed.number, placed.session


@pytest.mark.parametrize("rule", [score, cost])
def test_registries_choose_alike_after_any_history(rule: Rule) -> None:
    library, clock = Counted(), Clock()
    registries = [Registry(1, clock, policy=Policy(128, rule), settle_seconds=0.0) for _ in range(2)]
    use_natively(registries[1], library)  # type: ignore[arg-type]
    history = History(registries, clock, seed=3)
    for _ in range(48):
        history.join()
    acts = [history.pick] * 12 + [history.tell] * 8 + [history.wait, history.join, history.leave]
    for _ in range(1500):
        history.generator.choice(acts)()
    assert_equal(registries[0].prefixes, registries[1].prefixes)
    assert library.num_compared > 100
    assert library.num_added > 200


async def test_a_registry_places_natively_once_it_has_many_engines() -> None:
    fall_backs = FallBacks()
    registry, has_many = Registry(1, Clock(), policy=Policy(128, score)), asyncio.Event()
    task = asyncio.create_task(place_natively(registry, has_many, fall_backs))
    await asyncio.sleep(0)
    assert registry.prefixes.native is None
    has_many.set()
    await task
    assert registry.prefixes.native is not None
    assert registry.placing.best != pairing.best
    assert not fall_backs.own()


async def test_python_goes_on_where_nothing_can_be_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    fall_backs = FallBacks()

    def fail() -> None:
        raise KernelsUnavailable("there is no C++ compiler (g++)")

    monkeypatch.setattr(native_placement, "load_library", fail)
    registry, has_many = Registry(1, Clock(), policy=Policy(128, score)), asyncio.Event()
    has_many.set()
    await place_natively(registry, has_many, fall_backs)
    assert registry.prefixes.native is None
    assert registry.placing.best == pairing.best
    assert fall_backs.own() == [("slow_kernels", "engines are compared in Python: there is no C++ compiler (g++)")]
