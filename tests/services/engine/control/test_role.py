"""Roles: what the coordinator is told, and how one changes on a running engine."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import grpc
import pytest

from tests.services.engine.kv.kv_fakes import FakeCore, running_coordinator, running_front
from tests.services.engine.peer import Peer, make_add
from tokenloom.engine_core.data.messages import EngineCoreRequest, FinishReason, SchedulerStats
from tokenloom.request.errors import FailedPrecondition, InvalidArgument
from tokenloom.services.engine.engine_admin import Administration
from tokenloom.services.engine.records.engine_settings import EngineSettings
from tokenloom.services.runtime.host.host import Host
from tokenloom.services.runtime.peers.channels import open_channel
from tokenloom.v1.coordinator_pb2 import EngineEntry, EngineSetting, Snapshot, WatchRequest
from tokenloom.v1.coordinator_pb2_grpc import CoordinatorStub
from tokenloom.v1.engine_pb2 import SetRoleRequest
from tokenloom.v1.engine_pb2_grpc import EngineAdminStub
from tokenloom.v1.types_pb2 import (
    ENGINE_ROLE_BOTH,
    ENGINE_ROLE_DECODE,
    ENGINE_ROLE_ENCODE,
    ENGINE_ROLE_PREFILL,
    ENGINE_ROLE_UNSPECIFIED,
    EngineRole,
)


class Mesh:
    """A coordinator and one engine."""

    def __init__(self, directory: Path, core: FakeCore, host: Host, stack: AsyncExitStack) -> None:
        self.core = core
        self.host = host
        self._address = f"unix:{directory}/coordinator"
        self._stack = stack

    async def set_role(self, role: EngineRole, timeout: float | None = 30.0) -> None:
        channel = await self._stack.enter_async_context(open_channel(self.host.address))
        await EngineAdminStub(channel).SetRole(SetRoleRequest(role=role), timeout=timeout)

    async def until_told(self, role: EngineRole) -> EngineEntry:
        """The registry's entry, once it has this role."""
        channel = await self._stack.enter_async_context(open_channel(self._address))
        call = CoordinatorStub(channel).Watch(WatchRequest())
        async with asyncio.timeout(30):
            while isinstance(snapshot := await call.read(), Snapshot):
                for entry in snapshot.engines:
                    if entry.report.role == role:
                        call.cancel()
                        return entry
        raise AssertionError("the watch ended")


@asynccontextmanager
async def running_mesh(directory: Path, **settings: Any) -> AsyncIterator[Mesh]:
    core = FakeCore()
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(running_coordinator(directory))
        host = await stack.enter_async_context(running_front(directory, "engine-0", core, **settings))
        yield Mesh(directory, core, host, stack)


async def test_the_coordinator_is_told_the_role_and_the_kv_port(socket_dir: Path) -> None:
    async with running_mesh(socket_dir, role="prefill") as mesh:
        entry = await mesh.until_told(ENGINE_ROLE_PREFILL)
        assert entry.identity.kv_address == f"unix:{socket_dir}/engine-0-kv"


async def test_a_kv_port_may_be_reached_elsewhere(socket_dir: Path) -> None:
    async with running_mesh(socket_dir, kv_listen="127.0.0.1:0", kv_advertise_address="prefill-0.example:7000") as mesh:
        assert (await mesh.until_told(ENGINE_ROLE_BOTH)).identity.kv_address == "prefill-0.example:7000"


async def test_an_engine_that_moves_no_kv_has_one_role(socket_dir: Path) -> None:
    async with running_mesh(socket_dir, kv_transports=[]) as mesh:
        assert not (await mesh.until_told(ENGINE_ROLE_BOTH)).identity.kv_address
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await mesh.set_role(ENGINE_ROLE_DECODE)
        assert refusal.value.code() is grpc.StatusCode.FAILED_PRECONDITION


async def test_an_engine_whose_kv_nobody_can_read_does_not_become_one_for_prompts(socket_dir: Path) -> None:
    """The coordinator would refuse its reports from then on, and no request would reach it any more."""
    async with running_mesh(socket_dir, kv_listen="") as mesh:
        await mesh.until_told(ENGINE_ROLE_BOTH)
        with pytest.raises(grpc.aio.AioRpcError, match="--kv-listen") as refusal:
            await mesh.set_role(ENGINE_ROLE_PREFILL)
        assert refusal.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        await mesh.set_role(ENGINE_ROLE_DECODE)
        await mesh.until_told(ENGINE_ROLE_DECODE)


class FakeEngine(SimpleNamespace):
    """An engine that serves KV, or exchanges none; it notes its roles."""

    def __init__(self, *, has_kv: bool) -> None:
        self.roles: list[EngineRole] = []
        self.leases_ended: Any = AsyncMock()
        self.kv = SimpleNamespace(owner=None, moves=None) if has_kv else None

    def publish_role(self, role: EngineRole) -> None:
        self.roles.append(role)


@pytest.mark.parametrize("has_kv", [False, True])
async def test_a_role_that_was_refused_was_not_set(has_kv: bool) -> None:
    """The process takes the role that the one before it was set to."""
    engine = FakeEngine(has_kv=has_kv)
    administration = Administration(engine, ENGINE_ROLE_BOTH)  # type: ignore[arg-type]
    with pytest.raises((FailedPrecondition, InvalidArgument)):
        await administration.set_role(ENGINE_ROLE_PREFILL)
    engine.kv = SimpleNamespace(owner=None, moves=None)
    await administration.inherit(EngineSetting(role=ENGINE_ROLE_DECODE))
    assert engine.roles[-1] == ENGINE_ROLE_DECODE


