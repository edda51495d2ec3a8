"""Reads which request of the mesh a call of the public gRPC API stands for, and what its caller has of the answer."""

from collections.abc import Iterable

from tokenloom.request.errors import InvalidArgument
from tokenloom.v1 import inference_pb2

from ..generation.delivered import Delivered
from ..records.request_ids import is_request_id
from ..records.resume_token import NEW, ClientPosition, ResumeToken, fingerprint, token_of_key, tokens_of
from ..tenants.tenant import Tenant

KEY_FIELD = "idempotency-key"


def read_resume_token(
    request: inference_pb2.GenerateRequest, tenant: Tenant, metadata: Iterable[tuple[str, str | bytes]]
) -> ResumeToken:
    """Return the claim of a call of Generate. Raises ``InvalidArgument`` for a malformed key."""
    key = next((value for name, value in metadata if name == KEY_FIELD), None)
    if key is not None:
        return token_of_key(tenant.name, str(key), _fingerprint(request), KEY_FIELD)
    return ResumeToken(fingerprint=_fingerprint(request)) if request.resumable else NEW


def read_resumption(request: inference_pb2.InferenceResumeRequest) -> tuple[ResumeToken, Delivered]:
    """Return the claim of a call of Resume, and what its caller has. Raises ``InvalidArgument`` naming the field."""
    if not is_request_id(request.request_id):
        raise InvalidArgument("request_id must be that of the answer to resume", "request_id")
    num_outputs = request.request.n or 1
    positions = {
        each.index: ClientPosition(each.num_tokens, each.text_length, each.finished, each.num_prompt_logprobs)
        for each in request.positions
    }
    if len(positions) < len(request.positions) or max(positions, default=0) >= num_outputs:
        raise InvalidArgument(f"positions must be of different indices, below {num_outputs}", "positions")
    fingerprint_of_body = _fingerprint(request.request)
    claim = ResumeToken(request.request_id, fingerprint_of_body, resumes=True, num_delivered=tokens_of(positions))
    return claim, Delivered(positions)


def read_cancellation(request: inference_pb2.InferenceCancelRequest, tenant: Tenant) -> str:
    """Return the id of the request that a call of Cancel names. Raises ``InvalidArgument`` naming the field."""
    if request.WhichOneof("name") == "idempotency_key":
        return token_of_key(tenant.name, request.idempotency_key, b"", "idempotency_key").request_id
    if not is_request_id(request.request_id):
        raise InvalidArgument("request_id must be that of the answer to cancel", "request_id")
    return request.request_id


def _fingerprint(request: inference_pb2.GenerateRequest) -> bytes:
    return fingerprint("Generate", request.SerializeToString(deterministic=True))
