import asyncio

import pytest

from tokenloom.engine_core.kv_transfer.kv_transport import KVTransferError
from tokenloom.services.engine.kv import kv_peers
from tokenloom.services.engine.kv.kv_peers import EngineRegistry, Owner
from tokenloom.services.runtime.peers.channels import Channels
from tokenloom.v1.coordinator_pb2 import EngineEntry, EngineIdentity, Snapshot


def snapshot(*engines: tuple[str, int], complete: bool = True) -> Snapshot:
    entries = [
        EngineEntry(identity=EngineIdentity(engine_id=name, epoch=epoch, kv_address=f"unix:/{name}.{epoch}", host="h"))
        for name, epoch in engines
    ]
    return Snapshot(engines=entries, complete=complete)


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_peers, "UNKNOWN_SECONDS", 0.02)


async def test_an_incarnation_is_found_and_no_other() -> None:
    registry = EngineRegistry("", Channels())
    await registry.update(snapshot(("a", 1), ("b", 2)))
    assert await registry.find("b", 2) == Owner("b", 2, "unix:/b.2", "h")
    assert registry.has_address("unix:/a.1")
    await registry.update(snapshot(("b", 3)))
    assert not registry.has_address("unix:/a.1")
    for name, epoch in (("a", 1), ("b", 2)):
        with pytest.raises(KVTransferError) as lost:
            await registry.find(name, epoch)
        assert lost.value.reason == "owner_lost"


async def test_an_engine_may_be_named_before_it_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_peers, "UNKNOWN_SECONDS", 5.0)
    registry = EngineRegistry("", Channels())
    finding = asyncio.create_task(registry.find("a", 2))
    await registry.update(snapshot(("a", 1)))
    await registry.update(snapshot(("a", 2)))
    assert (await finding).epoch == 2


async def test_while_engines_rejoin_a_new_coordinator_those_known_stay() -> None:
    registry = EngineRegistry("", Channels())
    await registry.update(snapshot(("a", 1), ("b", 1)))
    await registry.update(snapshot(("b", 2), complete=False))
    assert (await registry.find("a", 1)).epoch == 1
    assert (await registry.find("b", 2)).epoch == 2


async def test_an_engine_without_a_kv_port_has_nothing_to_read() -> None:
    registry = EngineRegistry("", Channels())
    await registry.update(
        Snapshot(engines=[EngineEntry(identity=EngineIdentity(engine_id="a", epoch=1))], complete=True)
    )
    with pytest.raises(KVTransferError, match="serves no KV"):
        await registry.find("a", 1)
