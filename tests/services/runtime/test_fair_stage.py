"""Tests whose turn it is at a stage that tenants share."""

import asyncio
import random
from collections import Counter

import pytest

from tokenloom.process.cpu_bill import OVERHEAD, CpuBill
from tokenloom.request import errors
from tokenloom.request.limits import ALONE_AFTER, TenantTurns
from tokenloom.services.runtime.fair_stage import TURN_CPU_NS, BilledStage, FairStage


def stage(places: int = 1, *, max_waiting: int = 100, max_cost: int = 1000, leaves_spare: bool = False) -> FairStage:
    return FairStage(places, "texts", max_waiting=max_waiting, max_cost=max_cost, leaves_spare=leaves_spare)


class Calls:
    """Makes calls at a stage, each in a task that runs until it is ended."""

    def __init__(self, at: FairStage) -> None:
        self._stage = at
        self.running: list[str] = []
        self._begun: dict[str, asyncio.Task[None]] = {}
        self._costs: dict[str, tuple[str, int]] = {}

    async def call(self, name: str, cost: int = 1) -> None:
        """Make a call of the tenant that is the name's first letter, and let it wait."""
        self._costs[name] = name[0], cost
        self._begun[name] = asyncio.create_task(self._begin(name, cost))
        await self.settle()

    async def end(self, name: str) -> None:
        self.running.remove(name)
        self._stage.end(*self._costs[name])
        await self.settle()

    async def cancel(self, name: str) -> None:
        self._begun[name].cancel()
        with pytest.raises(asyncio.CancelledError):
            await self._begun[name]

    async def drain(self) -> list[str]:
        """End what runs, one call after the other, until none is left. Returns their names in that order."""
        names = []
        while self.running:
            names.append(self.running[0])
            await self.end(self.running[0])
        return names

    async def settle(self) -> None:
        for _ in range(4):
            await asyncio.sleep(0)

    async def _begin(self, name: str, cost: int) -> None:
        await self._stage.begin(name[0], cost)
        self.running.append(name)


async def test_tenants_take_turns_by_what_theirs_cost() -> None:
    calls = Calls(stage())
    for name in ("a1", "a2", "a3"):
        await calls.call(name, 100)
    for name in ("b1", "b2", "b3", "b4"):
        await calls.call(name, 40)
    assert await calls.drain() == ["a1", "b1", "b2", "b3", "a2", "b4", "a3"]


async def test_a_tenant_that_was_away_does_not_owe_or_save_turns() -> None:
    calls = Calls(stage())
    for name in ("a1", "b1", "a2", "b2", "a3"):
        await calls.call(name, 10)
    for name in ("a1", "b1", "a2"):
        await calls.end(name)
    await calls.call("c1", 10)
    await calls.call("c2", 10)
    assert await calls.drain() == ["b2", "c1", "a3", "c2"]


async def test_one_place_is_left_to_others_unless_a_tenant_is_alone() -> None:
    calls = Calls(stage(2, leaves_spare=True))
    for name in ("a1", "a2", "a3"):
        await calls.call(name)
    assert calls.running == ["a1", "a2"]  # no other tenant has been seen
    await calls.call("b1")
    await calls.end("a1")
    assert calls.running == ["a2", "b1"]
    await calls.end("b1")
    assert calls.running == ["a2"]  # a3 waits: b may come back
    await calls.call("b2")
    assert calls.running == ["a2", "b2"]
    await calls.drain()
    for number in range(ALONE_AFTER):
        await calls.call(f"a{number}")
        await calls.end(f"a{number}")
    await calls.call("a1")
    await calls.call("a2")
    assert calls.running == ["a1", "a2"]


async def test_a_stage_refuses_before_it_spends() -> None:
    full = stage(max_waiting=1, max_cost=100)
    await full.begin("a", 30)
    waiting = asyncio.create_task(full.begin("a", 10))
    await asyncio.sleep(0)
    with pytest.raises(errors.ResourceExhausted, match="1 texts already wait") as refused:
        await full.begin("b", 1)
    assert refused.value.retry_after is not None
    with pytest.raises(errors.ResourceExhausted, match="too large"):
        await full.begin("a", 21)  # it would hold more than is free
    full.end("a", 30)
    await waiting
    full.end("a", 10)
    await full.begin("a", 1000)  # alone, a call may be larger than all that a stage holds
    with pytest.raises(errors.ResourceExhausted, match="too large"):
        await full.begin("b", 1)
    full.end("a", 1000)


