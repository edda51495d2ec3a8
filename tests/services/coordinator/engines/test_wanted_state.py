"""What operators want of the engines: changes, what a new coordinator takes over, and any history of calls, kills and
restarts."""

import pytest

from tests.services.coordinator.policies import DEFAULT_POLICY
from tokenloom.request.errors import (
    Aborted,
    FailedPrecondition,
    InvalidArgument,
    TokenloomError,
    Unavailable,
    WeightsReplaced,
)
from tokenloom.services.coordinator.engines.engine_record import SILENT_SECONDS, EngineRecord, check_report
from tokenloom.services.coordinator.engines.engine_registry import Registry
from tokenloom.services.coordinator.engines.wanted_state import MAX_PATH, MAX_SETTINGS, Predecessor, WantedState
from tokenloom.services.runtime.peers.hello import MAX_REVISION
from tokenloom.services.runtime.registry.registry_view import RegistryView
from tokenloom.v1.coordinator_pb2 import (
    DesiredState,
    EngineIdentity,
    EngineReport,
    EngineSetting,
    EngineState,
    JoinFacts,
    PickRequest,
    StateProgress,
)
from tokenloom.v1.coordinator_pb2 import SetDesiredStateRequest as Change
from tokenloom.v1.engine_pb2 import (
    PAUSE_MODE_ABORT,
    PAUSE_MODE_KEEP,
    WAKE_TAG_KV_CACHE,
    WAKE_TAG_SCHEDULING,
    WAKE_TAG_WEIGHTS,
    PauseRequest,
    ReloadWeightsRequest,
    ResumeRequest,
    SleepRequest,
    WakeUpRequest,
)
from tokenloom.v1.types_pb2 import EngineRole, Fingerprint, ModelLimits

SERVING, PAUSED = EngineState.ENGINE_STATE_SERVING, EngineState.ENGINE_STATE_PAUSED
PREFILL, DECODE = EngineRole.ENGINE_ROLE_PREFILL, EngineRole.ENGINE_ROLE_DECODE
PAUSE = Change(pause=PauseRequest(mode=PAUSE_MODE_KEEP))
RESUME = Change(resume=ResumeRequest())
SLEEP = Change(sleep=SleepRequest(level=1, mode=PAUSE_MODE_KEEP))
WAKE = Change(wake_up=WakeUpRequest())


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def make_registry(predecessor: Predecessor | None = None, settle_seconds: float = 0.0) -> Registry:
    clock = Clock()
    return Registry(
        1,
        clock,
        policy=DEFAULT_POLICY,
        settle_seconds=settle_seconds,
        predecessor=predecessor,
        wall_milliseconds=lambda: 1000,
    )


NEW = JoinFacts()
"""Of a process that has not joined before."""


def first(name: str, epoch: int = 1, *, joins: JoinFacts | None = NEW, **fields: object) -> EngineReport:
    identity = EngineIdentity(
        engine_id=name,
        epoch=epoch,
        address=f"unix:/{name}",
        num_kv_blocks=64,
        fingerprint=Fingerprint(model="m", block_size=16),
        limits=ModelLimits(max_model_len=1024, vocab_size=9),
    )
    values = {"role": EngineRole.ENGINE_ROLE_BOTH, "state": SERVING, "free_kv_blocks": 64, "join": joins}
    return EngineReport(identity=identity, **{**values, **fields})


def join(registry: Registry, report: EngineReport) -> EngineRecord:
    registry.check_name(report)
    return registry.join(report.identity, report)


def reach(registry: Registry, record: EngineRecord, state: EngineState = SERVING) -> None:
    message = registry.desired(record)
    assert message is not None
    fields = EngineReport(state=state, progress=StateProgress(reached=message.revision))
    report = EngineReport()
    report.CopyFrom(record.report)
    report.MergeFrom(fields)
    registry.report(record, report)


def changed(*changes: Change) -> DesiredState:
    """Returns the state that these changes make."""
    wanted = WantedState(lambda: 0)
    for change in changes:
        wanted.change(change)
    return wanted.state


def wake(*tags: int) -> Change:
    return Change(wake_up=WakeUpRequest(tags=tags))  # type: ignore[arg-type]


def sleep(level: int) -> Change:
    return Change(sleep=SleepRequest(level=level, mode=PAUSE_MODE_KEEP))


