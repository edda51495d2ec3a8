"""A gateway in front of a fake mesh, and a client of it."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.services.gateway.fakes import FakeMesh
from tokenloom.client import AsyncClient


@pytest.fixture
async def mesh(socket_dir: Path) -> AsyncIterator[FakeMesh]:
    async with FakeMesh(socket_dir).gateway(keep_disconnected_requests=3600.0) as mesh:
        yield mesh


@pytest.fixture
async def client(mesh: FakeMesh) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(mesh.grpc_address, timeout=30) as client:
        yield client
