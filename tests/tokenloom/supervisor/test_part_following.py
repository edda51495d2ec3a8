"""The supervisor follows a part by its state file, and by a datagram at each change."""

import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path

from tokenloom.services.runtime.addresses import CHANGED_SUFFIX
from tokenloom.services.runtime.host.host import StateFile
from tokenloom.supervisor.part import follow
from tokenloom.supervisor.state_dir import PartReport

Eventually = Callable[[Callable[[], bool]], Awaitable[None]]


async def test_each_change_is_reported_and_nothing_of_another_process(socket_dir: Path, eventually: Eventually) -> None:
    path = socket_dir / "engine-0.json"
    path.with_suffix(CHANGED_SUFFIX).touch()  # a killed supervisor's
    mine, other = StateFile(path), StateFile(path)
    seen: list[PartReport] = []
    mine.publish(pid=7, address="unix:/a", serving=False)
    following = asyncio.create_task(follow(path, 7, seen.append))
    await eventually(lambda: len(seen) == 1)
    other.publish(pid=8, address="unix:/b", serving=True)
    mine.publish(serving=True, max_model_len=512)
    await eventually(lambda: seen[-1].serving)
    assert {each.pid for each in seen} == {7}
    assert seen[-1].max_model_len == 512
    mine.publish(serving=False)
    await eventually(lambda: not seen[-1].serving)
    following.cancel()
    await asyncio.wait([following])
    assert os.listdir(socket_dir) == [path.name]


async def test_a_part_that_writes_often_waits_for_nobody(socket_dir: Path, eventually: Eventually) -> None:
    state = StateFile(socket_dir / "engine-0.json")
    seen: list[PartReport] = []
    following = asyncio.create_task(follow(socket_dir / "engine-0.json", 7, seen.append))
    await eventually((socket_dir / f"engine-0{CHANGED_SUFFIX}").exists)
    for number in range(2000):  # more than the socket holds, and the event loop is busy here
        state.publish(pid=7, address=f"unix:/{number}")
    await eventually(lambda: bool(seen) and seen[-1].address == "unix:/1999")
    following.cancel()
    await asyncio.wait([following])
