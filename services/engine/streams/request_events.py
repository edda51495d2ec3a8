"""What the scheduler did with a request, for the log."""

import logging
from collections.abc import Iterable

from tokenloom.engine_core.wire.messages import EngineCoreEvent
from tokenloom.services.runtime.telemetry.logs import RequestLog

from .attempts import Attempt

log = logging.getLogger(__name__)


def log_events(attempt: Attempt, events: Iterable[EngineCoreEvent]) -> None:
    """One line each, in milliseconds since the attempt arrived: front and core read the same monotonic clock."""
    request_log = RequestLog(log, attempt.request_id, attempt.trace_headers)
    for event in events:
        request_log.info("%s after %.1f ms", event.type.name.lower(), event.timestamp_ns / 1e6 - attempt.arrival * 1e3)