def test_the_pause_ends_with_the_last_part_that_is_woken() -> None:
    asleep = changed(sleep(1), wake(WAKE_TAG_WEIGHTS))
    assert (asleep.sleep_level, asleep.pause_mode, list(asleep.awake)) == (1, PAUSE_MODE_KEEP, [WAKE_TAG_WEIGHTS])
    for changes in (
        (sleep(1), wake(WAKE_TAG_WEIGHTS), wake(WAKE_TAG_KV_CACHE)),
        (sleep(1), WAKE),
        (sleep(1), RESUME),
        (sleep(0), wake(WAKE_TAG_SCHEDULING)),
        (sleep(2), wake(WAKE_TAG_WEIGHTS), wake(WAKE_TAG_KV_CACHE)),
        (PAUSE, RESUME),
    ):
        state = changed(*changes)
        assert (state.HasField("sleep_level"), state.pause_mode, list(state.awake)) == (False, 0, [])
    assert changed(sleep(1), wake(WAKE_TAG_SCHEDULING)).sleep_level == 1
    assert changed(PAUSE, WAKE).pause_mode == PAUSE_MODE_KEEP, "it does not sleep"
    assert list(changed(sleep(1), wake(WAKE_TAG_WEIGHTS), sleep(1)).awake) == []


@pytest.mark.parametrize(
    ("before", "change", "error"),
    [
        ([PAUSE], Change(pause=PauseRequest(mode=PAUSE_MODE_ABORT)), FailedPrecondition),
        ([PAUSE], Change(sleep=SleepRequest(level=1, mode=PAUSE_MODE_ABORT)), FailedPrecondition),
        ([SLEEP], sleep(2), FailedPrecondition),
        ([], Change(pause=PauseRequest()), InvalidArgument),
        ([], sleep(3), InvalidArgument),
        ([SLEEP], wake(0), InvalidArgument),
        ([], Change(), InvalidArgument),
        ([], Change(weights=ReloadWeightsRequest(path="relative")), InvalidArgument),
        ([], Change(weights=ReloadWeightsRequest(path="/" * (MAX_PATH + 1))), InvalidArgument),
        ([], Change(weights=ReloadWeightsRequest(path="/new", mode=9)), InvalidArgument),  # type: ignore[arg-type]
    ],
)
def test_a_change_that_does_not_follow_changes_nothing(
    before: list[Change], change: Change, error: type[TokenloomError]
) -> None:
    wanted = WantedState(lambda: 0)
    for each in before:
        wanted.change(each)
    state, version = wanted.state, wanted.version
    with pytest.raises(error):
        wanted.change(change)
    assert (wanted.state, wanted.version) == (state, version)


def test_revisions_grow_whatever_the_clock_does() -> None:
    times = [5000, 3, 7000]
    wanted = WantedState(lambda: times.pop(0))
    revisions = []
    for _ in range(3):
        wanted.change(PAUSE)
        revisions.append(wanted.revision)
    assert revisions == [5000, 5001, 7000]


def test_until_an_engine_is_in_the_state_it_gets_no_requests() -> None:
    registry = make_registry()
    engine, older = join(registry, first("a")), join(registry, first("old", joins=None))
    assert (engine.state, older.state) == (SERVING, SERVING)
    registry.set_state(PAUSE)
    assert (engine.state, older.state) == (PAUSED, PAUSED), "before any of them has said so"
    newcomer = join(registry, first("b"))
    assert newcomer.state == PAUSED
    for record in (engine, newcomer):
        reach(registry, record, PAUSED)
    registry.set_state(RESUME)
    assert (engine.state, older.state) == (PAUSED, SERVING), "the older one reports what it is, and knows no states"
    reach(registry, engine)
    reach(registry, newcomer)
    assert (engine.state, newcomer.state) == (SERVING, SERVING)
    assert join(registry, first("c")).state == SERVING, "it is as the others, without being asked"


def test_an_engine_that_was_asked_for_another_state_has_to_report_the_next_one() -> None:
    """It may have half of the state before."""
    registry = make_registry()
    registry.set_state(SLEEP)
    engine = join(registry, first("a"))
    registry.desired(engine)
    registry.set_state(WAKE)
    assert engine.state == PAUSED
    reach(registry, engine)
    assert engine.state == SERVING


def test_a_new_coordinator_takes_the_latest_state_that_an_engine_knows() -> None:
    registry = make_registry(settle_seconds=2.0)
    newcomer = join(registry, first("new"))
    assert registry.desired(newcomer) is None, "others may know a state"
    assert newcomer.state == PAUSED
    facts = JoinFacts(incarnation=7, desired=DesiredState(revision=40, pause_mode=PAUSE_MODE_KEEP))
    engine = join(registry, first("a", joins=facts, state=PAUSED, progress=StateProgress(reached=40)))
    late = JoinFacts(incarnation=8, desired=DesiredState(revision=30))
    missed = join(registry, first("b", joins=late, progress=StateProgress(reached=30)))
    assert (engine.state, missed.state) == (PAUSED, PAUSED)
    assert not missed.is_in_state
    registry._clock.now += 3  # type: ignore[attr-defined]
    registry.refresh()
    message = registry.desired(newcomer)
    assert message is not None
    assert (message.revision, message.pause_mode) == (40, PAUSE_MODE_KEEP)
    registry.set_state(RESUME)
    assert registry.wanted.revision == 1000


