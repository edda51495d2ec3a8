"""Engines of a running mesh are started and stopped over its socket."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from tokenloom.supervisor.control import Resized, ResizeRequest, ask
from tokenloom.supervisor.layout import MeshOptions, engines_of
from tokenloom.supervisor.mesh import Mesh, MeshOutcome, supervise
from tokenloom.supervisor.output import LineCopier
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

    async def work(mesh: Mesh) -> None:
        for line in (b"{}\n", b"nothing\n", b'{"engines": 2, "color": 1}\n', b"x" * (1 << 17) + b"\n"):
            reader, writer = await asyncio.open_unix_connection(socket_dir / "control.sock")
            writer.write(line)
            answer = await reader.read()
            assert answer == b"" or b"error" in answer
            writer.close()

    await supervise(mesh, work)


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
