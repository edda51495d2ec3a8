"""Engines of a running mesh are started and stopped over its socket."""

import asyncio
import errno
import json
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest

from tokenloom.supervisor.control import CONTROL_SOCKET, Resized, ResizeRequest, ask
from tokenloom.supervisor.layout import MeshOptions, engines_of
from tokenloom.supervisor.mesh import Mesh, MeshOutcome, supervise
from tokenloom.supervisor.output import LineCopier
from tokenloom.supervisor.part import SupervisedPart
from tokenloom.supervisor.part_spec import PartSpec

MakeSpec = Callable[..., PartSpec]


def make_mesh(make_spec: MakeSpec, directory: Path, output: LineCopier, later: str = "serve") -> Mesh:
    def engines(count: int) -> list[PartSpec]:
        if count > 3:
            raise ValueError("there is room for three")
        return [make_spec("engine", index, behaviour="serve" if index < 1 else later) for index in range(count)]

    specs = [make_spec("outer"), *engines(1), make_spec("inner")]
    return Mesh(specs, directory, output, port=8000, drain_timeout=20, engines_of=engines)


async def resize(directory: Path, count: int, *, serving: bool = True) -> Resized:
    return await asyncio.to_thread(ask, directory, ResizeRequest(count, serving), 60.0)


async def test_engines_are_started_and_stopped_while_the_others_run(
    make_spec: MakeSpec, socket_dir: Path, output: LineCopier
) -> None:
    mesh = make_mesh(make_spec, socket_dir, output)

    async def work(mesh: Mesh) -> None:
        await mesh.wait_serving()
        first = mesh.states("engine")[0].pid
        assert await resize(socket_dir, 3) == Resized(["engine-1", "engine-2"], [])
        names = [part.spec.name for part in mesh.parts]
        assert names == ["outer-0", "engine-0", "engine-1", "engine-2", "inner-0"], "they are drained together"
        assert len(mesh.states("engine")) == 3
        assert await resize(socket_dir, 3) == Resized()
        assert await resize(socket_dir, 1) == Resized([], ["engine-1", "engine-2"])
        assert [state.pid for state in mesh.states("engine")] == [first]
        assert (await resize(socket_dir, 4)).error == "there is room for three"

    assert await supervise(mesh, work) == MeshOutcome(interrupted=False, clean=True)


async def test_an_engine_is_killed_and_comes_back(make_spec: MakeSpec, socket_dir: Path, output: LineCopier) -> None:
    mesh = make_mesh(make_spec, socket_dir, output)

    async def crash() -> dict[str, str]:
        reader, writer = await asyncio.open_unix_connection(socket_dir / CONTROL_SOCKET)
        writer.write(b'{"kind":"crash"}\n')  # as the gateway writes it
        answer = json.loads(await reader.readline())
        writer.close()
        return answer

    async def work(mesh: Mesh) -> None:
        await mesh.wait_serving()
        assert "1 of the engines serve now" in (await crash())["error"]
        await resize(socket_dir, 2)
        assert await crash() == {"engine": "engine-1", "error": ""}
        assert "1 of the engines serve now" in (await crash())["error"], "at once"
        await mesh.parts[2].restarted(0)

    assert await supervise(mesh, work) == MeshOutcome(interrupted=False, clean=True)


async def test_an_engine_that_does_not_start_leaves_the_mesh_as_it_was(
    make_spec: MakeSpec, socket_dir: Path, output: LineCopier
) -> None:
    mesh = make_mesh(make_spec, socket_dir, output, later="usage")

    async def work(mesh: Mesh) -> None:
        await mesh.wait_serving()
        assert "engine-1 did not start" in (await resize(socket_dir, 2)).error
        assert [part.spec.name for part in mesh.parts] == ["outer-0", "engine-0", "inner-0"]

    assert await supervise(mesh, work) == MeshOutcome(interrupted=False, clean=True)


