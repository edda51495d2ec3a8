"""However many picks come at one moment, the reports of engines are read between them."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from tests.loop_clock import settle
from tests.services.coordinator.engines.test_engine_registry import report
from tests.services.coordinator.policies import DEFAULT_POLICY
from tests.services.coordinator.test_coordinator_servicer import first_report
from tokenloom.request.errors import Unavailable
from tokenloom.services.coordinator.coordinator_servicer import CoordinatorServicer
from tokenloom.services.coordinator.engines.engine_record import StallAwareClock
from tokenloom.services.coordinator.engines.engine_registry import Registry
from tokenloom.services.coordinator.picks.pick_slices import SLICE_SECONDS, PickMetrics, PickSlices
from tokenloom.services.coordinator.picks.placed import Placed, engine_part
from tokenloom.v1.coordinator_pb2 import (
    EngineIdentity,
    EngineReport,
    EngineState,
    PickBatch,
    PickRequest,
    PickResult,
    PickResults,
)
from tokenloom.v1.types_pb2 import EngineRole, Fingerprint

NUM_ENGINES, NUM_PICKS = 1000, 5000


class Time:
    """Seconds that pass with every pick."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Picker:
    """Answers picks; each one takes a fifth of a slice."""

    def __init__(self, time: Time) -> None:
        self._time = time
        self.tenants: list[str] = []

    def __call__(self, request: PickRequest) -> Placed:
        self._time.now += SLICE_SECONDS / 5
        self.tenants.append(request.tenant)
        if not request.tenant:
            raise Unavailable("no tenant")
        engine = EngineIdentity()
        return Placed(engine, engine_part(engine), False, 1, len(self.tenants))


@pytest.fixture
def time() -> Time:
    return Time()


def batch(tenant: str, count: int) -> list[PickRequest]:
    return [PickRequest(tenant=tenant) for _ in range(count)]


async def answers(slices: PickSlices, requests: list[PickRequest]) -> list[int]:
    """The number of answers in each message."""
    return [len(PickResults.FromString(results).result) async for results in slices.answer(requests)]


async def test_a_batch_is_answered_in_slices_with_a_turn_of_the_loop_between(time: Time) -> None:
    picker = Picker(time)
    slices = PickSlices(picker, time)
    turns: list[int] = []

    async def count_turns() -> None:
        while True:
            turns.append(len(picker.tenants))
            await asyncio.sleep(0)

    counting = asyncio.create_task(count_turns())
    assert await answers(slices, batch("a", 12)) == [5, 5, 2]
    counting.cancel()
    assert {5, 10} <= set(turns)
    assert await answers(slices, []) == [0]  # a picker that sends no picks asks for a message


async def test_streams_take_turns_and_share_a_slice(time: Time) -> None:
    picker = Picker(time)
    slices = PickSlices(picker, time)
    shapes = await asyncio.gather(*(answers(slices, batch(name, 10)) for name in "abc"))
    assert all(sum(shape) == 10 for shape in shapes)
    assert picker.tenants[:25].count("a") <= 10
    assert {"b", "c"} <= set(picker.tenants[:15]), "each stream begins before the first one has ended"
    assert await asyncio.gather(*(answers(slices, batch(name, 2)) for name in "ab")) == [[2], [2]]


async def test_a_stream_that_ends_gives_its_turn_to_the_next(time: Time) -> None:
    slices = PickSlices(Picker(time), time)
    tasks = [asyncio.create_task(answers(slices, batch(name, 20))) for name in "abcd"]
    for task in tasks[:3]:
        await asyncio.sleep(0)
        task.cancel()
    assert sum(await tasks[3]) == 20


async def test_an_error_is_of_one_pick(time: Time) -> None:
    slices = PickSlices(Picker(time), time)
    (results,) = [
        PickResults.FromString(each) async for each in slices.answer([*batch("a", 1), *batch("", 1), *batch("b", 1)])
    ]
    assert [each.WhichOneof("outcome") for each in results.result] == ["response", "error", "response"]


async def test_single_picks_share_a_part_of_each_turn(time: Time) -> None:
    picker = Picker(time)
    slices = PickSlices(picker, time)
    calls = [asyncio.create_task(slices.answer_one(PickRequest(tenant="a"))) for _ in range(10)]
    stream = asyncio.create_task(answers(slices, batch("b", 10)))
    calls[7].cancel()
    most, before = 0, 0
    while not all(call.done() for call in calls):
        await asyncio.sleep(0)
        most, before = max(most, len(picker.tenants) - before), len(picker.tenants)
    assert 3 <= most <= 5 + 3, "a slice of the stream, and 2.5 picks or the one that exceeds it"
    assert sum(await stream) == 10
    assert picker.tenants.count("a") == 9


