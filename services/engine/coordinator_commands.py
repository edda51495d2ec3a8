"""Obeys the coordinator: drains, changes LoRA adapters, begins waves, changes the size of the data-parallel group."""

import asyncio
import logging

from tokenloom.request.errors import TryElsewhere
from tokenloom.request.wire_errors import of_exception
from tokenloom.v1 import coordinator_pb2

from .running_engine import STOPPED, RunningEngine

log = logging.getLogger(__name__)


class CoordinatorCommands:
    """Implements ``Commands`` for one engine; each command is a task of its host."""

    def __init__(self, engine: RunningEngine) -> None:
        self._engine = engine

    def drain(self, grace: float) -> None:
        """Drain at the coordinator's request. The process stays up until it is stopped."""
        self._engine.host.spawn(self._drain_within(grace), name="engine-drain")

    def change_adapters(self, changes: coordinator_pb2.AdapterChanges) -> None:
        self._engine.host.spawn(self._engine.loras.apply(changes), name="engine-adapters")

    def start_wave(self, wave: int) -> None:
        if (group := self._engine.group) is not None:
            self._engine.host.spawn(group.start_wave(wave), name="engine-wave")

    def wait_aside(self, reason: str) -> None:
        if reason:
            self._engine.host.fall_backs.begin("other_weights", reason)
        else:
            self._engine.host.fall_backs.end("other_weights")

    def resize_group(self, size: int) -> None:
        self._engine.host.spawn(self._resize_group(size), name="engine-group")

    async def _resize_group(self, size: int) -> None:
        try:
            await self._engine.resize_group(size)
        except Exception as error:  # of any kind: the engine goes on with its group as it is
            log.error("the data-parallel group is not resized: %s", of_exception(error).message)

    async def _drain_within(self, grace: float) -> None:
        try:
            async with asyncio.timeout(grace):
                await self._engine.drain()
        except TimeoutError:
            await self._engine.end_streams(TryElsewhere(STOPPED))
