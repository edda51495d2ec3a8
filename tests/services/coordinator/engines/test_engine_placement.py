"""Tests scores, counted picks and candidates: the registry with a clock that tests move."""

from dataclasses import replace

import pytest

from tests.services.coordinator.policies import DEFAULT_POLICY
from tokenloom.request.errors import InvalidArgument, ResourceExhausted, Unavailable
from tokenloom.services.coordinator.engines.engine_pools import UNLIKE_SECONDS
from tokenloom.services.coordinator.engines.engine_record import EngineRecord
from tokenloom.services.coordinator.engines.engine_registry import Registry
from tokenloom.services.coordinator.picks.placed import Placed
from tokenloom.v1.coordinator_pb2 import EngineIdentity, EngineRef, EngineReport, EngineState, PickRequest
from tokenloom.v1.engine_pb2 import PickId
from tokenloom.v1.types_pb2 import EngineRole, Fingerprint, ModelLimits

EPOCH = 77
BLOCK_SIZE = 16


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def identity(name: str, *, blocks: int = 100, epoch: int = 1, **fingerprint: object) -> EngineIdentity:
    return EngineIdentity(
        engine_id=name,
        epoch=epoch,
        address=f"unix:/{name}",
        num_kv_blocks=blocks,
        fingerprint=Fingerprint(**{"model": "m", "block_size": BLOCK_SIZE, **fingerprint}),
        limits=ModelLimits(max_model_len=4096, vocab_size=100),
    )


def report(waiting: int = 0, running: int = 0, kv_usage: float = 0.0, **fields: object) -> EngineReport:
    values = {
        "role": EngineRole.ENGINE_ROLE_BOTH,
        "state": EngineState.ENGINE_STATE_SERVING,
        "free_kv_blocks": round(100 * (1 - kv_usage)),
    }
    return EngineReport(waiting=waiting, running=running, kv_usage=kv_usage, **{**values, **fields})


def request(prompt_tokens: int = 10, **fields: object) -> PickRequest:
    values = {"fingerprint": Fingerprint(model="m"), "role": EngineRole.ENGINE_ROLE_BOTH}
    return PickRequest(prompt_tokens=prompt_tokens, **{**values, **fields})


def picked(placed: Placed) -> str:
    return placed.engine.engine_id


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def registry(clock: Clock) -> Registry:
    return Registry(EPOCH, clock, policy=DEFAULT_POLICY)


def test_lowest_score_wins(registry: Registry) -> None:
    registry.join(identity("a"), report(waiting=1, running=0))
    registry.join(identity("b"), report(waiting=0, running=3))
    assert picked(registry.pick(request())) == "b"


def test_kv_pressure_golden_case(registry: Registry) -> None:
    registry.join(identity("a"), report(5, 10, 1.0))
    registry.join(identity("b"), report(0, 20, 0.2))
    assert picked(registry.pick(request())) == "b"


def test_room_for_the_prompt_comes_before_the_score(registry: Registry) -> None:
    registry.join(identity("full"), report(0, 1, 1.0))
    registry.join(identity("roomy"), report(0, 20, 0.2))
    assert picked(registry.pick(request())) == "roomy"


def test_prompts_on_their_way_take_room(registry: Registry) -> None:
    registry.join(identity("a"), report(free_kv_blocks=10))
    registry.join(identity("b"), report(running=9, free_kv_blocks=10))
    assert [picked(registry.pick(request(100))) for _ in range(2)] == ["a", "b"]  # 160 tokens: no room for two of 100


def test_without_room_anywhere_the_score_decides(registry: Registry) -> None:
    registry.join(identity("a"), report(3, 10, 1.0))
    registry.join(identity("b"), report(2, 10, 1.0))
    assert picked(registry.pick(request())) == "b"


def test_burst_over_idle_engines_spreads_evenly(registry: Registry) -> None:
    for name in "abcd":
        registry.join(identity(name), report())
    names = [picked(registry.pick(request())) for _ in range(8)]
    assert [names.count(name) for name in "abcd"] == [2, 2, 2, 2]


def test_ties_rotate_after_acknowledgement(registry: Registry) -> None:
    records = {name: registry.join(identity(name), report()) for name in "ab"}
    names = []
    for _ in range(4):
        response = registry.pick(request())
        names.append(picked(response))
        registry.report(records[names[-1]], report(picks_arrived=[response.pick]))  # came, ran and finished
    assert names == ["a", "b", "a", "b"]


