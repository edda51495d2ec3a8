"""Counts and records the calls of the gRPC APIs, answered or refused."""

from tokenloom.request import errors
from tokenloom.services.runtime.host.servicer_edge import ObserveCall, ObserveEnd

from ..http.response_counts import ResponseCounts
from ..request_log.access_log import FinishedRequests
from ..request_log.finished_request import CURRENT_RECORD, RequestRecord
from ..tenants.api_keys import call_key

_RECORDED = frozenset(
    f"/{method}"
    for method in (
        "tokenloom.v1.Inference/Generate",
        "tokenloom.v1.Inference/Resume",
        "tokenloom.v1.Inference/GenerateSession",
        "tokenloom.v1.Inference/Cancel",
        *(f"tokenloom.v1.Inference/{name}" for name in ("Embed", "Classify", "Score", "Pool", "Transcribe")),
        "inference.GRPCInferenceService/ModelInfer",
        "inference.GRPCInferenceService/ModelStreamInfer",
        "vllm.grpc.engine.VllmEngine/Generate",
    )
)
"""Other methods only read: their successful calls are counted but not recorded."""
_OK = 200


def observe_calls(counts: ResponseCounts, finished: FinishedRequests) -> ObserveCall:
    """Return the observer of a host's calls."""

    def observe(method: str) -> ObserveEnd:
        record, began = RequestRecord(), finished.clock()
        CURRENT_RECORD.set(record)

        def end(error: errors.TokenloomError | None) -> None:
            counts.count(method, "OK" if error is None else error.code.name, "" if error is None else error.reason)
            if error is not None or method in _RECORDED:
                finished.add(
                    record,
                    request_id=record.request_id or record.generation_id,
                    route=method,
                    key=call_key(),
                    began=began,
                    status=_OK if error is None else error.http_status,
                    reason="" if error is None else error.reason,
                )

        return end

    return observe
