"""Whatever an engine reports, the coordinator refuses it or computes with it."""

import asyncio
import contextlib
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from tests.loop_clock import pass_time, settle
from tests.services.coordinator.engines.test_engine_registry import Clock, identity, report
from tests.services.coordinator.snapshots import snapshot_of
from tokenloom.request.errors import InvalidArgument, TokenloomError
from tokenloom.services.coordinator.coordinator_servicer import CoordinatorServicer
from tokenloom.services.coordinator.engines.defaults import PD_THRESHOLD
from tokenloom.services.coordinator.engines.engine_placement import Policy
from tokenloom.services.coordinator.engines.engine_record import (
    LONGEST_TICK_SECONDS,
    MAX_BLOCK_SIZE,
    MAX_REQUESTS,
    TICK_SECONDS,
    StallAwareClock,
    check_identity,
    check_report,
)
from tokenloom.services.coordinator.engines.engine_registry import Registry
from tokenloom.services.coordinator.picks.pick_slices import PickMetrics
from tokenloom.services.runtime.placement.rules import cost, score
from tokenloom.v1.coordinator_pb2 import EngineReport, PickRequest
from tokenloom.v1.types_pb2 import Fingerprint, Hello

COUNTS = ("waiting", "running", "seats", "group_size")
RATES = (
    *("kv_usage", "prefill_tokens_per_second", "starts_per_second", "computed_tokens_per_second"),
    *("prompt_tokens_per_second", "step_seconds", "step_requests"),
)
NUMBERS = st.sampled_from([0, 1, 2, 64, 1 << 20, MAX_REQUESTS, MAX_REQUESTS + 1, (1 << 31) - 1, 1 << 31, (1 << 32) - 1])
FLOATS = st.sampled_from([0.0, 1e-38, 0.5, 1.0, 3e38, -1.0, math.inf, -math.inf, math.nan])


@pytest.mark.parametrize("name", COUNTS)
def test_counts_are_bounded(name: str) -> None:
    check_report(report(**{name: MAX_REQUESTS}))
    with pytest.raises(InvalidArgument, match=f"{name} must be at most {MAX_REQUESTS}, not {1 << 31}"):
        check_report(report(**{name: 1 << 31}))


@pytest.mark.parametrize("name", RATES)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -0.5])
def test_rates_are_numbers(name: str, value: float) -> None:
    check_report(report(**{name: 0.5}))
    with pytest.raises(InvalidArgument, match=f"{name} must be a finite number and not negative, not {value}"):
        check_report(report(**{name: value}))


@pytest.mark.parametrize(("name", "value"), [("role", 0), ("role", 300), ("state", 0), ("state", 99)])
def test_roles_and_states_are_known(name: str, value: int) -> None:
    with pytest.raises(InvalidArgument, match=f"{name} is missing or unknown"):
        check_report(report(**{name: value}))


def test_blocks_have_a_size_that_can_be() -> None:
    first = report(hello=Hello(epoch=1), identity=identity("a"))
    check_identity(first)
    first.identity.fingerprint.block_size = MAX_BLOCK_SIZE + 1
    with pytest.raises(InvalidArgument, match="block_size must be at most"):
        check_identity(first)


reports = st.builds(
    report,
    role=st.sampled_from([0, 1, 2, 3, 300]),
    state=st.sampled_from([0, 1, 2, 3, 4, 5, 99]),
    waiting_tokens=NUMBERS,
    prefilling_tokens=NUMBERS,
    free_kv_blocks=NUMBERS,
    step=st.sampled_from([0, 1, (1 << 64) - 1]),
    **dict.fromkeys(COUNTS, NUMBERS),
    **dict.fromkeys(RATES, FLOATS),
)
requests = st.builds(
    PickRequest,
    role=st.sampled_from([1, 2, 3]),
    prompt_tokens=st.sampled_from([1, 64, 1 << 31, (1 << 32) - 1]),
    fingerprint=st.just(Fingerprint(model="m")),
)


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from([score, cost]),
    st.lists(st.tuples(NUMBERS, NUMBERS, st.lists(reports, min_size=1, max_size=3)), min_size=1, max_size=3),
    st.lists(requests, min_size=1, max_size=4),
)
def test_no_report_ends_the_coordinator_or_a_pick(rule: Any, engines: list[Any], picks: list[PickRequest]) -> None:
    clock = Clock()
    registry = Registry(7, clock, policy=Policy(PD_THRESHOLD, rule), settle_seconds=0)
    servicer = CoordinatorServicer(registry, "c", 7, PickMetrics(CollectorRegistry()))
    for number, (num_blocks, block_size, each) in enumerate(engines):
        first = EngineReport(hello=Hello(epoch=1), identity=identity(f"e{number}"))
        first.MergeFrom(each[0])
        first.identity.num_kv_blocks, first.identity.fingerprint.block_size = num_blocks, block_size
        try:
            check_identity(first)
        except InvalidArgument:
            continue
        record = registry.join(first.identity, first)
        for later in each[1:]:
            try:
                check_report(later)
            except InvalidArgument:
                continue
            registry.report(record, later)
    for request in picks:
        with contextlib.suppress(TokenloomError):
            servicer._pick(request)
        clock.now += 0.1
        registry.refresh()
        servicer._feed.publish(clock.now)
        snapshot_of(registry)
    for engine in snapshot_of(registry).engines:
        assert engine.identity.engine_id


def test_it_keeps_time_while_it_ticks() -> None:
    time = Clock()
    clock = StallAwareClock(time)
    begin = clock()
    for _ in range(20):
        time.now += TICK_SECONDS
        clock.tick()
    time.now += 0.125
    assert clock() - begin == pytest.approx(20 * TICK_SECONDS + 0.125)


def test_a_pause_counts_as_one_tick() -> None:
    time = Clock()
    clock = StallAwareClock(time)
    begin = clock()
    time.now += 5.0
    assert clock() - begin == LONGEST_TICK_SECONDS
    clock.tick()
    time.now += 0.125
    assert clock() - begin == LONGEST_TICK_SECONDS + 0.125


async def test_it_ticks_while_it_runs() -> None:
    time = Clock()
    clock = StallAwareClock(time)
    begin = clock()
    running = asyncio.create_task(clock.run())
    await settle()
    for _ in range(8):
        time.now += TICK_SECONDS
        pass_time(TICK_SECONDS)
        await settle()
    assert clock() - begin == pytest.approx(8 * TICK_SECONDS)
    running.cancel()
