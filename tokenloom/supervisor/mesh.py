"""Keeps the parts of a local mesh running, and stops them in order."""

import asyncio
import itertools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from tokenloom.services.runtime.tasks import first_of

from .output import LineCopier
from .part import SupervisedPart
from .part_spec import PartFailed, PartSpec
from .process import Process
from .state_dir import MeshRecord, PartReport, write_record

KILL_GRACE = 2.0
"""Seconds after the drain timeout within which a part must end before it is killed."""
_MOMENT, _MOST_MOMENTS = 0.1, 10


class Mesh:
    """Owns the parts. Use as ``async with``: entering starts them, leaving kills those that are left."""

    def __init__(
        self,
        specs: Sequence[PartSpec],
        directory: Path,
        output: LineCopier,
        *,
        port: int,
        drain_timeout: float,
        first: Mapping[str, Process] = {},
    ) -> None:
        """``first``: The processes that run already, by the names of their parts."""
        self.parts = [SupervisedPart(spec, output, first.get(spec.name)) for spec in specs]
        self._directory = directory
        self._output = output
        self._port = port
        self._drain_timeout = drain_timeout
        self._keepers: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> "Mesh":
        records = [part.spec.record for part in self.parts]
        write_record(self._directory, MeshRecord(os.getpid(), self._port, records))
        self._keepers = [asyncio.create_task(part.keep(), name=part.spec.name) for part in self.parts]
        return self

    async def __aexit__(self, *_: object) -> None:
        self.kill()
        while pending := [keeper for keeper in self._keepers if not keeper.done()]:
            await asyncio.wait(pending)

    @property
    def gateways(self) -> Sequence[PartReport]:
        """The states of the running gateways, with their HTTP addresses."""
        return self.states("gateway")

    def states(self, service: str) -> Sequence[PartReport]:
        """Return the states of the running parts of a service."""
        return [part.state for part in self.parts if part.spec.service == service and part.state is not None]

    async def output_settled(self) -> None:
        """Return when the parts have written nothing for a moment, or after ten such moments."""
        for _ in range(_MOST_MOMENTS):
            if self._output.quiet_seconds() >= _MOMENT:
                return
            await asyncio.sleep(_MOMENT)

    async def wait_serving(self) -> None:
        """Wait until every part is SERVING. Raises `PartFailed` if a part cannot be started."""
        await first_of(self._all_serving(), self.wait_failed())

    async def wait_failed(self) -> None:
        """Wait until a part has failed for good, and raise its error. Never returns."""
        await asyncio.wait(self._keepers, return_when=asyncio.FIRST_EXCEPTION)
        for keeper in self._keepers:
            if keeper.done():
                keeper.result()
        raise PartFailed("every part has ended")

    async def drain(self) -> bool:
        """Stop the parts, service by service in the order of the layout, so that their last requests can finish.

        Returns True if all parts ended by themselves within the drain timeout, which they share.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._drain_timeout
        clean = True
        pairs = zip(self.parts, self._keepers, strict=True)
        for _, group in itertools.groupby(pairs, key=lambda pair: pair[0].spec.service):
            members = list(group)
            for part, _ in members:
                part.stop()
            left = max(deadline - loop.time(), 0.0) + KILL_GRACE
            _, late = await asyncio.wait([keeper for _, keeper in members], timeout=left)
            clean = clean and not late
            for part, _ in members:
                part.kill()
        return clean

    def kill(self) -> None:
        """Kill every part."""
        for part in self.parts:
            part.kill()

    async def _all_serving(self) -> None:
        for part in self.parts:
            await part.serving.wait()
