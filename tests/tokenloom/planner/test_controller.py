"""The controller against a coordinator and an engine on unix sockets."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from tokenloom.planner.controller import Controller
from tokenloom.planner.demand import Goals, PlannedRole
from tokenloom.planner.planner import Flip, Limits
from tokenloom.services.runtime.peers.channels import Channels
from tokenloom.v1 import coordinator_pb2_grpc, engine_pb2_grpc
from tokenloom.v1.coordinator_pb2 import EngineEntry, EngineIdentity, EngineReport, EngineState, Snapshot
from tokenloom.v1.engine_pb2 import SetRoleResponse
from tokenloom.v1.types_pb2 import EngineRole, Fingerprint


class FakeMesh(coordinator_pb2_grpc.CoordinatorServicer, engine_pb2_grpc.EngineAdminServicer):
    """Shows two engines, of which one serves, and takes roles."""

    def __init__(self) -> None:
        self.roles: list[EngineRole] = []

    async def Watch(self, request: Any, context: Any) -> AsyncIterator[Snapshot]:
        report = EngineReport(
            role=EngineRole.ENGINE_ROLE_BOTH,
            state=EngineState.ENGINE_STATE_SERVING,
            running=60,
            seats=64,
            step_seconds=0.06,
            step_requests=60,
        )
        identity = EngineIdentity(engine_id="engine-0", fingerprint=Fingerprint(model="demo"))
        starting = EngineReport(state=EngineState.ENGINE_STATE_STARTING)
        yield Snapshot(engines=[EngineEntry(identity=identity, report=report), EngineEntry(report=starting)])

    async def SetRole(self, request: Any, context: Any) -> SetRoleResponse:
        self.roles.append(request.role)
        return SetRoleResponse()


@pytest.fixture
async def mesh(tmp_path: Path) -> AsyncIterator[tuple[FakeMesh, str]]:
    fake, server = FakeMesh(), grpc.aio.server()
    coordinator_pb2_grpc.add_CoordinatorServicer_to_server(fake, server)
    engine_pb2_grpc.add_EngineAdminServicer_to_server(fake, server)
    address = f"unix:{tmp_path}/mesh"
    server.add_insecure_port(address)
    await server.start()
    yield fake, address
    await server.stop(None)


async def test_it_plans_what_the_coordinator_shows(mesh: tuple[FakeMesh, str]) -> None:
    controller = Controller(Channels(), mesh[1], Goals(), Limits())
    plans = await controller.plan()
    assert list(plans) == ["demo"]
    assert plans["demo"].engines == {PlannedRole.BOTH: 1}
    assert plans["demo"].replicas == {"engine": 2}


async def test_it_changes_roles_and_names_those_that_failed(mesh: tuple[FakeMesh, str], tmp_path: Path) -> None:
    fake, address = mesh
    controller = Controller(Channels(), address, Goals(), Limits())
    gone = Flip("engine-1", f"unix:{tmp_path}/nothing", PlannedRole.PREFILL)
    failures = await controller.apply([Flip("engine-0", address, PlannedRole.DECODE), gone])
    assert fake.roles == [EngineRole.ENGINE_ROLE_DECODE]
    assert len(failures) == 1
    assert failures[0].startswith("engine-1 did not become prefill")
