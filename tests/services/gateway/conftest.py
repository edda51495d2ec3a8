"""A gateway in front of a fake mesh."""

from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from tests.services.gateway.fake_encoders import Vision, with_encoders
from tests.services.gateway.fakes import FakeMesh


@pytest.fixture
async def mesh(socket_dir: Path) -> AsyncIterator[FakeMesh]:
    async with FakeMesh(socket_dir).gateway() as mesh:
        yield mesh


@pytest.fixture
async def vision(socket_dir: Path) -> AsyncIterator[Vision]:
    """A gateway whose model reads images, with two encoders."""
    mesh = FakeMesh(socket_dir)
    async with with_encoders(mesh, 2) as encoders, mesh.gateway(), mesh.http() as http:
        yield Vision(mesh, encoders, http)


@pytest.fixture
async def http(mesh: FakeMesh) -> AsyncIterator[httpx.AsyncClient]:
    async with mesh.http() as client:
        yield client
