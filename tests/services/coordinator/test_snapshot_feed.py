"""Tests that a view built from changes equals the registry, however late the messages are and whichever are lost."""

from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, rule

from tests.services.coordinator.engines.test_engine_registry import REQUEST, Clock, identity, report
from tests.services.coordinator.policies import DEFAULT_POLICY
from tests.services.coordinator.snapshots import snapshot_of
from tokenloom.request.errors import Unavailable
from tokenloom.services.coordinator.engines.engine_record import EngineRecord
from tokenloom.services.coordinator.engines.engine_registry import Registry
from tokenloom.services.coordinator.snapshot_feed import MAX_KEPT, MAX_ROWS_PER_SECOND, SLICE_ENGINES, SnapshotFeed
from tokenloom.services.runtime.registry.registry_view import RegistryView
from tokenloom.v1.coordinator_pb2 import EngineEntry, EngineIdentity, EngineReport, EngineState, Snapshot, WatchRequest
from tokenloom.v1.types_pb2 import Adapter, EngineRole

CHANGES = WatchRequest(changes=True)
STATES = WatchRequest(without_loads=True)
SERVING, DRAINING = EngineState.ENGINE_STATE_SERVING, EngineState.ENGINE_STATE_DRAINING
NAMES = st.sampled_from("abcd")


class Watcher:
    """A view, and the messages on their way to it. Its connection may lose some, which gRPC does not."""

    def __init__(self, feed: SnapshotFeed, request: WatchRequest) -> None:
        self.view = RegistryView()
        self._feed = feed
        self.request = request
        self._log = feed.log(request)
        self._revision: int | None = None
        self.on_the_way: deque[bytes] = deque()

    def send(self) -> None:
        for published in self._log.after(self._revision):
            self._revision = published.revision
            self.on_the_way.append(published.data)

    def receive(self) -> None:
        while self.on_the_way:
            if not self.view.take(Snapshot.FromString(self.on_the_way.popleft())):
                self.__init__(self._feed, self.request)  # type: ignore[misc]  # it watches again
                self.send()


def shown(entry: EngineEntry) -> EngineEntry:
    """An entry without what differs between views: its number and, as time passes, its age."""
    copy = EngineEntry()
    copy.CopyFrom(entry)
    copy.ClearField("number")
    copy.ClearField("age")
    return copy


def by_name(engines: object) -> dict[str, EngineEntry]:
    return {entry.identity.engine_id: shown(entry) for entry in engines}  # type: ignore[attr-defined]


def outlines(entries: dict[str, EngineEntry]) -> dict[str, EngineEntry]:
    """What watchers without loads see of the entries."""
    return {name: outline(entry.identity, entry.report) for name, entry in entries.items()}


def outline(identity: EngineIdentity, report: EngineReport) -> EngineEntry:
    kept = EngineIdentity(
        engine_id=identity.engine_id, epoch=identity.epoch, kv_address=identity.kv_address, host=identity.host
    )
    return EngineEntry(identity=kept, report=EngineReport(role=report.role, state=report.state))


