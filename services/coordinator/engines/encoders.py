"""Keeps the encoders that have joined. They report as engines do and are in snapshots, and no pick ever sees them."""

import logging
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, TypeAlias

import grpc.aio

from tokenloom.request.errors import InvalidArgument
from tokenloom.services.runtime.placement.engine_columns import EngineColumns
from tokenloom.services.runtime.tasks import first_of
from tokenloom.v1.coordinator_pb2 import EngineCommand, EngineEntry, EngineReport
from tokenloom.v1.types_pb2 import EngineRole

from .engine_record import EngineRecord, check_name, check_report
from .engine_stream import EngineStream

log = logging.getLogger(__name__)

_Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
ENCODE = EngineRole.ENGINE_ROLE_ENCODE


class Encoders:
    """Holds the encoders by name.

    Attributes:
        version: Grows when one joins, leaves or changes its state; a change of its load alone is shown to those that
            watch anew.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        """``clock``: monotonic seconds."""
        self._clock = clock
        self._columns = EngineColumns()  # not those of the engines, from which picks choose
        self._streams: dict[str, EngineStream] = {}
        self._is_closing = False
        self.version = 0

    def __len__(self) -> int:
        return len(self._streams)

    @property
    def entries(self) -> Sequence[EngineEntry]:
        """All encoders, as snapshots show them."""
        now = self._clock()
        return [stream.record.entry(now) for stream in self._streams.values()]

    def stream(self, name: str) -> EngineStream | None:
        """Return the coordinator's end of an encoder's stream; None: it has not joined."""
        return self._streams.get(name)

    async def serve(
        self, first: EngineReport, requests: AsyncIterator[EngineReport], answer: EngineCommand, context: _Context
    ) -> None:
        """Keep an encoder for as long as its stream lasts. ``answer``: to its first report. Raises as
        :func:`.check_name`, and ``InvalidArgument`` for a report that cannot be."""
        if (holder := self._streams.get(first.identity.engine_id)) is not None:
            check_name(holder.record, first, self._clock())
        stream = self._join(first)
        try:
            await first_of(self._read(stream, requests), stream.write(answer, context))
        finally:
            self._leave(stream)

    def refresh(self) -> None:
        """Notice encoders that are silent."""
        now = self._clock()
        for stream in self._streams.values():
            self.version += stream.record.refresh(now)

    def close(self) -> None:
        """Keep what is shown, because the coordinator stops."""
        self._is_closing = True

    def _join(self, first: EngineReport) -> EngineStream:
        name = first.identity.engine_id
        record = EngineRecord(first.identity, first, self._clock(), self._columns, self._columns.add())
        if (older := self._streams.get(name)) is not None:
            older.overtake(first.identity.epoch)
        record.update(first, 0, self._clock())
        self._streams[name] = stream = EngineStream(record)
        self.version += 1
        log.info("encoder %s joined: %s", name, first.identity.address)
        return stream

    def _leave(self, stream: EngineStream) -> None:
        record = stream.record
        self._columns.remove(record.row)
        if self._is_closing or self._streams.get(record.identity.engine_id) is not stream:
            return
        del self._streams[record.identity.engine_id]
        self.version += 1
        log.info("encoder %s left", record.identity.engine_id)

    async def _read(self, stream: EngineStream, requests: AsyncIterator[EngineReport]) -> None:
        async for report in requests:
            check_report(report)
            if report.role != ENCODE:
                raise InvalidArgument("an encoder keeps its role", "role")
            before = stream.record.own_state
            stream.record.update(report, 0, self._clock())
            self.version += stream.record.own_state != before
