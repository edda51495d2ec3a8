"""Receives every request that has ended, over HTTP and over gRPC."""

import time
from collections.abc import Callable

from .access_log import AccessLog
from .finished_request import FinishedRequest
from .recent_requests import RecentRequests
from .request_record import RequestRecord


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