async def test_a_change_of_role_that_was_cancelled_was_not_made() -> None:
    engine = FakeEngine(has_kv=True)
    administration = Administration(engine, ENGINE_ROLE_BOTH)  # type: ignore[arg-type]
    engine.leases_ended.side_effect = asyncio.CancelledError
    with pytest.raises(asyncio.CancelledError):
        await administration.set_role(ENGINE_ROLE_DECODE)
    engine.leases_ended.side_effect = None
    await administration.inherit(EngineSetting(role=ENGINE_ROLE_DECODE))
    assert engine.roles == [ENGINE_ROLE_BOTH, ENGINE_ROLE_DECODE, ENGINE_ROLE_BOTH, ENGINE_ROLE_DECODE]
    await administration.set_role(ENGINE_ROLE_BOTH)
    await administration.inherit(EngineSetting(role=ENGINE_ROLE_DECODE))
    assert engine.roles[-1] == ENGINE_ROLE_BOTH, "an operator has set this process meanwhile"


@pytest.mark.parametrize("role", [ENGINE_ROLE_UNSPECIFIED, ENGINE_ROLE_ENCODE])
async def test_an_engine_takes_no_role_without_a_leg(socket_dir: Path, role: EngineRole) -> None:
    async with running_mesh(socket_dir, role="prefill") as mesh:
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await mesh.set_role(role)
        assert refusal.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        await mesh.until_told(ENGINE_ROLE_PREFILL)


async def test_without_prefill_legs_it_waits_for_their_leases(socket_dir: Path) -> None:
    state_file = socket_dir / "state.json"
    async with running_mesh(socket_dir, role="prefill", state_file=state_file) as mesh, Peer(mesh.host.address) as peer:
        assert json.loads(state_file.read_text())["role"] == "prefill"
        await peer.send(make_add(1, [1, 2], hold_kv=True))
        request = await mesh.core.noted(EngineCoreRequest)
        changing = asyncio.create_task(mesh.set_role(ENGINE_ROLE_DECODE))
        await mesh.until_told(ENGINE_ROLE_DECODE)  # at once, so that no more come
        mesh.core.put(stats=SchedulerStats(num_leases=1))
        mesh.core.finish(request, [9], FinishReason.PREFILLED)
        await peer.read_until_finished([1])
        assert not changing.done()
        mesh.core.put(stats=SchedulerStats(num_leases=0))
        await changing
        assert json.loads(state_file.read_text())["role"] == "decode"


async def test_a_call_that_leases_outlast_changes_nothing(socket_dir: Path) -> None:
    async with running_mesh(socket_dir, role="both") as mesh:
        mesh.core.put(stats=SchedulerStats(num_leases=1))
        await mesh.until_told(ENGINE_ROLE_BOTH)
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await mesh.set_role(ENGINE_ROLE_DECODE, timeout=0.1)
        assert refusal.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await mesh.until_told(ENGINE_ROLE_BOTH)
        await mesh.set_role(ENGINE_ROLE_PREFILL)  # which holds leases too
        await mesh.until_told(ENGINE_ROLE_PREFILL)
        mesh.core.put(stats=SchedulerStats())


async def test_requests_go_on_while_the_role_changes(socket_dir: Path) -> None:
    async with running_mesh(socket_dir, role="decode") as mesh, Peer(mesh.host.address) as peer:
        await peer.send(make_add(1, [1, 2]))
        request = await mesh.core.noted(EngineCoreRequest)
        await mesh.set_role(ENGINE_ROLE_PREFILL)
        await mesh.set_role(ENGINE_ROLE_DECODE)
        mesh.core.finish(request, [9], FinishReason.LENGTH)
        assert (await peer.read_until_finished([1])).token_ids[1] == [9]


@pytest.mark.parametrize("role", [0, 17])
async def test_a_role_is_one_of_three(socket_dir: Path, role: Any) -> None:
    async with running_mesh(socket_dir) as mesh:
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await mesh.set_role(role)
        assert refusal.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_drained_owner_waits_for_its_leases(socket_dir: Path) -> None:
    async with running_mesh(socket_dir, drain_timeout=60.0) as mesh:
        mesh.core.put(stats=SchedulerStats(num_leases=1))
        await mesh.core.until_taken()
        loop = asyncio.get_running_loop()
        began = loop.time()
        loop.call_later(0.1, lambda: mesh.core.put(stats=SchedulerStats()))
    assert 0.1 <= loop.time() - began < 30


@pytest.mark.parametrize(
    ("flags", "transports"),
    [
        ([], ()),
        (["--role", "prefill"], ("auto",)),
        (["--role", "decode", "--kv-transports", "socket,shm"], ("socket", "shm")),
        (["--kv-transports", "auto"], ("auto",)),
    ],
)
def test_kv_moves_where_the_role_needs_it(flags: list[str], transports: tuple[str, ...]) -> None:
    settings = EngineSettings.load([*flags, "--kv-checksum", "--kv-lease-seconds", "7", "--failpoints", "a=1,b=0.5"])
    kv = settings.engine_config("/m").kv
    assert kv.transports == transports
    assert (kv.role, kv.checksum, kv.lease_seconds) == (settings.engine.kv.role, True, 7.0)
    assert kv.failpoints == ("a=1", "b=0.5")


def test_unknown_transports_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        EngineSettings.load(["--kv-transports", "pigeon"])
    assert (
        "must be one of auto, cuda, shm, nixl, socket, or PACKAGE:NAME of a plugin, not 'pigeon'"
        in capsys.readouterr().err
    )
