"""Tests where requests with LoRA adapters are placed, and what engines that join are asked to load."""

import asyncio
from typing import Any

import grpc
import pytest

from tests.services.coordinator.engines.test_engine_registry import Clock, identity, report
from tests.services.coordinator.policies import DEFAULT_POLICY
from tests.services.coordinator.snapshots import snapshot_of
from tests.services.coordinator.test_coordinator_servicer import Coordinator, coordinator, first_report
from tokenloom.request.errors import InvalidArgument, ModelNotFound, ResourceExhausted, Unavailable
from tokenloom.services.coordinator.engines.engine_record import EngineRecord
from tokenloom.services.coordinator.engines.engine_registry import Registry
from tokenloom.services.coordinator.engines.wanted_adapters import (
    LOAD_SECONDS,
    MAX_ADAPTERS,
    MAX_UNLOADED,
    WantedAdapters,
)
from tokenloom.services.runtime.placement.engine_columns import EngineColumns
from tokenloom.v1.coordinator_pb2 import AdapterChanges, EngineIdentity, EngineState, PickRequest, SetAdapterRequest
from tokenloom.v1.types_pb2 import Adapter, EngineRole

__all__ = ["coordinator"]

PIRATE, JSON, OTHER = (
    Adapter(name="pirate", digest=b"p" * 32, path="/pirate"),
    Adapter(name="json", digest=b"j" * 32, path="/json", pinned=True),
    Adapter(name="pirate", digest=b"o" * 32, path="/other"),
)


def able(name: str) -> EngineIdentity:
    """An engine that can load adapters."""
    found = identity(name)
    found.limits.max_lora_rank = 16
    return found


def joined(name: str, *adapters: Adapter) -> EngineRecord:
    return record_of(able(name), *adapters)


def record_of(identity: EngineIdentity, *adapters: Adapter) -> EngineRecord:
    columns = EngineColumns()
    return EngineRecord(identity, report(adapters=adapters), 0.0, columns, columns.add())


def registry(clock: Clock, **engines: tuple[Adapter, ...]) -> Registry:
    made = Registry(1, clock, policy=DEFAULT_POLICY, settle_seconds=0.0)
    for name, adapters in engines.items():
        made.adapters.join(made.join(able(name), report(adapters=adapters)))
    return made


def pick(made: Registry, digest: bytes) -> str:
    request = PickRequest(role=EngineRole.ENGINE_ROLE_BOTH, prompt_tokens=10, adapter=digest)
    return made.pick(request).engine.engine_id


def test_requests_go_by_load_to_the_engines_that_have_their_adapter() -> None:
    made = registry(Clock(), a=(PIRATE,), b=(PIRATE, JSON), c=())
    assert [pick(made, PIRATE.digest) for _ in range(4)] == ["a", "b", "a", "b"]
    assert [pick(made, JSON.digest) for _ in range(2)] == ["b", "b"]
    assert [pick(made, b"") for _ in range(2)] == ["c", "c"]


def test_an_adapter_that_no_engine_has_is_loaded_where_the_load_is_least() -> None:
    clock = Clock()
    made = registry(clock, a=(PIRATE,), b=(), c=())
    record = made.join(able("a"), report())  # it was restarted
    made.join(able("b"), report(running=3))
    made.join(identity("d"), report())  # has no load, but cannot load adapters
    made.join(able("a"), report(running=2))
    for _ in range(3):
        with pytest.raises(Unavailable, match="'pirate'"):
            pick(made, PIRATE.digest)
    assert made.adapters.to_load == [("c", AdapterChanges(load=[PIRATE]))]
    clock.now += LOAD_SECONDS
    with pytest.raises(Unavailable):
        pick(made, PIRATE.digest)
    assert len(made.adapters.to_load) == 2
    assert record.adapters == frozenset()
    made.report(made.join(able("c"), report()), report(adapters=[PIRATE]))
    assert pick(made, PIRATE.digest) == "c"


def test_a_pick_for_an_unloaded_adapter_fails_at_once() -> None:
    made = registry(Clock(), a=(PIRATE,))
    made.set_adapter(PIRATE, unloaded=True)
    made.join(able("a"), report())
    with pytest.raises(ModelNotFound, match="unloaded or replaced"):
        pick(made, PIRATE.digest)
    assert not made.adapters.to_load


def test_nothing_is_missing_before_the_engines_had_time_to_join() -> None:
    clock = Clock()
    made = Registry(1, clock, policy=DEFAULT_POLICY)
    with pytest.raises(Unavailable, match="still joining"):
        pick(made, PIRATE.digest)
    clock.now += 3.0
    made.refresh()
    with pytest.raises(ModelNotFound):
        pick(made, PIRATE.digest)


def test_an_engine_that_joins_is_brought_to_the_state_of_the_others() -> None:
    wanted = WantedAdapters()
    assert wanted.join(joined("a", PIRATE)) is None
    wanted.set(JSON, unloaded=False)
    assert wanted.join(joined("b")) == AdapterChanges(load=[PIRATE, JSON])
    assert wanted.join(joined("c", OTHER, JSON)) == AdapterChanges(unload=["pirate"], load=[PIRATE])
    wanted.set(PIRATE, unloaded=True)
    assert wanted.join(joined("a", PIRATE)) == AdapterChanges(unload=["pirate"], load=[JSON])
    assert list(wanted) == [JSON]
    wanted.set(OTHER, unloaded=False)
    assert list(wanted) == [JSON, OTHER]
    assert wanted.join(record_of(identity("base"))) is None