def test_an_engine_that_joined_a_coordinator_but_heard_of_no_state_waits_again() -> None:
    """Its first coordinator died before it knew the state. The next one sent its own at once, and the engine served
    until one that knew of a pause had joined."""
    registry = make_registry(settle_seconds=2.0)
    again = join(registry, first("new", joins=JoinFacts(incarnation=9)))
    assert registry.desired(again) is None
    facts = JoinFacts(incarnation=7, desired=DesiredState(revision=40, pause_mode=PAUSE_MODE_KEEP))
    join(registry, first("a", joins=facts, state=PAUSED, progress=StateProgress(reached=40)))
    registry._clock.now += 3  # type: ignore[attr-defined]
    registry.refresh()
    message = registry.desired(again)
    assert message is not None
    assert (message.revision, message.pause_mode) == (40, PAUSE_MODE_KEEP)


def test_a_standby_takes_the_state_over() -> None:
    registry, predecessor, view = make_registry(), Predecessor(), RegistryView()
    registry.set_state(SLEEP)
    view.desired = registry.wanted.whole()
    predecessor.take(view)
    taken = make_registry(predecessor).wanted
    assert taken.state == registry.wanted.state


def test_a_standby_takes_over_what_is_set_on_single_engines_within_a_revision() -> None:
    registry, predecessor, view = make_registry(), Predecessor(), RegistryView()
    view.complete = True
    view.desired = registry.wanted.whole()
    predecessor.take(view)
    setting = EngineSetting(engine_id="a", weights_path="/new", start_weights=b"w")
    view.desired = DesiredState(revision=view.desired.revision, engines=[setting])
    predecessor.take(view)
    view.desired, view.complete = DesiredState(revision=view.desired.revision), False
    predecessor.take(view)
    assert list(predecessor.desired.engines) == [setting], "a new coordinator does not know it yet"
    taken = make_registry(predecessor)
    message = taken.desired(join(taken, first("a", 2, joins=JoinFacts(start_weights=b"w"))))
    assert message is not None
    assert [each.weights_path for each in message.engines] == ["/new"]


def test_another_process_takes_what_was_set_on_the_one_before() -> None:
    registry = make_registry()
    start = JoinFacts(start_role=PREFILL, start_weights=b"w")
    engine = join(registry, first("a", joins=start, role=PREFILL))
    reach(registry, engine)
    flipped = EngineReport()
    flipped.CopyFrom(engine.report)
    flipped.role = DECODE
    registry.report(engine, flipped)
    registry.leave(engine)
    again = join(registry, first("a", 2, joins=start, role=PREFILL))
    assert again.state == PAUSED
    message = registry.desired(again)
    assert message is not None
    assert list(message.engines) == [EngineSetting(engine_id="a", role=DECODE)]
    registry.leave(again)
    other = join(registry, first("a", 3, joins=JoinFacts(start_role=DECODE), role=DECODE))
    assert other.state == SERVING, "its options were changed: they count"
    registry.leave(other)
    reloaded = JoinFacts(incarnation=9, start_role=PREFILL, start_weights=b"w", weights_path="/new")
    joined = first("a", 3, joins=reloaded, role=PREFILL, progress=StateProgress(reached=1))
    registry.leave(join(registry, joined))
    message = registry.desired(join(registry, first("a", 4, joins=start, role=PREFILL)))
    assert message is not None
    assert list(message.engines) == [EngineSetting(engine_id="a", weights_path="/new")]


LOAD = Change(weights=ReloadWeightsRequest(path="/new"))


def test_the_mode_of_new_weights_goes_to_the_engines() -> None:
    wanted = WantedState(lambda: 0)
    wanted.change(Change(weights=ReloadWeightsRequest(path="/new", mode=PAUSE_MODE_KEEP)))
    assert (wanted.state.weights_path, wanted.state.weights_mode) == ("/new", PAUSE_MODE_KEEP)
    assert not wanted.state.pause_mode
    wanted.change(LOAD)
    assert not wanted.state.weights_mode


def with_weights(name: str, weights: bytes, **fields: object) -> EngineReport:
    report = first(name, **{"joins": JoinFacts(start_weights=b"old"), **fields})  # type: ignore[arg-type]
    report.identity.fingerprint.weights = weights
    return report


def reload(registry: Registry, engine: EngineRecord) -> EngineRecord:
    """The engine joins again with the weights that it has loaded."""
    message = registry.desired(engine)
    assert message is not None
    assert message.weights_path == "/new"
    known = JoinFacts(start_weights=b"old", incarnation=engine.incarnation, desired=message)
    again = join(registry, with_weights(engine.identity.engine_id, b"new", joins=known))
    reach(registry, again)
    return again