def test_only_the_named_pick_is_acknowledged(registry: Registry) -> None:
    record = registry.join(identity("a"), report())
    first, second = registry.pick(request()).pick, registry.pick(request()).pick
    assert first != second
    registry.report(record, report(waiting=0))
    assert record.score == 8
    registry.report(record, report(waiting=1, picks_arrived=[second]))
    assert record.score == 8
    foreign = PickId(coordinator_epoch=EPOCH + 1, number=first.number)
    registry.report(record, report(waiting=1, picks_arrived=[foreign]))
    assert record.score == 8
    registry.report(record, report(running=2, picks_arrived=[first]))
    assert record.score == 2


def test_unacknowledged_picks_count_two_seconds(registry: Registry, clock: Clock) -> None:
    record = registry.join(identity("a"), report())
    registry.pick(request())
    clock.now += 1.9
    registry.refresh()
    assert record.score == 4
    clock.now += 0.2
    registry.refresh()
    assert record.score == 0


def test_rejoin_of_the_same_incarnation_keeps_counted_picks(registry: Registry) -> None:
    registry.join(identity("a"), report())
    registry.pick(request())
    assert registry.join(identity("a"), report()).score == 4
    assert registry.join(identity("a", epoch=2), report()).score == 0


@pytest.mark.parametrize("field", ["model", "weights", "tokenizer"])
def test_pools_are_apart(registry: Registry, field: str) -> None:
    one, two = ("x", "y") if field == "model" else (b"x", b"y")
    registry.join(identity("a", **{field: one}), report())
    registry.join(identity("b", **{field: two}), report(waiting=9))
    assert picked(registry.pick(request(fingerprint=Fingerprint(**{field: two})))) == "b"


def test_empty_and_other_fields_are_not_compared(registry: Registry) -> None:
    registry.join(identity("a", weights=b"w", numerics="fp32"), report())
    asked = Fingerprint(model="m", numerics="bf16", kv_layout="other")
    assert picked(registry.pick(request(fingerprint=asked))) == "a"


@pytest.mark.parametrize("asked", [b"", b"other"])
def test_a_request_stays_with_its_weights_and_none_are_no_wildcard(registry: Registry, asked: bytes) -> None:
    registry.join(identity("a", weights=b"w"), report())
    continued = Fingerprint(model="m", weights=asked, block_size=BLOCK_SIZE)
    with pytest.raises(Unavailable):
        registry.pick(request(fingerprint=continued))


def test_a_kv_layout_that_is_not_known_is_no_wildcard(registry: Registry) -> None:
    registry.join(identity("a", kv_layout="x"), report())
    prefilled = Fingerprint(model="m", block_size=BLOCK_SIZE)
    with pytest.raises(Unavailable):
        registry.pick(request(fingerprint=prefilled, role=EngineRole.ENGINE_ROLE_DECODE))


def test_a_request_goes_on_where_it_is_computed_alike_if_it_can(registry: Registry) -> None:
    registry.join(identity("a", weights=b"w", numerics="amx"), report())
    alike = registry.join(identity("b", weights=b"w", numerics="avx2"), report(waiting=9))
    continued = Fingerprint(model="m", weights=b"w", numerics="avx2", block_size=BLOCK_SIZE)
    assert picked(registry.pick(request(fingerprint=continued))) == "b"
    registry.leave(alike)
    assert picked(registry.pick(request(fingerprint=continued))) == "a"
    (fall_back,) = registry._fall_backs.active
    assert (fall_back.kind, fall_back.detail) == ("other_numerics", "it began with 'avx2'; now serving: amx")


@pytest.mark.parametrize("weights", [b"", b"w"])
def test_a_request_that_is_taken_over_goes_on_where_it_is_computed_alike(registry: Registry, weights: bytes) -> None:
    """Its output processor knows the numerics, perhaps the weights, and nothing else of the engine."""
    theirs = registry.join(identity("a", weights=b"w", numerics="vllm/0.32"), report())
    registry.join(identity("b", weights=b"w", numerics="cpu"), report(waiting=9))
    taken_over = request(fingerprint=Fingerprint(model="m", weights=weights, numerics="vllm/0.32"))
    assert picked(registry.pick(request(fingerprint=Fingerprint(model="m", weights=weights, numerics="cpu")))) == "b"
    assert picked(registry.pick(taken_over)) == "a"
    registry.leave(theirs)
    with pytest.raises(Unavailable, match="computes as the one on which the request began"):
        registry.pick(taken_over)


