"""``tokenloom scale`` without a mesh, and what it prints; ``tests/mesh/test_data_parallel.py`` scales with it."""

import pytest
from typer.testing import CliRunner

from tokenloom.cli.failures import CommandFailed
from tokenloom.cli.main import app
from tokenloom.cli.mesh import coordinator
from tokenloom.cli.mesh.coordinator import report
from tokenloom.supervisor.control import Resized
from tokenloom.v1.coordinator_pb2 import EngineEntry, EngineIdentity, EngineReport


def entry(rank: int, group_size: int) -> EngineEntry:
    identity = EngineIdentity(engine_id=f"engine-{rank}", data_parallel_rank=rank, data_parallel_group="g")
    return EngineEntry(identity=identity, report=EngineReport(group_size=group_size))


def test_no_mesh_ends_with_status_1() -> None:
    result = CliRunner().invoke(app, ["scale", "data-parallel", "2"])
    assert result.exit_code == 1
    assert "no mesh is running" in result.stderr


def test_a_coordinator_that_does_not_listen_is_named(socket_dir: object) -> None:
    address = f"unix:{socket_dir}/nothing"
    result = CliRunner().invoke(app, ["scale", "data-parallel", "2", "--coordinator", address])
    assert result.exit_code == 1
    assert f"Error: the coordinator at {address} answered:" in result.stderr


def test_a_group_has_a_rank_at_least() -> None:
    result = CliRunner().invoke(app, ["scale", "data-parallel", "0"])
    assert result.exit_code == 2
    assert "or equal to 1" in result.stderr


@pytest.mark.parametrize(
    ("sizes", "size", "expected"),
    [
        ([2, 2, 0, 0], 4, "data-parallel group g: 2 → 4 ranks"),
        ([2, 2], 2, "data-parallel group g: 2 ranks, as before"),
        (
            [3, 3, 3, 0],
            1,
            "data-parallel group g: 3 → 1 rank\n"
            "without requests now, may be stopped: engine-1 (rank 1), engine-2 (rank 2)",
        ),
    ],
)
def test_the_change_is_reported(sizes: list[int], size: int, expected: str) -> None:
    assert report("g", size, [entry(rank, each) for rank, each in enumerate(sizes)]) == expected


@pytest.mark.parametrize("error", [CommandFailed("the ranks did not join"), KeyboardInterrupt()])
def test_ranks_that_were_started_are_stopped_if_the_group_does_not_grow(
    error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []

    def resize(port: int | None, count: int, *, serving: bool) -> Resized:
        sizes.append(count)
        return Resized(started=["engine-2"]) if count == 3 else Resized(stopped=["engine-2"])

    async def run(*_: object) -> str:
        raise error

    for name, fake in {
        "coordinator_of": lambda port: "unix:/nothing",
        "_count": lambda port: 2,
        "_resize": resize,
        "run": run,
    }.items():
        monkeypatch.setattr(coordinator, name, fake)
    with pytest.raises(type(error)):
        coordinator.scale_group(coordinator.Target(None, None, None), "data-parallel", 3, None)
    assert sizes == [3, 2]