def picked(registry: Registry, weights: bytes = b"") -> str:
    asked = Fingerprint(model="m", weights=weights, block_size=16 if weights else 0)
    request = PickRequest(fingerprint=asked, role=EngineRole.ENGINE_ROLE_BOTH, prompt_tokens=8)
    return registry.pick(request).engine.engine_id


def test_requests_go_on_with_the_weights_they_began_with_until_these_are_replaced() -> None:
    registry = make_registry()
    engines = [join(registry, with_weights(name, b"old")) for name in "ab"]
    registry.set_state(LOAD)
    assert [engine.state for engine in engines] == [PAUSED] * 2
    assert [each.is_done for each in registry.progress([])] == [False] * 2
    with pytest.raises(Unavailable):
        picked(registry)
    assert picked(registry, b"old") in "ab", "a request that began there"
    reload(registry, engines[0])
    assert picked(registry) == "a"
    assert picked(registry, b"old") == "b"
    failed = EngineReport()
    failed.CopyFrom(engines[1].report)
    failed.progress.failed, failed.progress.cause = registry.wanted.revision, "no such file"
    registry.report(engines[1], failed)
    assert [(each.is_done, each.cause) for each in registry.progress([])] == [(True, ""), (False, "no such file")]
    assert picked(registry) == "a", "one that fails keeps no other from serving"
    reload(registry, engines[1])
    assert all(each.is_done for each in registry.progress([]))
    with pytest.raises(WeightsReplaced):
        picked(registry, b"old")
    assert {picked(registry) for _ in range(8)} == {"a", "b"}


def test_an_engine_that_joins_later_takes_the_weights_unless_its_options_have_changed() -> None:
    registry = make_registry()
    reached = join(registry, with_weights("a", b"old"))
    registry.set_state(LOAD)
    reload(registry, reached)
    fresh = join(registry, with_weights("b", b"old"))
    assert fresh.state == PAUSED
    reload(registry, fresh)
    changed = join(registry, with_weights("c", b"newer", joins=JoinFacts(start_weights=b"newer")))
    reach(registry, changed)
    assert {picked(registry) for _ in range(4)} == {"a", "b"}
    (progress,) = (each for each in registry.progress([]) if each.engine_id == "c")
    assert (progress.is_done, "as engine a serves" in progress.cause) == (False, True)
    registry.set_state(PAUSE)
    registry.set_state(RESUME)
    later = join(registry, with_weights("d", b"old"))
    message = registry.desired(later)
    assert message is not None
    assert (message.weights_path, message.weights_version < message.revision) == ("/new", True)


def test_loaded_weights_are_awake() -> None:
    assert list(changed(sleep(2), LOAD).awake) == [WAKE_TAG_WEIGHTS]
    assert not changed(sleep(2), LOAD, wake(WAKE_TAG_KV_CACHE)).HasField("sleep_level")
    assert not changed(sleep(0), LOAD).awake


def test_the_weights_of_all_engines_replace_those_of_single_ones() -> None:
    registry = make_registry()
    registry.wanted.adopt(
        DesiredState(engines=[EngineSetting(engine_id="a", weights_path="/own", start_weights=b"old")])
    )
    registry.set_state(LOAD)
    message = registry.desired(join(registry, with_weights("a", b"old")))
    assert message is not None
    assert not message.engines


def test_settings_have_a_bound() -> None:
    wanted = WantedState(lambda: 0)
    engines = [EngineSetting(engine_id=str(number), role=DECODE) for number in range(MAX_SETTINGS + 9)]
    wanted.adopt(DesiredState(engines=engines))
    assert len(wanted.whole().engines) == MAX_SETTINGS


def test_numbers_that_leave_no_larger_one_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="revision"):
        check_report(first("a", joins=JoinFacts(desired=DesiredState(revision=MAX_REVISION))))


def test_a_name_passes_on_when_its_holder_is_silent() -> None:
    registry = make_registry()
    holder = join(registry, first("a", 1))
    with pytest.raises(FailedPrecondition, match="belongs to the engine at unix:/a"):
        registry.check_name(first("a", 2))
    registry._clock.now += SILENT_SECONDS + 0.1  # type: ignore[attr-defined]
    taker = join(registry, first("a", 2))
    assert taker.incarnation > holder.incarnation
    with pytest.raises(Aborted):
        registry.check_name(first("a", 1, joins=JoinFacts(incarnation=holder.incarnation)))
    # At a coordinator that knows neither, the one that came last has the name too.
    other = make_registry()
    join(other, first("a", 1, joins=JoinFacts(incarnation=holder.incarnation)))
    assert join(other, first("a", 2, joins=JoinFacts(incarnation=taker.incarnation))).incarnation == taker.incarnation