def test_a_new_coordinator_takes_the_adapters_of_all_engines() -> None:
    made = registry(Clock(), a=(PIRATE,), b=(JSON,))
    assert list(snapshot_of(made).adapters) == [JSON, PIRATE]


def test_what_is_recorded_is_checked_and_bounded() -> None:
    wanted = WantedAdapters()
    for wrong in (Adapter(digest=b"d"), Adapter(name="n")):
        with pytest.raises(InvalidArgument):
            wanted.set(wrong, unloaded=False)
    for number in range(MAX_ADAPTERS):
        wanted.set(Adapter(name=str(number), digest=number.to_bytes(32)), unloaded=False)
    with pytest.raises(ResourceExhausted):
        wanted.set(PIRATE, unloaded=False)
    wanted.set(Adapter(name="0"), unloaded=True)
    wanted.set(PIRATE, unloaded=False)


async def test_commands_reach_engines_that_join_and_those_that_requests_wait_for(coordinator: Coordinator) -> None:
    await coordinator.stub.SetAdapter(SetAdapterRequest(adapter=PIRATE))
    snapshot = await coordinator.watch().read()
    assert list(snapshot.adapters) == [PIRATE]
    call = coordinator.open(_able_report("a"))
    assert (await call.read()).hello.peer_id == "coordinator-0"
    assert await _asked(call) == AdapterChanges(load=[PIRATE])
    request = PickRequest(role=EngineRole.ENGINE_ROLE_BOTH, prompt_tokens=3, adapter=PIRATE.digest)
    request.fingerprint.model = "m"
    assert "No engine has the LoRA adapter" in await _refusal(coordinator, request)
    assert await _asked(call) == AdapterChanges(load=[PIRATE])
    await call.write(report(adapters=[PIRATE], state=EngineState.ENGINE_STATE_SERVING))
    await _until_picked(coordinator, request)


async def _asked(call: Any) -> AdapterChanges:
    """Return the adapters that the next command names; a command that only paces reports does not count."""
    while not (command := await call.read()).HasField("adapters"):
        pass
    changes: AdapterChanges = command.adapters
    return changes


def _able_report(name: str) -> Any:
    first = first_report(name)
    first.identity.limits.max_lora_rank = 16
    return first


async def _refusal(coordinator: Coordinator, request: PickRequest) -> str:
    """Return why a pick is refused once the coordinator expects no other engine to join."""
    async with asyncio.timeout(30):
        while True:
            try:
                await coordinator.stub.Pick(request)
            except grpc.aio.AioRpcError as error:
                details = error.details() or ""
                if "still joining" not in details:
                    return details
            await asyncio.sleep(0.01)


async def _until_picked(coordinator: Coordinator, request: PickRequest) -> None:
    async with asyncio.timeout(30):
        while True:
            try:
                picked = await coordinator.stub.Pick(request)
            except Exception:
                await asyncio.sleep(0.01)
                continue
            assert picked.engine.engine_id == "a"
            return


def test_engines_that_joined_before_a_change_are_compared_with_what_has_changed() -> None:
    made = registry(Clock(), a=(), b=(PIRATE,))
    assert list(made.adapters.changed) == ["pirate"]
    before, having = joined("a"), joined("b", PIRATE)
    assert made.adapters.lacking(before, made.adapters.changed) == AdapterChanges(load=[PIRATE])
    assert made.adapters.lacking(having, made.adapters.changed) is None
    made.adapters.changed.clear()
    made.adapters.set(JSON, unloaded=False)
    # An engine that has room for one adapter only is not asked again for the others with each change.
    assert made.adapters.lacking(before, made.adapters.changed) == AdapterChanges(load=[JSON])
    made.adapters.set(PIRATE, unloaded=True)
    assert made.adapters.lacking(having, made.adapters.changed) == AdapterChanges(load=[JSON], unload=["pirate"])
    for number in range(MAX_ADAPTERS + MAX_UNLOADED + 9):
        made.adapters.set(Adapter(name=str(number)), unloaded=True)
    assert len(made.adapters.changed) == MAX_ADAPTERS + MAX_UNLOADED


async def test_an_engine_that_joined_first_is_asked_for_what_a_later_one_brings(coordinator: Coordinator) -> None:
    first, second = coordinator.stub.Join(), coordinator.stub.Join()
    for call, name, adapters in ((first, "a", []), (second, "b", [PIRATE])):
        message = first_report(name, adapters=adapters)
        message.identity.limits.max_lora_rank = 16
        await call.write(message)
        assert (await call.read()).hello.peer_id
    async with asyncio.timeout(30):
        while (command := await first.read()).WhichOneof("command") != "adapters":
            pass
    assert command.adapters == AdapterChanges(load=[PIRATE])
    first.cancel()
    second.cancel()
