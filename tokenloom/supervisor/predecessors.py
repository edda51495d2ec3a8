"""Holds the processes of a part that drain while their successor serves already."""

import asyncio

from .output import LineCopier
from .process import Process

MAX_PREDECESSORS = 2
"""Processes of one part that may drain at the same time. Then a successor waits for the end of the process before."""


class Predecessors:
    """Waits for processes that have left their listening sockets to the next process."""

    def __init__(self, name: str, output: LineCopier) -> None:
        """``name``: of the part, for the log."""
        self._name = name
        self._output = output
        self._ends: dict[Process, asyncio.Task[None]] = {}

    @property
    def is_full(self) -> bool:
        return len(self._ends) >= MAX_PREDECESSORS

    def add(self, process: Process) -> None:
        """Own a process until it has ended."""
        self._ends[process] = asyncio.create_task(self._wait(process), name=f"{self._name} drains")

    def kill(self) -> None:
        """Kill all of them."""
        for process in self._ends:
            process.kill_group()

    async def ended(self) -> None:
        """Return when all of them have ended."""
        if self._ends:
            await asyncio.wait(self._ends.values())

    async def _wait(self, process: Process) -> None:
        try:
            status = await process.wait()
            if status:
                self._output.say(self._name, f"the process that drained ended with status {status}")
        finally:
            process.kill_group()  # also the processes that it left
            del self._ends[process]
