"""Which ranks of a data-parallel group are asked to begin a wave, which are refused, and when a group has its size."""

import asyncio

import pytest

from tests.loop_clock import settle
from tokenloom.request.errors import FailedPrecondition, InvalidArgument, NotFound
from tokenloom.services.coordinator.engines.data_parallel_groups import DataParallelGroups
from tokenloom.v1.coordinator_pb2 import EngineCommand, EngineIdentity, EngineReport


def identity(rank: int, *, digest: bytes = b"same", waves: bool = True, name: str = "") -> EngineIdentity:
    return EngineIdentity(
        engine_id=name or f"engine-{rank}",
        data_parallel_group="g",
        data_parallel_rank=rank,
        parallel_config_hash=digest,
        computes_in_waves=waves,
    )


def report(size: int = 2, start: int | None = None, complete: int | None = None) -> EngineReport:
    return EngineReport(group_size=size, start_wave=start, wave_complete=complete)


@pytest.fixture
def pair() -> tuple[DataParallelGroups, EngineIdentity, EngineIdentity]:
    groups, ranks = DataParallelGroups(), (identity(0), identity(1))
    for rank in ranks:
        groups.join(rank)
        assert groups.report(rank, report()) == []
    return groups, *ranks


def test_a_rank_is_asked_once_to_begin_the_wave_of_another(
    pair: tuple[DataParallelGroups, EngineIdentity, EngineIdentity],
) -> None:
    groups, first, second = pair
    assert groups.report(first, report(start=0)) == [("engine-1", EngineCommand(start_wave=0))]
    assert groups.report(first, report(start=0)) == []
    assert groups.report(second, report(start=0)) == []
    assert groups.report(second, report(complete=0)) == []
    assert groups.report(first, report(complete=0)) == []
    assert groups.report(second, report(start=1, complete=0)) == [("engine-0", EngineCommand(start_wave=1))]


def test_a_rank_that_joins_again_or_could_not_be_asked_is_asked_again(
    pair: tuple[DataParallelGroups, EngineIdentity, EngineIdentity],
) -> None:
    groups, first, second = pair
    groups.report(first, report(start=0))
    groups.not_asked(second)
    assert groups.report(first, report(start=0)) == [("engine-1", EngineCommand(start_wave=0))]
    again = identity(1)
    groups.join(again)
    groups.leave(second)  # the end of its old stream comes later
    assert groups.report(again, report()) == [("engine-1", EngineCommand(start_wave=0))]


def test_a_newcomer_is_asked_only_when_it_is_a_member(
    pair: tuple[DataParallelGroups, EngineIdentity, EngineIdentity],
) -> None:
    groups, first, _ = pair
    groups.join(newcomer := identity(2))
    assert groups.report(newcomer, report(size=0)) == []
    assert [name for name, _ in groups.report(first, report(start=3, complete=2))] == ["engine-1"]


@pytest.mark.parametrize(
    ("other", "error"),
    [
        (identity(1, digest=b"other"), "rank 1 differs from that of data-parallel group 'g', which engine 'engine-0'"),
        (identity(0, name="another"), "rank 0 of data-parallel group 'g', which engine 'engine-0' has joined, is tak"),
    ],
)
def test_a_rank_that_does_not_fit_is_refused_by_name(other: EngineIdentity, error: str) -> None:
    groups = DataParallelGroups()
    groups.join(identity(0))
    with pytest.raises(InvalidArgument, match=error):
        groups.join(other)


async def test_a_group_has_its_size_when_all_ranks_say_so(
    pair: tuple[DataParallelGroups, EngineIdentity, EngineIdentity],
) -> None:
    groups, first, second = pair
    with pytest.raises(FailedPrecondition, match="ranks 2, 3 of data-parallel group 'g' have not joined"):
        groups.resize("g", 4)
    with pytest.raises(InvalidArgument):
        groups.resize("g", 0)
    with pytest.raises(NotFound, match="'other'"):
        groups.resize("other", 1)
    assert groups.resize("g", 1) == [
        ("engine-0", EngineCommand(data_parallel_size=1)),
        ("engine-1", EngineCommand(data_parallel_size=1)),
    ]
    waiting = asyncio.create_task(groups.wait_resized("g", 1))
    groups.report(first, report(size=1))
    await settle()
    assert not waiting.done()
    groups.report(second, report(size=0))
    await waiting


async def test_a_group_that_is_lost_while_it_changes_is_no_hang(
    pair: tuple[DataParallelGroups, EngineIdentity, EngineIdentity],
) -> None:
    groups, *ranks = pair
    waiting = asyncio.create_task(groups.wait_resized("g", 1))
    await settle()
    for rank in ranks:
        groups.leave(rank)
    with pytest.raises(NotFound):
        await waiting


def test_a_rank_that_is_leaving_is_no_member_again_until_it_was_started_again() -> None:
    groups, ranks = DataParallelGroups(), [identity(rank) for rank in range(3)]
    for each in ranks:
        groups.join(each)
        groups.report(each, report(size=3))
    assert len(groups.resize("g", 2)) == 3
    with pytest.raises(FailedPrecondition, match="ranks 2 of data-parallel group 'g' leave it by an earlier change"):
        groups.resize("g", 3)
    assert len(groups.resize("g", 1)) == 3
    with pytest.raises(FailedPrecondition, match="ranks 1, 2 of"):
        groups.resize("g", 3)
    for rank in (1, 2):
        groups.leave(ranks[rank])
        groups.join(identity(rank))
    assert len(groups.resize("g", 3)) == 3
