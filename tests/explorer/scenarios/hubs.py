"""A data-parallel group whose ranks come, vote, are removed and are replaced, while their predecessors' connections are
still open."""

import asyncio
from collections import deque
from collections.abc import Iterable
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from tests.explorer.thread_calls import SteppedLock, pause_thread, wait_in_thread
from tests.explorer.world import World
from tokenloom.engine_core.data_parallel import group_hub as module
from tokenloom.engine_core.data_parallel.group_hub import GroupHub
from tokenloom.engine_core.data_parallel.messages import (
    GroupHello,
    Newcomers,
    Outcome,
    ToHub,
    Vote,
    Want,
    Welcome,
)

_ADDRESS = "192.0.2.1:9"
_SECONDS = 60.0


class _Rank:
    """A rank's process and its connection, which takes the place of the hub's ``Frames``."""

    def __init__(self, world: World, hub: GroupHub, rank: int) -> None:
        self.rank = rank
        self.is_open = True
        self._to_hub: deque[ToHub] = deque([GroupHello("group", rank, {})])
        self._received: list[Any] = []
        self._arrival = asyncio.Event()
        assert hub._unknown.acquire(blocking=False)  # as the thread does that accepts connections
        world.loop.begin_thread(partial(hub._serve, self), f"hub for rank {rank}")  # type: ignore[arg-type]

    # What the hub uses

    def send(self, message: object) -> None:
        pause_thread()
        if not self.is_open:
            raise ConnectionError("the connection was closed")
        self._received.append(message)
        self._arrival.set()

    def receive(self) -> ToHub:
        wait_in_thread(lambda: bool(self._to_hub) or not self.is_open)
        if not self._to_hub:
            raise ConnectionError("the connection was closed")
        return self._to_hub.popleft()

    def limit(self, seconds: float | None) -> None:
        """Do nothing: no rank is silent here."""

    def close(self) -> None:
        self.is_open = False
        self._arrival.set()

    # What the rank's process does

    def vote(self, vote: Vote) -> None:
        self._to_hub.append(vote)

    async def next(self, kind: type[Any]) -> Any:
        """Wait for a message of a kind. Raises ``ConnectionError`` if the connection ends."""
        while True:
            found = next((each for each in self._received if isinstance(each, kind)), None)
            if found is not None:
                self._received.remove(found)
                return found
            if not self.is_open:
                raise ConnectionError(f"rank {self.rank} was cut off")
            self._arrival.clear()
            await self._arrival.wait()


class HubScenario:
    """Rank 2 joins, is removed, and is replaced by another process before its own has gone."""

    uses_disk = False

    async def run(self, world: World) -> None:
        listener: Any = SimpleNamespace(shutdown=lambda _: None, close=lambda: None)
        with (
            patch.object(GroupHub, "_accept", lambda _: None),
            patch.object(module, "listen", lambda _: listener),
            patch.object(module, "Frames", lambda connection, _: connection),
        ):
            await self._run(world)

    async def _run(self, world: World) -> None:
        hub = GroupHub(_ADDRESS, GroupHello("group", 0, {}), size=2)
        hub._lock = SteppedLock()  # type: ignore[assignment]
        members = [_Rank(world, hub, rank) for rank in (0, 1)]
        try:
            async with asyncio.timeout(_SECONDS):
                await asyncio.gather(*(rank.next(Welcome) for rank in members))
                await self._replace(world, hub, members)
        except (TimeoutError, ConnectionError, AssertionError) as error:
            world.violated(f"the group does not go on: {error!r}")
        for rank in members:
            rank.close()
        await world.loop.idle()

    async def _replace(self, world: World, hub: GroupHub, members: list[_Rank]) -> None:
        wave = 0
        for _ in range(3):
            newcomer = _Rank(world, hub, 2)
            while 2 not in (await members[0].next(Newcomers)).ranks:
                pass
            outcomes = await _round(members, wave, target=3)
            world.check(outcomes == {3}, "a newcomer is forgotten")
            await newcomer.next(Welcome)
            wave += 1
            members.append(newcomer)
            outcomes = await _round(members, wave, target=2)
            world.check(outcomes == {2}, "the ranks do not agree")
            wave += 1
            world.begin(_go(world, members.pop()), "a rank that was removed")
            await world.step(6)
        await _round(members, wave, target=2)

    async def recover(self, world: World) -> None:
        raise AssertionError("nothing of it is on a disk")


async def _go(world: World, rank: _Rank) -> None:
    """Let a process that was removed end, some time later."""
    await world.step(30)
    rank.close()


async def _round(members: Iterable[_Rank], wave: int, target: int) -> set[int]:
    """Let all members vote. Returns the sizes that the outcomes name."""
    for rank in members:
        rank.vote(Vote(wave, 0, Want.IDLE, target))
        await asyncio.sleep(0)
    return {(await rank.next(Outcome)).size for rank in members}
