"""Operations on LoRA adapters, as operators and the coordinator ask for them."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.engine_core.adapter_dirs import make_adapter
from tests.ready_channel import ready_channel
from tests.services.engine.peer import VOCAB_SIZE, Peer, make_add, make_service, make_settings
from tokenloom.engine_core.fake_workers.hash_worker import expected_tokens
from tokenloom.request.adapter_names import adapter_salt
from tokenloom.services.engine.running_engine import RunningEngine
from tokenloom.services.runtime.host.service import running
from tokenloom.services.runtime.peers.channels import open_channel
from tokenloom.v1 import coordinator_pb2
from tokenloom.v1 import engine_pb2 as pb
from tokenloom.v1.engine_pb2_grpc import EngineAdminStub
from tokenloom.v1.types_pb2 import Adapter

PROMPT = [5, 6, 7]


def make_add_with(slot: int, adapter: bytes) -> pb.AddRequest:
    add = make_add(slot, PROMPT)
    add.prompt.adapter, add.prompt.cache_salt = adapter, adapter_salt(b"", adapter)
    return add


@pytest.fixture
async def engine(socket_dir: Path) -> AsyncIterator[RunningEngine]:
    settings = make_settings(socket_dir, max_model_len=500, enable_lora=True, max_loras=2, max_cpu_loras=2)
    service = make_service(settings)
    started: list[RunningEngine] = []
    start = service.start

    async def remember(host: Any) -> RunningEngine:
        started.append(await start(host))
        return started[0]

    service.start = remember  # type: ignore[method-assign]
    async with running(service, settings):
        yield started[0]


@pytest.fixture
async def admin(engine: RunningEngine) -> AsyncIterator[EngineAdminStub]:
    async with open_channel(engine.host.address) as channel:
        yield EngineAdminStub(channel)


async def load(admin: EngineAdminStub, path: Path, **fields: Any) -> Adapter:
    answer = await admin.LoadLora(pb.LoadLoraRequest(**{"name": path.name, "path": str(path), **fields}))
    adapter: Adapter = answer.adapter
    return adapter


async def status_of(call: Any) -> grpc.StatusCode:
    with pytest.raises(grpc.aio.AioRpcError) as refusal:
        await call
    status: grpc.StatusCode = refusal.value.code()
    return status


async def test_an_adapter_is_loaded_named_and_forgotten(
    admin: EngineAdminStub, engine: RunningEngine, tmp_path: Path
) -> None:
    digest = make_adapter(tmp_path / "pirate", rank=8)
    engine.load.changed.clear()
    adapter = await load(admin, tmp_path / "pirate", digest=digest)
    assert (adapter.name, adapter.digest, adapter.path) == ("pirate", digest, str(tmp_path / "pirate"))
    assert engine.load.changed.is_set(), "the coordinator learns of it at once"
    (state,) = (await admin.ListLoras(pb.ListLorasRequest())).adapters
    assert (state.adapter.name, state.rank, state.in_slot, state.requests) == ("pirate", 8, False, 0)
    async with Peer(engine.host.address) as peer:
        await peer.send(make_add_with(1, digest))
        await peer.send(make_add_with(2, b""))
        received = await peer.read_until_finished([1, 2])
        for slot, each in ((1, digest), (2, b"")):
            assert received.token_ids[slot] == expected_tokens(PROMPT, 5, VOCAB_SIZE, each)
        await admin.UnloadLora(pb.UnloadLoraRequest(name="pirate"))
        await peer.send(make_add_with(3, digest))
        error = (await peer.read_until_finished([3])).finished[3].error
        assert error.reason == "TRY_ELSEWHERE"
    assert not (await admin.ListLoras(pb.ListLorasRequest())).adapters


async def test_refusals_have_the_documented_statuses(admin: EngineAdminStub, tmp_path: Path) -> None:
    for name in ("one", "two", "three"):
        make_adapter(tmp_path / name)
    one, two = tmp_path / "one", tmp_path / "two"
    assert await status_of(load(admin, Path("relative"))) is grpc.StatusCode.INVALID_ARGUMENT
    assert await status_of(load(admin, tmp_path / "absent")) is grpc.StatusCode.INVALID_ARGUMENT
    assert await status_of(load(admin, one, digest=b"0" * 32)) is grpc.StatusCode.FAILED_PRECONDITION
    await load(admin, one)
    assert await status_of(load(admin, two, name="one")) is grpc.StatusCode.FAILED_PRECONDITION
    await load(admin, two, name="one", in_place=True)
    for name, status in (("absent", grpc.StatusCode.NOT_FOUND), ("one", grpc.StatusCode.OK)):
        call = admin.PinLora(pb.PinLoraRequest(name=name, pinned=True))
        assert status is grpc.StatusCode.OK or await status_of(call) is status
        if status is grpc.StatusCode.OK:
            await call
    assert await status_of(admin.UnloadLora(pb.UnloadLoraRequest(name="absent"))) is grpc.StatusCode.NOT_FOUND
    await load(admin, one, name="other")
    assert await status_of(admin.PinLora(pb.PinLoraRequest(name="other", pinned=True))) is (
        grpc.StatusCode.RESOURCE_EXHAUSTED
    )


async def test_the_coordinators_changes_are_applied(
    admin: EngineAdminStub, engine: RunningEngine, tmp_path: Path
) -> None:
    digests = {name: make_adapter(tmp_path / name) for name in ("one", "two")}
    await load(admin, tmp_path / "one")
    wanted = Adapter(name="two", digest=digests["two"], path=str(tmp_path / "two"), pinned=True)
    absent = Adapter(name="absent", digest=b"0" * 32, path=str(tmp_path / "absent"))
    engine.load.changed.clear()
    await engine.loras.apply(coordinator_pb2.AdapterChanges(load=[absent, wanted], unload=["one", "never"]))
    assert engine.load.changed.is_set()
    assert [(each.name, each.pinned) for each in engine.load.loras] == [("two", True)]


async def test_without_the_option_adapters_are_refused(host: Any, tmp_path: Path) -> None:
    make_adapter(tmp_path / "one")
    async with ready_channel(host.address) as channel:
        admin = EngineAdminStub(channel)
        assert await status_of(load(admin, tmp_path / "one")) is grpc.StatusCode.FAILED_PRECONDITION
    async with Peer(host.address) as peer:
        await peer.send(make_add_with(1, b"0" * 32))
        await peer.send(make_add_with(2, b"0" * 31))
        received = await peer.read_until_finished([1, 2])
    assert [received.finished[slot].error.reason for slot in (1, 2)] == ["TRY_ELSEWHERE", "INVALID_ARGUMENT"]


async def test_an_error_of_any_kind_is_not_the_end_of_the_engine(
    engine: RunningEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail(*_: object, **__: object) -> None:
        raise OSError(36, "File name too long")

    monkeypatch.setattr(engine.loras, "load", fail)
    await engine.loras.apply(coordinator_pb2.AdapterChanges(load=[Adapter(name="a", path="/a")]))
    assert "cannot load a for the coordinator" in caplog.text
