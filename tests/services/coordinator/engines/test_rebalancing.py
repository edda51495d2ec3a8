"""Tests when running requests go on at engines that have less to do, and that a constant load comes to rest."""

import itertools
from collections.abc import Sequence
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from tokenloom.services.coordinator.engines.rebalancing import (
    APART_SECONDS,
    HOT_SECONDS,
    MOST,
    REST_SECONDS,
    SHORT_APART_SECONDS,
    EngineCounts,
    MoveOrder,
    Rebalancer,
)

FACTOR = 2.0
FREE = 1000
TICK = 0.5


def load(name: str, running: int = 0, waiting: int = 0, **fields: object) -> EngineCounts:
    defaults = {"kind": b"a", "seats": 32, "kv_usage": 0.0, "free_tokens": FREE}
    return EngineCounts(name=name, running=running, waiting=waiting, **{**defaults, **fields})  # type: ignore[arg-type]


def first_order(engines: Sequence[EngineCounts], seconds: float = 10.0) -> tuple[float, MoveOrder] | None:
    """Returns the first order under a constant load, and when it comes."""
    rebalancer = Rebalancer(FACTOR)
    for tick in range(round(seconds / TICK)):
        if orders := rebalancer.orders(engines, tick * TICK):
            return tick * TICK, orders[0]
    return None


def test_an_engine_with_twice_as_much_to_do_for_some_seconds_gives_a_part_of_it() -> None:
    assert first_order([load("a", 30), load("b", 6), load("c", 12)]) == (HOT_SECONDS, MoveOrder("a", "b", MOST, FREE))
    assert first_order([load("a", 12), load("b", 5)]) == (HOT_SECONDS, MoveOrder("a", "b", 1, FREE))
    assert first_order([load("a", 4, waiting=6), load("b", 4)]) == (HOT_SECONDS, MoveOrder("a", "b", 4, FREE))


def test_what_differs_little_stays() -> None:
    assert first_order([load("a", 12), load("b", 6)]) is None
    assert first_order([load("a", 5), load("b", 0)]) is None


def test_a_full_cache_is_hot_by_itself() -> None:
    others = load("b", 8, kv_usage=0.3)
    assert first_order([load("a", 10, kv_usage=0.9), others]) == (HOT_SECONDS, MoveOrder("a", "b", 1, FREE))
    assert first_order([load("a", 10, kv_usage=0.7), others]) is None
    assert first_order([load("a", 9, kv_usage=0.9), others]) is None, "it would have fewer requests than the other one"


def test_only_engines_that_can_take_a_request_get_one() -> None:
    busy = load("a", 30)
    for other in (
        load("b", kind=b"b"),
        load("b", may_take=False),
        load("b", 2, waiting=1),
        load("b", 4, seats=4),
        load("b", is_short=True, may_give=False),
    ):
        assert first_order([busy, other]) is None, other
    assert first_order([replace(busy, may_give=False), load("b")]) is None


def test_a_burst_that_ends_moves_nothing() -> None:
    rebalancer = Rebalancer(FACTOR)
    for tick in range(100):
        is_burst = tick % 5 < 4
        assert not rebalancer.orders([load("a", 30 if is_burst else 1), load("b", 1)], tick * TICK)


def test_an_engine_stays_hot_until_half_of_the_excess_is_left() -> None:
    rebalancer = Rebalancer(FACTOR)
    assert not rebalancer.orders([load("a", 30), load("b", 10)], 0.0)
    assert not rebalancer.orders([load("a", 18), load("b", 10)], 1.0)
    assert rebalancer.orders([load("a", 18), load("b", 10)], HOT_SECONDS) == [MoveOrder("a", "b", 1, FREE)]
    assert not rebalancer.orders([load("a", 15), load("b", 10)], HOT_SECONDS + APART_SECONDS)


def test_one_pair_moves_at_a_time_and_an_engine_takes_from_one() -> None:
    rebalancer = Rebalancer(FACTOR)
    engines = [load("a", 30), load("b", 28), load("c", 0), load("d", 2)]
    rebalancer.orders(engines, 0.0)
    orders = rebalancer.orders(engines, HOT_SECONDS)
    assert orders == [MoveOrder("a", "c", MOST, FREE), MoveOrder("b", "d", MOST, FREE)]
    assert not rebalancer.orders(engines, HOT_SECONDS + APART_SECONDS / 2)
    assert len(rebalancer.orders(engines, HOT_SECONDS + APART_SECONDS)) == 2


