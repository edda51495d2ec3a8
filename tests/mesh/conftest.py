"""A mesh for each module: one of everything. Its tests share an event loop, and leave the mesh as they found it."""

import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from tests.mesh.harness import Mesh


@pytest.fixture(scope="module")
def mesh_dir() -> Iterator[Path]:
    """A directory for the sockets of a module's mesh: their paths are limited to 107 bytes."""
    path = Path(tempfile.mkdtemp(prefix="tl-", dir="/tmp"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture(scope="module")
def mesh_options() -> dict[str, Any]:
    """What a module's mesh has beyond the usual; modules override it."""
    return {}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(mesh_dir: Path, mesh_options: dict[str, Any]) -> AsyncIterator[Mesh]:
    async with Mesh(mesh_dir, **mesh_options).running() as mesh:
        yield mesh


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def http(mesh: Mesh) -> AsyncIterator[httpx.AsyncClient]:
    async with mesh.http() as client:
        yield client