async def test_cancelled_calls_give_back_what_they_held() -> None:
    at = stage()
    calls = Calls(at)
    for name in ("a1", "a2", "b1", "b2"):
        await calls.call(name, 100)
    await calls.cancel("b1")
    await calls.end("a1")
    assert calls.running == ["b2"]
    calls._begun["a2"].cancel()
    await calls.end("b2")
    await calls.settle()
    assert not at.num_waiting
    await calls.call("c1", 1000)
    assert calls.running == ["c1"]


@pytest.mark.parametrize("seed", range(20))
async def test_places_and_costs_balance_however_calls_end(seed: int) -> None:
    draw = random.Random(seed)
    at = stage(3, max_waiting=8, max_cost=500, leaves_spare=bool(seed % 2))
    running: Counter[str] = Counter()

    async def call(tenant: str) -> None:
        cost = draw.randrange(1, 90)
        try:
            await at.begin(tenant, cost)
        except errors.ResourceExhausted:
            return
        try:
            running[tenant] += 1
            assert running.total() <= 3
            for _ in range(draw.randrange(4)):
                await asyncio.sleep(0)
        finally:
            running[tenant] -= 1
            at.end(tenant, cost)

    tasks = []
    for _ in range(200):
        tasks.append(asyncio.create_task(call(draw.choice("aab"))))
        if draw.random() < 0.3:
            draw.choice(tasks).cancel()
        if draw.random() < 0.5:
            await asyncio.sleep(0)
    await asyncio.gather(*tasks, return_exceptions=True)
    assert (at._num_free, at._cost_left, at.num_waiting) == (3, 500, 0)
    assert not at._used
    assert not at._waiting


def test_accounts_are_forgotten() -> None:
    turns = TenantTurns(2)
    for number in range(1000):
        tenant = f"tenant {number}"
        turns.wait(tenant)
        assert turns.next([tenant]) == tenant
        turns.start(tenant)
        turns.stop(tenant, 1.0)
        turns.forget(())
    assert not turns._used


async def test_places_that_are_kept_stay_free_until_they_are_not() -> None:
    at = stage(3)
    calls = Calls(at)
    at.num_kept = 2
    for name in ("a1", "a2", "a3"):
        await calls.call(name)
    assert calls.running == ["a1"]
    await calls.end("a1")
    assert calls.running == ["a2"]
    at.num_kept = 0
    await calls.call("a4")
    assert sorted(calls.running) == ["a2", "a3", "a4"]


async def test_a_turn_is_billed_while_it_lasts_and_not_while_it_waits() -> None:
    now = cpu = 0
    bill = CpuBill(lambda: cpu, lambda: now)
    billed = BilledStage(bill, 10, 1, "texts", max_waiting=10, max_cost=1000)

    async def call(tenant: str, cost: int) -> int:
        nonlocal now, cpu
        await billed.begin(tenant, cost)
        try:
            now, cpu = now + 10**9, cpu + cost * 1000
            await asyncio.sleep(0)
        finally:
            billed.end(tenant, cost)
        return TURN_CPU_NS.get()

    spent = await asyncio.gather(call("a", 30), call("b", 90), call("a", 10))
    assert [*spent] == [30_000, 90_000, 10_000]
    assert bill.totals() == {OVERHEAD: 0, "a": 40_000, "b": 90_000}
    assert TURN_CPU_NS.get() == 0, "of each task its own"


async def test_turns_at_a_time_pay_by_their_costs() -> None:
    now = cpu = 0
    bill = CpuBill(lambda: cpu, lambda: now)
    billed = BilledStage(bill, 10, 2, "texts", max_waiting=10, max_cost=1000)
    done = asyncio.Event()

    async def call(tenant: str, cost: int) -> int:
        await billed.begin(tenant, cost)
        await done.wait()
        billed.end(tenant, cost)
        return TURN_CPU_NS.get()

    calls = [asyncio.create_task(call(tenant, cost)) for tenant, cost in (("a", 10), ("b", 30))]
    await asyncio.sleep(0)
    now, cpu = 10**9, 6000
    done.set()
    assert await asyncio.gather(*calls) == [2000, 4000]


async def test_a_turn_that_is_cancelled_while_it_waits_costs_nothing() -> None:
    bill = CpuBill(lambda: 0, lambda: 0)
    billed = BilledStage(bill, 10, 1, "texts", max_waiting=10, max_cost=1000)
    await billed.begin("a", 1)
    waiting = asyncio.create_task(billed.begin("b", 1))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    billed.end("a", 1)
    assert not billed._accounts
    assert not bill._live
