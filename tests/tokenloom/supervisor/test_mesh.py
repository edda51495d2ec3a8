"""The parts together: up when all serve, known to `ps`, taken down service by service."""

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from tokenloom.supervisor.mesh import Mesh
from tokenloom.supervisor.output import LineCopier
from tokenloom.supervisor.part_spec import PartFailed, PartSpec

MakeSpec = Callable[..., PartSpec]
Printed = list[tuple[str, str]]


def make_mesh(specs: list[PartSpec], directory: Path, output: LineCopier, drain_timeout: float = 10.0) -> Mesh:
    return Mesh(specs, directory, output, port=8000, drain_timeout=drain_timeout)


async def test_parts_drain_service_by_service(
    make_spec: MakeSpec, socket_dir: Path, output: LineCopier, printed: Printed
) -> None:
    specs = [make_spec("outer", 0), make_spec("outer", 1), make_spec("inner", 0)]
    async with make_mesh(specs, socket_dir, output) as mesh, asyncio.timeout(30):
        await mesh.wait_serving()
        assert await mesh.drain()
    output.close()
    drained = [name for name, line in printed if line == "drained"]
    assert sorted(drained[:2]) == ["outer-0", "outer-1"]
    assert drained[2:] == ["inner-0"]


async def test_a_part_that_does_not_drain_is_killed(
    make_spec: MakeSpec, socket_dir: Path, output: LineCopier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tokenloom.supervisor.mesh.KILL_GRACE", 0.1)
    specs = [make_spec(behaviour="deaf")]
    async with make_mesh(specs, socket_dir, output, drain_timeout=0.1) as mesh, asyncio.timeout(30):
        await mesh.wait_serving()
        assert not await mesh.drain()


async def test_leaving_the_block_leaves_no_process(make_spec: MakeSpec, socket_dir: Path, output: LineCopier) -> None:
    async with make_mesh([make_spec(index=0), make_spec(index=1)], socket_dir, output) as mesh, asyncio.timeout(30):
        await mesh.wait_serving()
        pids = [part.state.pid for part in mesh.parts if part.state is not None]
    assert len(pids) == 2
    assert not any(map(psutil.pid_exists, pids))


async def test_one_part_that_does_not_start_fails_the_mesh(
    make_spec: MakeSpec, socket_dir: Path, output: LineCopier
) -> None:
    specs = [make_spec("good", 0), make_spec("bad", 0, behaviour="usage")]
    async with make_mesh(specs, socket_dir, output) as mesh, asyncio.timeout(30):
        with pytest.raises(PartFailed, match="bad-0 did not start"):
            await mesh.wait_serving()


async def test_the_mesh_is_published(make_spec: MakeSpec, socket_dir: Path, output: LineCopier) -> None:
    async with make_mesh([make_spec()], socket_dir, output):
        record = json.loads((socket_dir / "mesh.json").read_text())
    assert record["port"] == 8000
    assert [(part["service"], part["index"], part["role"]) for part in record["parts"]] == [("fake", 0, None)]


async def test_the_engine_that_decodes_crashes_and_never_the_last_one(
    make_spec: MakeSpec, socket_dir: Path, output: LineCopier
) -> None:
    specs = [replace(make_spec("engine", number), role=role) for number, role in enumerate(("decode", "prefill"))]
    async with make_mesh(specs, socket_dir, output) as mesh, asyncio.timeout(60):
        with pytest.raises(ValueError, match="0 of the engines serve now"):
            mesh.crash_engine()
        await mesh.wait_serving()
        crashed = mesh.crash_engine()
        assert crashed.spec.name == "engine-0"
        await crashed.restarted(0)
        assert [part.restarts for part in mesh.parts] == [1, 0]
        mesh.parts[1].serving.clear()
        with pytest.raises(ValueError, match="1 of the engines serve now"):
            mesh.crash_engine()