class Watched(RuleBasedStateMachine):
    """A registry, a feed, and watchers that are late, lose messages and come and go."""

    records = Bundle("records")

    @initialize()
    def start(self) -> None:
        self.clock = Clock()
        self.registry = Registry(7, self.clock, policy=DEFAULT_POLICY)
        self.feed = self.new_feed()
        self.watchers = [Watcher(self.feed, CHANGES), Watcher(self.feed, STATES), Watcher(self.feed, WatchRequest())]

    def new_feed(self) -> SnapshotFeed:
        return SnapshotFeed(self.registry)

    @rule(target=records, name=NAMES, epoch=st.integers(1, 2), waiting=st.integers(0, 3))
    def join(self, name: str, epoch: int, waiting: int) -> EngineRecord:
        return self.registry.join(identity(name, epoch), report(waiting=waiting))

    @rule(record=records, running=st.integers(0, 300), state=st.sampled_from([SERVING, SERVING, DRAINING]))
    def report(self, record: EngineRecord, running: int, state: EngineState) -> None:
        self.registry.report(record, report(running=running, state=state, seats=running // 100))

    @rule(record=records)
    def leave(self, record: EngineRecord) -> None:
        self.registry.leave(record)

    @rule()
    def pick(self) -> None:
        with suppress(Unavailable):
            self.registry.pick(REQUEST)

    @rule(name=NAMES, unloaded=st.booleans())
    def set_adapter(self, name: str, unloaded: bool) -> None:
        self.registry.set_adapter(Adapter(name=name, digest=b"d"), unloaded=unloaded)

    @rule(seconds=st.sampled_from([0.0, 0.1, 2.5, 11.0]))
    def tick(self, seconds: float) -> None:
        self.clock.now += seconds
        self.registry.refresh()
        self.feed.publish(self.clock.now)

    @rule(index=st.integers(0, 2))
    def watch_again(self, index: int) -> None:
        self.watchers[index] = Watcher(self.feed, (CHANGES, STATES, WatchRequest())[index])

    @rule(index=st.integers(0, 2))
    def send(self, index: int) -> None:
        self.watchers[index].send()

    @rule(index=st.integers(0, 2))
    def lose(self, index: int) -> None:
        if self.watchers[index].on_the_way:
            self.watchers[index].on_the_way.popleft()

    @rule(index=st.integers(0, 2))
    def receive(self, index: int) -> None:
        self.watchers[index].receive()

    @rule()
    def a_new_watcher_sees_every_engine_at_once(self) -> None:
        watcher = Watcher(self.feed, CHANGES)
        watcher.send()
        watcher.receive()
        states = {name: entry.report.state for name, entry in by_name(watcher.view.engines).items()}
        expected = by_name(snapshot_of(self.registry).engines)
        assert states == {name: entry.report.state for name, entry in expected.items()}

    def teardown(self) -> None:
        """Whatever was lost, the next change shows that it is missing, and then every view is the registry."""
        if not hasattr(self, "feed"):
            return
        self.registry.join(identity("last"), report())
        self.tick(1.0)
        expected = snapshot_of(self.registry)
        for watcher in self.watchers:
            watcher.send()
            watcher.receive()
            view = watcher.view
            assert list(view.adapters) == list(expected.adapters)
            assert (view.complete, view.pd_threshold) == (expected.complete, expected.pd_threshold)
            seen, actual = by_name(view.engines), by_name(expected.engines)
            if watcher.request == STATES:
                actual = outlines(actual)
            assert seen == actual


class WatchedInSlices(Watched):
    """The same histories, which go on while a message is made engine by engine."""

    def __init__(self) -> None:
        super().__init__()
        self.slices: Iterator[None] = iter(())

    def new_feed(self) -> SnapshotFeed:
        return SnapshotFeed(self.registry, slice_engines=1)

    @rule(seconds=st.sampled_from([0.0, 2.5]), count=st.integers(0, 3))
    def begin(self, seconds: float, count: int) -> None:
        self.finish()
        self.clock.now += seconds
        self.slices = self.feed.slices(self.clock.now)
        self.go_on(count)

    @rule(count=st.integers(1, 3))
    def go_on(self, count: int) -> None:
        for _ in islice(self.slices, count):
            pass

    @rule()
    def finish(self) -> None:
        for _ in self.slices:
            pass

    @rule()
    def serialize(self) -> None:
        for _ in self.feed.serialized():
            pass

    def teardown(self) -> None:
        if hasattr(self, "feed"):
            self.finish()
        super().teardown()


TestWatched = Watched.TestCase
TestWatched.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestWatchedInSlices = WatchedInSlices.TestCase
TestWatchedInSlices.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def watched(num_engines: int) -> tuple[Registry, SnapshotFeed, list[EngineRecord], Watcher]:
    registry = Registry(7, Clock(), policy=DEFAULT_POLICY, settle_seconds=0)
    feed = SnapshotFeed(registry)
    watcher = Watcher(feed, CHANGES)
    records = [registry.join(identity(f"e{number}"), report()) for number in range(num_engines)]
    feed.publish(0.0)
    watcher.send()
    watcher.receive()
    return registry, feed, records, watcher


def test_what_happens_between_the_slices_of_a_message_is_seen_and_nothing_has_to_be_sent_again() -> None:
    registry, feed, records, watcher = watched(3 * SLICE_ENGINES)
    for record in records:
        registry.report(record, report(running=5))
    slices = feed.slices(10.0)
    next(slices)  # the first slice is made
    registry.leave(records[0])
    registry.report(records[1], report(running=6, state=DRAINING))
    registry.join(identity("e2", epoch=2), report(running=7))
    registry.report(records[3], report(running=8))
    registry.leave(records[-1])
    feed.publish(10.0)  # as a new wanted state does
    assert len(list(slices)) == 1
    watcher.send()
    while watcher.on_the_way:
        assert watcher.view.take(Snapshot.FromString(watcher.on_the_way.popleft())), "it asks for everything again"
    running = {entry.identity.engine_id: entry.report.running for entry in watcher.view.engines}
    assert running == {f"e{number}": 5 for number in range(1, 3 * SLICE_ENGINES - 1)} | {"e1": 6, "e2": 7, "e3": 8}
    feed.publish(20.0)
    watcher.send()
    watcher.receive()
    assert by_name(watcher.view.engines) == by_name(snapshot_of(registry).engines)
    registry.join(identity("new"), report())
    assert len(list(feed.log(CHANGES).prepared(None))) == 2, "everything is serialized in three turns"
    assert list(feed.log(STATES).prepared(None)) == list(feed.log(CHANGES).prepared(watcher._revision)) == []


def test_an_engine_that_has_left_but_was_not_looked_at_is_not_in_a_new_view() -> None:
    registry, feed, records, watcher = watched(2)
    registry.report(records[0], report(running=3))
    feed.publish(10.0)
    late = watcher._log
    registry.leave(records[0])
    (whole,) = late.after(None)
    assert [each.identity.engine_id for each in Snapshot.FromString(whole.data).engines] == ["e1"]


def test_a_change_of_load_is_small_and_the_same_for_all_watchers() -> None:
    registry, feed, records, watcher = watched(100)
    others = [Watcher(feed, CHANGES), Watcher(feed, CHANGES)]
    for each in others:
        each.send()
        each.on_the_way.clear()
    for record in records:
        registry.report(record, report(running=9, kv_usage=0.5, seats=64, waiting=1, waiting_tokens=900))
    feed.publish(1.0)
    for each in (watcher, *others):
        each.send()
    (data,) = watcher.on_the_way
    assert len(data) < 100 * 56
    assert all(each.on_the_way[0] is data for each in others)


def test_loads_of_many_engines_are_published_less_often_than_states() -> None:
    registry, feed, records, watcher = watched(1000)
    seconds = len(records) / MAX_ROWS_PER_SECOND
    registry.report(records[0], report(running=1))
    feed.publish(1.0)
    registry.report(records[0], report(running=2))
    registry.report(records[1], report(state=DRAINING))
    feed.publish(1.0 + seconds / 2)
    watcher.send()
    watcher.receive()
    first, second = watcher.view.engines[:2]
    assert (first.report.running, second.report.state) == (1, DRAINING)
    feed.publish(1.0 + seconds)
    watcher.send()
    watcher.receive()
    assert watcher.view.engines[0].report.running == 2


def test_a_change_of_load_is_not_sent_to_those_who_need_none() -> None:
    registry, feed, records, _ = watched(2)
    watcher = Watcher(feed, STATES)
    watcher.send()
    watcher.receive()
    registry.report(records[0], report(running=1))
    feed.publish(1.0)
    watcher.send()
    assert not watcher.on_the_way
    registry.report(records[0], report(role=EngineRole.ENGINE_ROLE_DECODE))
    feed.publish(2.0)
    watcher.send()
    (data,) = watcher.on_the_way
    (entry,) = Snapshot.FromString(data).engines
    assert not entry.identity.HasField("fingerprint"), "and little of what never changes"


def test_a_watcher_that_is_late_gets_what_it_missed_or_everything() -> None:
    registry, feed, records, watcher = watched(2)
    for running in range(1, MAX_KEPT + 1):
        registry.report(records[0], report(running=running))
        feed.publish(float(running))
    watcher.send()
    assert len(watcher.on_the_way) == MAX_KEPT
    watcher.receive()
    assert watcher.view.engines[0].report.running == MAX_KEPT
    for running in range(MAX_KEPT + 1):
        registry.report(records[0], report(running=running))
        feed.publish(100.0 + running)
    watcher.send()
    (data,) = watcher.on_the_way
    assert not Snapshot.FromString(data).base_revision


def test_engines_that_join_a_new_coordinator_are_published_less_often_until_all_have_joined() -> None:
    clock = Clock()
    registry = Registry(7, clock, policy=DEFAULT_POLICY, settle_seconds=3.0)
    feed = SnapshotFeed(registry)
    watchers = [Watcher(feed, STATES), Watcher(feed, CHANGES)]
    for watcher in watchers:
        watcher.send()
        watcher.receive()
    num_messages = [0, 0]
    for tick in range(30):
        for number in range(20):
            registry.join(identity(f"e{tick}-{number}"), report())
        feed.publish(tick / 10)
        for index, watcher in enumerate(watchers):
            watcher.send()
            num_messages[index] += len(watcher.on_the_way)
            watcher.receive()
    assert num_messages[0] < num_messages[1] / 2 < 15
    clock.now += 4
    registry.refresh()
    feed.publish(3.0)
    for watcher in watchers:
        watcher.send()
        watcher.receive()
        assert (watcher.view.complete, len(watcher.view.engines)) == (True, 600)
