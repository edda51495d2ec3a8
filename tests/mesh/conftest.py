"""A mesh for each test: one of everything."""

from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from tests.mesh.harness import Mesh


@pytest.fixture
async def mesh(socket_dir: Path) -> AsyncIterator[Mesh]:
    async with Mesh(socket_dir).running() as mesh:
        yield mesh


@pytest.fixture
async def http(mesh: Mesh) -> AsyncIterator[httpx.AsyncClient]:
    async with mesh.http() as client:
        yield client
