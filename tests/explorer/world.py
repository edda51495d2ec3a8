"""What a scenario is given: a loop, random choices, a folder, and where it reports what must not be."""

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from random import Random
from typing import Any, Protocol

from .chosen_loop import ChosenLoop, place_of
from .watched_disk import WatchedDisk

PATIENCE = 1200.0
"""Virtual seconds after which what has not ended never will."""


class World:
    """Holds one run of a scenario.

    Attributes:
        loop: Runs it.
        random: Makes the scenario's own choices.
        directory: Its folder on disk, empty at the beginning.
        disk: Watches that folder.
        violations: What must not have been.
        memory: What the run that crashed leaves to the one after it.
    """

    def __init__(self, loop: ChosenLoop, random: Random, directory: Path, disk: WatchedDisk) -> None:
        self.loop = loop
        self.random = random
        self.directory = directory
        self.disk = disk
        self.violations: list[str] = []
        self.memory: dict[str, Any] = {}
        self._tasks: list[asyncio.Task[Any]] = []

    def actor(
        self, coro: Coroutine[Any, Any, Any], name: str, cancel: Callable[[], object] | None = None
    ) -> "asyncio.Task[Any]":
        """Start what the plan may cancel at each of its awaits. ``cancel``: how; None: as ``asyncio`` does."""
        task = self.begin(coro, name)
        self.loop.actor(task, cancel)
        return task

    def begin(self, coro: Coroutine[Any, Any, Any], name: str) -> "asyncio.Task[Any]":
        """Start what is not cancelled."""
        task = self.loop.create_task(coro, name=name)
        self._tasks.append(task)
        return task

    def violated(self, text: str) -> None:
        """Report what must not be, once."""
        if text not in self.violations:
            self.violations.append(text)
            self.loop.note(f"! {text}")

    def check(self, is_right: object, text: str) -> bool:
        """Report ``text`` unless ``is_right``, and return that."""
        if not is_right:
            self.violated(text)
        return bool(is_right)

    async def step(self, most: int = 1) -> None:
        """Let others go first, a few times."""
        for _ in range(self.random.randint(1, most)):
            await asyncio.sleep(0)

    async def all_ended(self) -> None:
        """Wait for what was started. What has not ended when its time is over is stuck; what failed is a fault."""
        tasks, self._tasks = self._tasks, []
        if tasks:
            await asyncio.wait(tasks, timeout=PATIENCE)
        for task in tasks:
            if not task.done():
                self.violated(f"{task.get_name()} is stuck at {place_of(task)}")
                task.cancel()
            elif not task.cancelled() and (error := task.exception()) is not None:
                self.violated(f"{task.get_name()} failed with {error!r}")


class Scenario(Protocol):
    """Some parts of the product, what is done with them, and what must be true then."""

    @property
    def uses_disk(self) -> bool:
        """Whether it can be interrupted at accesses of the disk."""

    async def run(self, world: World) -> None:
        """Do everything, and check what is left."""

    async def recover(self, world: World) -> None:
        """Begin again in the folder of a run that has crashed, and check what is there."""