async def test_the_error_of_a_single_pick_is_its_own(time: Time) -> None:
    slices = PickSlices(Picker(time), time)
    singles = [slices.answer_one(PickRequest(tenant=tenant)) for tenant in ("a", "a", "a", "", "", "b")]
    outcomes = await asyncio.gather(*singles, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [Placed] * 3 + [Unavailable] * 2 + [Placed]


class Context:
    """Takes what the coordinator writes to a stream."""

    def __init__(self, taken: Callable[[Any], None] = lambda _: None) -> None:
        self._taken = taken

    async def write(self, message: Any) -> None:
        self._taken(message)


class Engine:
    """An engine that has joined and reports when :meth:`report` is called."""

    def __init__(self, name: str, servicer: CoordinatorServicer) -> None:
        self._inputs: asyncio.Queue[EngineReport] = asyncio.Queue()
        self._inputs.put_nowait(first_report(name))
        self.joined = asyncio.create_task(servicer.Join(self._reports(), Context()))  # type: ignore[arg-type]

    def report(self, step: int) -> None:
        self._inputs.put_nowait(report(free_kv_blocks=64, step=step))

    async def _reports(self) -> AsyncIterator[EngineReport]:
        while True:
            yield await self._inputs.get()


async def report_every_second(engines: list[Engine], time: Time) -> None:
    """Send the reports that are due in each turn of the event loop."""
    num_sent = 0
    while True:
        await asyncio.sleep(0)
        if time.now >= num_sent + 1:
            num_sent += 1
            for engine in engines:
                engine.report(num_sent)


async def test_no_engine_is_dead_after_five_thousand_picks_at_one_moment() -> None:
    """Each pick takes 3 ms, so that all together take longer than an engine may be silent."""
    time = Time()
    clock = StallAwareClock(time)
    registry = Registry(1, clock, policy=DEFAULT_POLICY, settle_seconds=0.0)
    pick = registry.pick

    def slow_pick(request: PickRequest) -> Placed:
        time.now += 0.003
        return pick(request)

    registry.pick = slow_pick  # type: ignore[method-assign]
    servicer = CoordinatorServicer(registry, "c", 1, PickMetrics(CollectorRegistry()))
    servicer._slices = PickSlices(servicer._pick, time)
    engines = [Engine(f"e{number}", servicer) for number in range(NUM_ENGINES)]
    await settle()
    tasks = [asyncio.create_task(report_every_second(engines, time)), *(engine.joined for engine in engines)]
    states: set[int] = set()
    results: list[PickResult] = []

    def take(data: bytes) -> None:
        message = PickResults.FromString(data)
        assert len(message.result) <= 2  # 5 ms
        clock.tick()
        registry.refresh()
        if len(results) % 50 == 0:
            states.update(record.state for record in registry._records.values())
        results.extend(message.result)

    async def one_batch() -> AsyncIterator[PickBatch]:
        request = PickRequest(fingerprint=Fingerprint(model="m"), role=EngineRole.ENGINE_ROLE_BOTH, prompt_tokens=3)
        yield PickBatch(pick=[request] * NUM_PICKS)

    await servicer.PickStream(one_batch(), Context(take))  # type: ignore[arg-type]
    assert time.now > 14.0
    assert sum(servicer._picks.seconds.counts) == NUM_PICKS
    names = Counter(result.response.engine.engine_id for result in results)
    assert len(names) == NUM_ENGINES
    assert set(names.values()) == {NUM_PICKS // NUM_ENGINES}
    assert states == {EngineState.ENGINE_STATE_SERVING}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_an_unexpected_error_of_one_pick_ends_neither_the_stream_nor_the_others() -> None:
    def pick(request: PickRequest) -> Placed:
        if not request.tenant:
            raise OverflowError("int too big to convert")
        return Placed(EngineIdentity(), engine_part(EngineIdentity()), False, 1, 1)

    requests = [PickRequest(tenant=tenant) for tenant in ("a", "", "b")]
    data = b"".join([part async for part in PickSlices(pick).answer(requests)])
    results = PickResults.FromString(data).result
    assert [result.error.reason for result in results] == ["", "INTERNAL", ""]