def test_nothing_goes_back_within_a_minute() -> None:
    rebalancer = Rebalancer(FACTOR)
    rebalancer.orders([load("a", 30), load("b")], 0.0)
    assert rebalancer.orders([load("a", 30), load("b")], HOT_SECONDS)
    turned = [load("a"), load("b", 30)]
    times = [HOT_SECONDS + TICK * tick for tick in range(1, 300)]
    first = next(now for now in times if rebalancer.orders(turned, now))
    assert first >= HOT_SECONDS + REST_SECONDS


def test_an_engine_that_is_about_to_preempt_gives_a_request_at_once() -> None:
    rebalancer = Rebalancer(0.0)
    short = load("a", 8, kv_usage=0.95, is_short=True)
    others = [load("b", 1, kv_usage=0.9), load("c", 9, kv_usage=0.2), load("d", 12, kv_usage=0.1)]
    expected = [MoveOrder("a", "d", 1, FREE, before_preemption=True)]
    assert rebalancer.orders([short, *others], 0.0) == expected
    assert not rebalancer.orders([short, *others], SHORT_APART_SECONDS / 2)
    assert rebalancer.orders([short, *others], SHORT_APART_SECONDS) == expected
    assert not rebalancer.orders([short, others[0]], 10.0), "no engine has room"
    assert not rebalancer.orders([replace(short, is_short=False), load("b")], 20.0), "hot engines are not looked for"


def test_engines_that_are_short_take_turns_at_the_one_that_has_room() -> None:
    rebalancer, tick = Rebalancer(0.0), SHORT_APART_SECONDS / 4
    engines = [load(name, running, kv_usage=0.99, is_short=True) for name, running in (("a", 9), ("b", 5), ("c", 5))]
    engines.append(load("room", 1, kv_usage=0.3))
    found = [(tick * each, *rebalancer.orders(engines, tick * each)) for each in range(24)]
    given = [(at, *(order.source for order in orders)) for at, *orders in found if orders]
    assert all(len(sources) == 1 for _, *sources in given), "its free blocks are promised once"
    assert "".join(source for _, source in given).startswith("abcabc")  # type: ignore[misc]
    times = [at for at, *_ in given]
    assert min(later - at for at, later in itertools.pairwise(times)) >= SHORT_APART_SECONDS * 0.99


def test_what_an_engine_has_taken_does_not_return_when_it_is_short() -> None:
    rebalancer = Rebalancer(0.0)
    short = load("a", 8, kv_usage=0.95, is_short=True)
    assert rebalancer.orders([short, load("b")], 0.0)
    assert not rebalancer.orders([load("a"), replace(short, name="b")], REST_SECONDS - 1)
    assert rebalancer.orders([load("a"), replace(short, name="b")], REST_SECONDS)


@st.composite
def meshes(draw: st.DrawFn) -> list[EngineCounts]:
    def drawn(name: str) -> EngineCounts:
        seats = draw(st.integers(1, 40))
        running = draw(st.integers(0, seats))
        waiting = draw(st.integers(0, 20)) if running == seats else 0
        return load(name, running, waiting, seats=seats, kv_usage=draw(st.floats(0, 1)))

    return [drawn(name) for name in "abcde"[: draw(st.integers(2, 5))]]


@given(meshes(), st.floats(1.2, 4.0), st.sampled_from((0.0, 0.5, 1.9)))
def test_a_constant_load_comes_to_rest(engines: list[EngineCounts], factor: float, delay: float) -> None:
    """No request ends or comes. What moves arrives later than it left; KV goes with it in equal parts."""
    rebalancer, moved = Rebalancer(factor), list[tuple[float, MoveOrder]]()
    now, on_their_way = 0.0, list[tuple[float, str, int, float]]()
    state = {each.name: each for each in engines}
    last_order = 0.0
    while now < 300.0:
        now += TICK
        for arrival in [each for each in on_their_way if each[0] <= now]:
            on_their_way.remove(arrival)
            _, name, count, usage = arrival
            state[name] = replace(
                state[name], running=state[name].running + count, kv_usage=state[name].kv_usage + usage
            )
        for order in rebalancer.orders(state.values(), now):
            source = state[order.source]
            count = min(order.count, source.running)
            begun, usage = min(count, source.waiting), source.kv_usage * count / max(source.running, 1)
            state[order.source] = replace(
                source,
                running=source.running - count + begun,
                waiting=source.waiting - begun,
                kv_usage=source.kv_usage - usage,
            )
            on_their_way.append((now + delay, order.target, count, usage))
            moved.append((now, order))
            last_order = now
    assert last_order < 200.0, "it moves on and on"
    for position, (at, order) in enumerate(moved):
        back = [when for when, each in moved[position:] if (each.source, each.target) == (order.target, order.source)]
        assert not back or min(back) - at >= REST_SECONDS
