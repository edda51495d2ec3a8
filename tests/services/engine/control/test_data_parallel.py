"""Changes of the size of a group that overtake each other, as one rank sees them."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from tests.loop_clock import settle
from tokenloom.engine_core.data.messages import GroupState
from tokenloom.request.errors import FailedPrecondition
from tokenloom.services.engine.control.data_parallel import DataParallel


class FakeLoad:
    """Wakes all who wait whenever the group has changed."""

    def __init__(self) -> None:
        self.group: GroupState | None = None
        self._changed = asyncio.Event()

    def set_group(self, group: GroupState) -> None:
        self.group = group
        self.wake()

    def wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            await self._changed.wait()


class FakeCore:
    """Notes what it is asked."""

    def __init__(self, *, has_waves: bool) -> None:
        self.ready = SimpleNamespace(has_waves=has_waves)
        self.asked: list[int] = []
        self.client = SimpleNamespace(close=self._close)
        self.is_closed = False

    async def call(self, method: str, size: int) -> None:
        assert method == "resize_group"
        self.asked.append(size)

    async def _close(self) -> None:
        self.is_closed = True


def rank(number: int, size: int, *, has_waves: bool) -> tuple[DataParallel, FakeCore, FakeLoad]:
    core, load = FakeCore(has_waves=has_waves), FakeLoad()
    group = DataParallel(core, load, number, size)  # type: ignore[arg-type]
    load.set_group(GroupState(size, True, None, None))
    return group, core, load


@pytest.mark.parametrize("has_waves", [False, True])
async def test_a_rank_that_is_leaving_does_not_become_a_member_again(has_waves: bool) -> None:
    group, core, load = rank(2, 3, has_waves=has_waves)
    may_leave = asyncio.Event()
    first: asyncio.Task[Any] = asyncio.create_task(group.resize(2, may_leave.wait))  # type: ignore[arg-type]
    await settle()
    with pytest.raises(FailedPrecondition, match="rank 2 has left its data-parallel group, or is leaving it"):
        await group.resize(3, may_leave.wait)  # type: ignore[arg-type]
    may_leave.set()
    await settle()
    load.set_group(GroupState(2, False, None, None))
    await first
    assert (core.asked, core.is_closed) == (([2], True) if has_waves else ([], False))
    assert group.is_removed


async def test_a_change_that_is_overtaken_ends() -> None:
    group, core, load = rank(0, 3, has_waves=True)
    never = asyncio.Event().wait
    first, second = (asyncio.create_task(group.resize(size, never)) for size in (4, 2))  # type: ignore[arg-type]
    await settle()
    assert core.asked == [4, 2]
    load.wake()
    with pytest.raises(
        FailedPrecondition, match="another change of the data-parallel group, to 2 ranks, overtook this"
    ):
        await first
    load.set_group(GroupState(2, True, None, None))
    await second
