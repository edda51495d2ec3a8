"""Makes requests that have ended."""

from typing import Any

from tokenloom.services.gateway.request_log.finished_request import FinishedRequest


def finished(**fields: Any) -> FinishedRequest:
    return FinishedRequest(
        **{"request_id": "r1", "finished_at": 0.0, "route": "/v1/completions", "seconds": 0.25, "status": 200, **fields}
    )