def test_going_on_where_it_is_computed_otherwise_is_shown_while_it_happens(registry: Registry, clock: Clock) -> None:
    record = registry.join(identity("a", weights=b"w", numerics="amx"), report())
    continued = request(fingerprint=Fingerprint(model="m", weights=b"w", numerics="avx2", block_size=BLOCK_SIZE))

    def is_shown_after(seconds: float) -> bool:
        clock.now += seconds
        registry.report(record, report())
        registry.refresh()
        return "other_numerics" in {each.kind for each in registry._fall_backs.active}

    for _ in range(2):
        registry.pick(continued)
        assert is_shown_after(UNLIKE_SECONDS - 1)
        registry.pick(continued)
        assert is_shown_after(UNLIKE_SECONDS - 1)
        assert not is_shown_after(2)
    assert registry._fall_backs.counts["other_numerics"] == 2


@pytest.mark.parametrize(
    "fields",
    [
        {"state": EngineState.ENGINE_STATE_STARTING},
        {"state": EngineState.ENGINE_STATE_DRAINING},
        {"state": EngineState.ENGINE_STATE_DEAD},
        {"state": EngineState.ENGINE_STATE_PAUSED},
    ],
)
def test_only_serving_engines(registry: Registry, fields: dict[str, object]) -> None:
    record = registry.join(identity("a"), report(**fields))
    with pytest.raises(Unavailable) as caught:
        registry.pick(request())
    assert caught.value.retry_after
    registry.report(record, report())
    assert picked(registry.pick(request())) == "a"


def test_excluded_incarnations_are_passed_over(registry: Registry) -> None:
    registry.join(identity("a", epoch=5), report())
    registry.join(identity("b", epoch=6), report(waiting=9))
    failed = EngineRef(engine_id="a", epoch=5)
    assert picked(registry.pick(request(exclude=[failed]))) == "b"
    other_incarnation = EngineRef(engine_id="a", epoch=4)
    assert picked(registry.pick(request(exclude=[other_incarnation]))) == "a"
    with pytest.raises(Unavailable):
        registry.pick(request(exclude=[failed, EngineRef(engine_id="b", epoch=6)]))


def test_the_kv_cache_must_hold_the_prompt(registry: Registry) -> None:
    registry.join(identity("small", blocks=2), report())
    registry.join(identity("large", blocks=100), report(waiting=9))
    assert picked(registry.pick(request(31))) == "small"
    assert picked(registry.pick(request(32))) == "large"  # the first token needs a place too
    with pytest.raises(ResourceExhausted):
        registry.pick(request(1600))


def test_a_long_queue_refuses_nothing(registry: Registry) -> None:
    """The gateway has admitted the request; only its deadline limits how long it may wait."""
    registry.join(identity("a"), report(waiting=100_000, running=9))
    assert picked(registry.pick(request())) == "a"


def test_no_engine_at_all(registry: Registry) -> None:
    with pytest.raises(Unavailable):
        registry.pick(request())


def test_requests_that_cannot_be_placed(registry: Registry) -> None:
    registry.join(identity("a"), report())
    with pytest.raises(InvalidArgument):
        registry.pick(request(role=EngineRole.ENGINE_ROLE_UNSPECIFIED))
    with pytest.raises(InvalidArgument):
        registry.pick(request(0))


def test_an_engine_that_reports_late_is_the_last_choice(registry: Registry, clock: Clock) -> None:
    late = registry.join(identity("late"), report())
    timely = registry.join(identity("timely"), report())
    clock.now += 6  # its event loop is busy, and it is not dead
    registry.report(timely, report(running=5))
    registry.refresh()
    assert late.state == EngineState.ENGINE_STATE_SERVING
    assert picked(registry.pick(request())) == "timely"
    registry.leave(timely)
    assert picked(registry.pick(request())) == "late"


def test_silent_and_hung_engines_are_passed_over(registry: Registry, clock: Clock) -> None:
    hung = registry.join(identity("hung"), report(running=1, step=7))
    silent = registry.join(identity("silent"), report())
    for _ in range(61):
        clock.now += 1
        registry.report(hung, report(running=1, step=7))
    registry.refresh()
    assert silent.state == hung.state == EngineState.ENGINE_STATE_DEAD
    with pytest.raises(Unavailable):
        registry.pick(request())
    registry.report(hung, report(running=1, step=8))
    registry.report(silent, report())
    assert picked(registry.pick(request())) == "silent"


def test_the_pick_says_who_and_which(registry: Registry) -> None:
    registry.join(identity("a"), report())
    response = registry.pick(request())
    assert response.engine == identity("a")
    assert response.whole_request
    assert response.pick == PickId(coordinator_epoch=EPOCH, number=1)


