"""Receives every request that has ended, over HTTP and over gRPC, and writes the access log."""

import logging
import time
from collections.abc import Callable
from typing import Final

from tokenloom.services.runtime.telemetry.logs import with_fields

from .finished_request import FinishedRequest, RecentRequests, RequestRecord

log = logging.getLogger(__name__)

MAX_REFUSALS: Final = 20
"""Lines about refusals for lack of capacity in one second: under overload, a line costs as much as the refusal."""
_FULL = (429, 503)


class AccessLog:
    """Logs requests at level INFO: the route and the status as the message, the rest as fields, under the id that the
    client has of the request."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """``clock``: monotonic seconds."""
        self._clock = clock
        self._since = -1.0
        self._num_in_second = self._num_left_out = 0

    def add(self, finished: FinishedRequest) -> None:
        """Write the line of a request. Beyond :data:`MAX_REFUSALS` in one second, requests that were refused with
        status 429 or 503 are counted, and the next line has their number."""
        if not log.isEnabledFor(logging.INFO):
            return
        if finished.status in _FULL and not self._has_room():
            self._num_left_out += 1
            return
        fields = _fields(finished)
        if self._num_left_out:
            fields["refusals_left_out"] = self._num_left_out
            self._num_left_out = 0
        log.info("%s %d", finished.route, finished.status, extra=with_fields(finished.request_id, fields))

    def _has_room(self) -> bool:
        """Count a refusal; return whether it gets a line."""
        now = self._clock()
        if now - self._since >= 1.0:
            self._since, self._num_in_second = now, 0
        self._num_in_second += 1
        return self._num_in_second <= MAX_REFUSALS


def _fields(finished: FinishedRequest) -> dict[str, object]:
    """Return what the line has besides route, status and id; nothing that the request lacks."""
    fields: dict[str, object] = {"seconds": round(finished.seconds, 6)}
    if finished.reason:
        fields["reason"] = finished.reason
    if finished.key:
        fields["key"] = finished.key
    if finished.generation_id:
        fields |= {
            "model": finished.model,
            "prompt_tokens": finished.prompt_tokens,
            "cached_tokens": finished.cached_tokens,
            "output_tokens": finished.output_tokens,
            "generation_id": finished.generation_id,
        }
    if finished.ttft_seconds is not None:
        fields["ttft_seconds"] = round(finished.ttft_seconds, 6)
    return fields


class FinishedRequests:
    """Keeps the last requests and writes the access log.

    Attributes:
        recent: The last requests.
        clock: Returns monotonic seconds, as :attr:`HttpExchange.began` is.
    """

    def __init__(
        self, recent: RecentRequests, access_log: AccessLog | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """``access_log``: None where it is off. ``clock``: monotonic seconds."""
        self.recent = recent
        self.clock = clock
        self._access_log = access_log

    def add(
        self, record: RequestRecord, *, request_id: str, route: str, key: str, began: float, status: int, reason: str
    ) -> None:
        """Add a request.

        Args:
            record: What it has generated.
            began: When it arrived, by :attr:`clock`.
            status, reason: Of its end, as in :class:`FinishedRequest`.
        """
        # Made once, where the request ends, refusals of the protocol included: those were counted twice while a body
        # was read, and refused handshakes not at all. The record has no field for a prompt or a key.
        finished = FinishedRequest(
            request_id=request_id,
            finished_at=time.time(),
            route=route,
            model=record.model,
            key=key,
            prompt_tokens=record.prompt_tokens,
            cached_tokens=record.cached_tokens,
            output_tokens=record.output_tokens,
            ttft_seconds=record.ttft_seconds,
            seconds=self.clock() - began,
            status=status,
            reason=reason,
            generation_id=record.generation_id,
        )
        self.recent.add(finished)
        if self._access_log is not None:
            self._access_log.add(finished)
