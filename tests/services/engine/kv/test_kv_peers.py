import asyncio

import pytest

from tests.loop_clock import settle
from tokenloom.engine_core.kv_transfer.kv_transport import KVTransferError
from tokenloom.services.engine.kv import kv_peers
from tokenloom.services.engine.kv.kv_peers import AVOID_SECONDS, EngineRegistry, KVChannels, KVPaths, Owner
from tokenloom.services.runtime.peers.channels import Channels
from tokenloom.services.runtime.registry.registry_view import RegistryView
from tokenloom.v1.coordinator_pb2 import EngineEntry, EngineIdentity, Snapshot

HERE, THERE = Owner("a", 1, "unix:/a", "host"), Owner("b", 1, "b:1", "another")


def snapshot(*engines: tuple[str, int], complete: bool = True) -> RegistryView:
    entries = [
        EngineEntry(identity=EngineIdentity(engine_id=name, epoch=epoch, kv_address=f"unix:/{name}.{epoch}", host="h"))
        for name, epoch in engines
    ]
    return view_of(Snapshot(engines=entries, complete=complete))


def view_of(message: Snapshot) -> RegistryView:
    view = RegistryView()
    view.take(message)
    return view


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_peers, "UNKNOWN_SECONDS", 0.02)


async def test_an_incarnation_is_found_and_no_other() -> None:
    registry = EngineRegistry(None)
    registry.update(snapshot(("a", 1), ("b", 2)))
    assert await registry.find("b", 2) == Owner("b", 2, "unix:/b.2", "h")
    assert registry.has(Owner("a", 1, "unix:/a.1", "h"))
    registry.update(snapshot(("b", 3)))
    assert not registry.has(Owner("a", 1, "unix:/a.1", "h"))
    assert not registry.has(Owner("b", 2, "unix:/b.2", "h"))
    for name, epoch in (("a", 1), ("b", 2)):
        with pytest.raises(KVTransferError) as lost:
            await registry.find(name, epoch)
        assert lost.value.reason == "owner_lost"


async def test_an_engine_may_be_named_before_it_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_peers, "UNKNOWN_SECONDS", 60.0)
    registry = EngineRegistry(None)
    finding = asyncio.create_task(registry.find("a", 2))
    await asyncio.sleep(0)
    registry.update(snapshot(("a", 1)))
    await asyncio.sleep(0)
    registry.update(snapshot(("a", 2)))
    assert (await finding).epoch == 2


async def test_while_engines_rejoin_a_new_coordinator_those_known_stay() -> None:
    registry = EngineRegistry(None)
    registry.update(snapshot(("a", 1), ("b", 1)))
    registry.update(snapshot(("b", 2), complete=False))
    assert (await registry.find("a", 1)).epoch == 1
    assert (await registry.find("b", 2)).epoch == 2


async def test_an_engine_without_a_kv_port_has_nothing_to_read() -> None:
    registry = EngineRegistry(None)
    registry.update(
        view_of(Snapshot(engines=[EngineEntry(identity=EngineIdentity(engine_id="a", epoch=1))], complete=True))
    )
    with pytest.raises(KVTransferError, match="serves no KV"):
        await registry.find("a", 1)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_memory_is_shared_on_one_host_only() -> None:
    paths = KVPaths(["shm", "nixl", "socket"], "host")
    assert paths.to(HERE) == ["shm", "nixl", "socket"]
    assert paths.to(THERE) == ["nixl", "socket"]


def test_what_failed_is_avoided_for_a_while_for_that_engine_in_that_life() -> None:
    clock = Clock()
    paths = KVPaths(["shm", "socket"], "host", clock)
    paths.note_failure(HERE, "shm")
    assert paths.to(HERE) == ["socket"]
    assert paths.to(Owner("a", 2, "unix:/a", "host")) == ["shm", "socket"]
    assert paths.to(Owner("c", 1, "unix:/c", "host")) == ["shm", "socket"]
    clock.now += AVOID_SECONDS
    assert paths.to(HERE) == ["shm", "socket"]


def test_where_nothing_is_left_all_are_tried() -> None:
    paths = KVPaths(["shm", "socket"], "host")
    paths.note_failure(HERE, "shm")
    paths.note_failure(HERE, "socket")
    assert paths.to(HERE) == ["shm", "socket"]


def test_what_is_past_is_forgotten() -> None:
    clock = Clock()
    paths = KVPaths(["shm"], "host", clock)
    for epoch in range(100):
        paths.note_failure(Owner("a", epoch, "", "host"), "shm")
        clock.now += AVOID_SECONDS / 2
    assert len(paths._failed) <= 2


async def test_what_leaves_while_another_one_is_closed_is_closed_too() -> None:
    registry, left = EngineRegistry(None), list[str]()
    registry.update(snapshot(("a", 1), ("b", 1)))

    async def on_left(owners: list[str]) -> None:
        left.extend(owners)
        if owners == ["a@1"]:
            registry.update(snapshot())

    opened = KVChannels(registry, Channels(), on_left)
    for name in "ab":
        async with opened.stub(await registry.find(name, 1)):
            pass
    following = asyncio.create_task(opened.run())
    await settle()
    registry.update(snapshot(("b", 1)))
    await settle()
    following.cancel()
    await opened.close()
    assert left == ["a@1", "b@1"]