def test_a_paused_engine_is_not_taken_for_hung(registry: Registry, clock: Clock) -> None:
    paused = registry.join(identity("paused"), report(running=1, step=7))
    for state in (EngineState.ENGINE_STATE_PAUSED, EngineState.ENGINE_STATE_SERVING):
        for _ in range(61):
            clock.now += 1
            registry.report(paused, report(running=1, step=7, state=EngineState.ENGINE_STATE_PAUSED))
        assert paused.state == EngineState.ENGINE_STATE_PAUSED
        registry.report(paused, report(running=1, step=7, state=state))
        assert paused.state == state, "the pause does not count as standing still after it either"


def test_all_requests_of_a_query_go_to_one_engine(registry: Registry) -> None:
    for name in "abcd":
        registry.join(identity(name), report())
    queries = [f"query-{index}" for index in range(32)]
    engine_of = {query: picked(registry.pick(request(query_id=query))) for query in queries}
    assert len(set(engine_of.values())) == 4, "queries are spread"
    registry.join(identity("e"), report())
    again = {query: picked(registry.pick(request(query_id=query, prompt_tokens=50))) for query in queries}
    assert all(again[query] in (engine, "e") for query, engine in engine_of.items())
    assert sum(again[query] == engine for query, engine in engine_of.items()) > 16


def test_a_query_whose_engine_failed_has_another_one(registry: Registry) -> None:
    for name in "ab":
        registry.join(identity(name), report())
    first = picked(registry.pick(request(query_id="q")))
    failed = [EngineRef(engine_id=first, epoch=1)]
    assert {first, picked(registry.pick(request(query_id="q", exclude=failed)))} == {"a", "b"}


def test_a_prompt_that_pools_may_fill_the_cache(registry: Registry) -> None:
    registry.join(identity("a", blocks=1), report())
    with pytest.raises(ResourceExhausted):
        registry.pick(request(BLOCK_SIZE))
    assert picked(registry.pick(request(BLOCK_SIZE, pools=True))) == "a"


def test_an_engine_without_kv_blocks_takes_what_its_context_holds(registry: Registry) -> None:
    registry.join(identity("encoder", blocks=0), report())
    assert picked(registry.pick(request(4096, pools=True))) == "encoder"
    with pytest.raises(ResourceExhausted):
        registry.pick(request(4097, pools=True))


def join_one_of_each(registry: Registry) -> tuple[EngineRecord, EngineRecord]:
    return tuple(  # type: ignore[return-value]
        registry.join(identity(name, weights=b"w", numerics=numerics), report())
        for name, numerics in (("ours", "cpu/float32"), ("theirs", "vllm/0.32.0"))
    )


def continued_from(numerics: str) -> PickRequest:
    return request(fingerprint=Fingerprint(model="m", weights=b"w", numerics=numerics, block_size=BLOCK_SIZE))


def test_a_request_goes_on_at_a_server_of_others_only_where_that_is_allowed(clock: Clock) -> None:
    strict = Registry(1, clock, policy=DEFAULT_POLICY, settle_seconds=0)
    for left, started in ((0, "cpu/float32"), (1, "vllm/0.32.0")):
        strict.leave(join_one_of_each(strict)[left])
        with pytest.raises(Unavailable, match="computes as the one on which the request began"):
            strict.pick(continued_from(started))
    assert not strict._fall_backs.counts["other_numerics"]

    mixing = Registry(1, clock, policy=replace(DEFAULT_POLICY, mixes_numerics=True), settle_seconds=0)
    ours, theirs = join_one_of_each(mixing)
    assert picked(mixing.pick(continued_from("vllm/0.32.0"))) == "theirs", "where it is computed alike"
    mixing.leave(theirs)
    assert picked(mixing.pick(continued_from("vllm/0.32.0"))) == "ours"
    assert mixing._fall_backs.counts["other_numerics"] == 1
    mixing.leave(ours)


def test_a_request_goes_on_at_another_release_of_the_same_server(registry: Registry) -> None:
    join_one_of_each(registry)
    assert picked(registry.pick(continued_from("vllm/0.31.0"))) == "theirs"
    assert picked(registry.pick(continued_from("cpu/bfloat16"))) == "ours"


def test_new_requests_go_to_both_kinds(registry: Registry) -> None:
    join_one_of_each(registry)
    assert {picked(registry.pick(request(fingerprint=Fingerprint(model="m")))) for _ in range(2)} == {"ours", "theirs"}
