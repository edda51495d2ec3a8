"""Holds the coordinator's end of an engine's ``Join``: the commands that the engine gets."""

import asyncio
from typing import Any, TypeAlias

import grpc.aio
from google.protobuf.duration_pb2 import Duration

from tokenloom.request.errors import Aborted, ResourceExhausted, Unavailable
from tokenloom.v1.coordinator_pb2 import DesiredState, EngineCommand

from .engine_record import EngineRecord

_Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"

_MAX_COMMANDS = 8  # queued for one engine: to drain, to change its state, adapters, waves, group or interval


class EngineStream:
    """Holds the coordinator's end of one engine's Join.

    Attributes:
        interval: Seconds between two reports, as the engine was asked last on this stream; 0: it was not asked.
        sent_revision: The latest state that it was sent; 0: none.
    """

    def __init__(self, record: EngineRecord) -> None:
        self.record = record
        self.interval = 0.0
        self.sent_revision = 0
        self.overtaken = self._is_passed_on = False
        self._commands: asyncio.Queue[EngineCommand | None] = asyncio.Queue(_MAX_COMMANDS)

    def command(self, command: EngineCommand) -> None:
        """Send a command. Raises ``ResourceExhausted`` when the engine does not read its commands."""
        try:
            self._commands.put_nowait(command)
        except asyncio.QueueFull:
            # The queue is bounded instead of awaited: one engine that does not read must not hold up what others are
            # sent.
            raise ResourceExhausted("The engine does not read its commands; retry.") from None

    def pace(self, interval: float) -> None:
        """Ask the engine to report at an interval, unless it was asked to. Raises as :meth:`command`."""
        if interval != self.interval:
            self.command(EngineCommand(report_interval=to_duration(interval)))
            self.interval = interval

    def want(self, state: DesiredState) -> None:
        """Send the state that the engine has to reach, unless it was sent. Raises as :meth:`command`."""
        if state.revision != self.sent_revision:
            self.command(EngineCommand(desired=state))
            self.sent_revision = state.revision

    def overtake(self, newer: int) -> None:
        """End the stream, because a newer join has the name: with ABORTED if that is another process.

        ``newer``: the epoch of the newer join.
        """
        self.overtaken = True
        self._is_passed_on = newer != self.record.identity.epoch
        if not self._commands.full():  # otherwise the writer wakes for a command
            self._commands.put_nowait(None)

    async def write(self, answer: EngineCommand, context: _Context) -> None:
        """Write the answer to the engine's hello, then commands until a newer join takes the name."""
        await context.write(answer)
        while not self.overtaken:
            if (command := await self._commands.get()) is not None:
                await context.write(command)
        if self._is_passed_on:
            raise Aborted("another engine has taken this one's name")
        # Joins of one process may arrive in another order behind a link that was cut: the engine ended itself for good
        # because of its own older one.
        raise Unavailable("this engine has joined once more")


def to_duration(seconds: float) -> Duration:
    """Return a duration as messages hold it."""
    duration = Duration()
    duration.FromNanoseconds(round(seconds * 1e9))
    return duration
