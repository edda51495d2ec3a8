"""Holds the coordinator's end of an engine's ``Join``: the commands that the engine gets. Decides how often engines
report: by their number, and by how late the coordinator is with its work."""

import asyncio
from collections.abc import Iterator
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


MAX_REPORTS_PER_SECOND = 5000
"""Reports of all engines together, which one core reads beside its other work."""
_STEPS = (0.03, 0.06, 0.1, 0.2, 0.4, 1.0)
"""Seconds between two reports of an engine. The coordinator counts its own picks at once, so that a slower report only
delays the news of what has ended."""
_ALONE_SECONDS = 0.1
"""Between two reports of the only engine: picks do not compare it, and snapshots show it no more often."""
_RETURN_SHARE = 0.8
"""A shorter interval is chosen only when the engines are so much fewer than it allows, so that it does not change with
each engine that comes and goes."""

_FEW_ENGINES = 100
"""Their reports do not keep an event loop busy."""
_BUSY_SECONDS, _CALM_SECONDS = 0.2, 0.05
"""The event loop is busy when its turns are so late on average, and has time for more reports when they are not."""
_SHARE_OF_NEWEST = 0.2  # of the moving average
_LONGER_AFTER, _SHORTER_AFTER = 2.0, 20.0
"""Seconds until the interval changes again: reports on their way come at the old one, and what kept the loop busy may
come back."""


class ReportPace:
    """Follows the number of engines and the event loop of one coordinator.

    A loop that has no time for all reports falls behind, more with each second, and then knows loads of long ago. Fewer
    reports in time are better: its own picks it counts at once.

    Attributes:
        interval: Seconds between two reports of an engine.
    """

    def __init__(self) -> None:
        self.interval = self._of_number = report_interval(0)
        self._steps_longer = 0
        self._late = 0.0
        self._changed_at = 0.0

    def follow(self, num_engines: int, late_seconds: float, now: float) -> float:
        """Return the interval. To be called several times a second.

        ``late_seconds``: by how much the loop was late this time.
        """
        self._late += _SHARE_OF_NEWEST * (late_seconds - self._late)
        self._of_number = report_interval(num_engines, self._of_number)
        if num_engines <= _FEW_ENGINES:
            self._steps_longer = 0
        elif self._late > _BUSY_SECONDS:
            # At the longest step too, by 0: this moves the time of the last change, so that the interval stays long for
            # 20 s after the last lateness. Counted from the last step, it would get shorter while the loop is still
            # late.
            self._change(1 if self.interval < _STEPS[-1] else 0, now, _LONGER_AFTER)
        elif self._late < _CALM_SECONDS:
            self._change(-1, now, _SHORTER_AFTER)
        step = min(_STEPS.index(self._of_number) + self._steps_longer, len(_STEPS) - 1)
        self.interval = _STEPS[step]
        return self.interval

    def _change(self, steps: int, now: float, seconds: float) -> None:
        """Change the interval, unless the last change was less than so many seconds ago."""
        if now >= self._changed_at + seconds:
            self._steps_longer = max(self._steps_longer + steps, 0)
            self._changed_at = now


def report_interval(num_engines: int, before: float = _STEPS[0]) -> float:
    """Return how many seconds engines should let pass between two reports. ``before``: what was chosen last."""
    if num_engines <= 1:
        return _ALONE_SECONDS
    return next(_allowed(num_engines, before), _STEPS[-1])


def _allowed(num_engines: int, before: float) -> Iterator[float]:
    for step in _STEPS:
        # A report costs about 100 µs in gRPC for Python, whatever it holds: at one every 30 ms a thousand engines sent
        # 33,000 a second.
        most = step * MAX_REPORTS_PER_SECOND * (_RETURN_SHARE if step < before else 1.0)
        if num_engines <= most:
            yield step