async def test_what_is_no_request_is_answered_by_name_or_not_at_all(
    make_spec: MakeSpec, socket_dir: Path, output: LineCopier
) -> None:
    mesh = make_mesh(make_spec, socket_dir, output)
    logged: list[object] = []

    async def work(mesh: Mesh) -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: logged.append(context))
        for line in (b"{}\n", b"nothing\n", b'{"engines": 2, "color": 1}\n', b"x" * (1 << 17) + b"\n"):
            reader, writer = await asyncio.open_unix_connection(socket_dir / "control.sock")
            writer.write(line)
            answer = await reader.read()
            assert answer == b"" or b"error" in answer
            writer.close()

    await supervise(mesh, work)
    assert not logged


class Draining:
    """A part that ends when the test says so, or with its first signal."""

    state = None

    def __init__(self, spec: PartSpec, *, lasts: bool) -> None:
        self.spec, self._lasts = spec, lasts
        self.ended = asyncio.Event()
        self.is_stopped = False

    async def keep(self) -> None:
        await self.ended.wait()

    def stop(self) -> None:
        self.is_stopped = True
        if not self._lasts:
            self.ended.set()

    def kill(self) -> None:
        self.ended.set()


async def test_parts_behind_engines_that_are_just_stopped_drain_too(
    make_spec: MakeSpec, socket_dir: Path, output: LineCopier
) -> None:
    def engines(count: int) -> list[PartSpec]:
        return [make_spec("engine", index) for index in range(count)]

    mesh = Mesh([], socket_dir, output, port=8000, drain_timeout=20, engines_of=engines)
    parts = [Draining(spec, lasts=True) for spec in engines(3)]
    parts += [Draining(make_spec("inner", index), lasts=False) for index in range(2)]
    mesh.parts[:] = cast(list[SupervisedPart], parts)
    async with mesh, asyncio.timeout(30):
        resizing = asyncio.create_task(mesh.resize_engines(1, serving=True))
        await asyncio.sleep(0)
        draining = asyncio.create_task(mesh.drain())
        await asyncio.sleep(0)
        for part in parts[1:3]:
            part.ended.set()
        await resizing
        parts[0].ended.set()
        assert await draining
    assert all(part.is_stopped for part in parts)


async def test_a_full_disk_is_answered_and_leaves_the_mesh_as_it_was(
    make_spec: MakeSpec, socket_dir: Path, output: LineCopier, monkeypatch: pytest.MonkeyPatch
) -> None:
    mesh = make_mesh(make_spec, socket_dir, output)

    async def work(mesh: Mesh) -> None:
        await mesh.wait_serving()
        with monkeypatch.context() as patched:
            patched.setattr(mesh, "_write_record", lambda: full_disk())
            assert "No space left" in (await resize(socket_dir, 2)).error
        assert [part.spec.name for part in mesh.parts] == ["outer-0", "engine-0", "inner-0"]

    def full_disk() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    assert await supervise(mesh, work) == MeshOutcome(interrupted=False, clean=True)


def options(**changes: object) -> MeshOptions:
    return MeshOptions(model=Path("/models/m"), served_model_name="m", **changes)  # type: ignore[arg-type]


def test_new_ranks_of_a_group_know_its_size_and_are_bound_to_no_core(tmp_path: Path) -> None:
    specs = engines_of(options(data_parallel_size=2), tmp_path, 4)
    for rank, spec in enumerate(specs):
        words = list(spec.command)
        assert words[words.index("--data-parallel-size") + 1] == "4"
        assert words[words.index("--data-parallel-rank") + 1] == str(rank)
        assert "--cpus" not in words


@pytest.mark.parametrize(
    "changes", [{"prefill": 1, "decode": 1}, {"data_parallel_size": 4, "data_parallel_size_local": 2}]
)
def test_meshes_whose_engines_differ_are_refused(tmp_path: Path, changes: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="engines of one kind that all run here"):
        engines_of(options(**changes), tmp_path, 3)


@pytest.mark.parametrize("count", [0, 65])
def test_a_number_of_engines_that_serve_would_refuse_is_refused(tmp_path: Path, count: int) -> None:
    with pytest.raises(ValueError, match="a mesh has 1 to 64 engines"):
        engines_of(options(), tmp_path, count)
