"""The choice: which engine takes a request. No I/O, and no state but the records'."""

from collections.abc import Collection, Iterable

from tokenloom.v1.coordinator_pb2 import PickRequest
from tokenloom.v1.types_pb2 import EngineRole

from ..runtime.errors import InvalidArgument, ResourceExhausted, Unavailable, Unimplemented
from ..runtime.hello import fingerprint_difference
from .engine_record import EngineRecord

POOL_FIELDS = ("model", "weights", "tokenizer")
"""Engines that are equal in these answer alike, and form a pool."""

# Which engines may take a leg. Prefill and decode legs will name their own here.
_ROLES: dict[EngineRole, Collection[EngineRole]] = {
    EngineRole.ENGINE_ROLE_BOTH: (EngineRole.ENGINE_ROLE_BOTH,),
}


def choose(
    records: Iterable[EngineRecord], request: PickRequest, now: float, *, max_waiting: int = 1 << 31
) -> EngineRecord:
    """The engine for ``request``: one with free room for the prompt if any has, then the lowest score, then the one
    longest not chosen.

    ``Unavailable`` when no engine of the pool serves; ``ResourceExhausted`` when none of those may take it: too small
    for the prompt, or ``max_waiting`` requests wait there already.
    """
    serving = [record for record in records if _is_in_pool(record, request) and record.is_serving(now)]
    if not serving:
        raise Unavailable("no engine is serving this model now; try again")
    able = [record for record in serving if record.can_hold(request.prompt_tokens)]
    if not able:
        raise ResourceExhausted(f"no engine's KV cache can hold a prompt of {request.prompt_tokens} tokens")
    able = [record for record in able if record.num_waiting < max_waiting]
    if not able:
        raise ResourceExhausted("every engine's queue is full; try again later")
    return min(able, key=lambda record: (not record.has_room(request.prompt_tokens), record.score, record.last_turn))


def check_request(request: PickRequest) -> None:
    """Refuses what cannot be placed whatever the engines do."""
    if request.role == EngineRole.ENGINE_ROLE_UNSPECIFIED:
        raise InvalidArgument("role must be BOTH, PREFILL or DECODE", "role")
    if request.role not in _ROLES:
        raise Unimplemented("placing prefill and decode apart is not supported yet; ask with role BOTH", field="role")
    if request.prompt_tokens == 0:
        raise InvalidArgument("prompt_tokens must be at least 1", "prompt_tokens")


def _is_in_pool(record: EngineRecord, request: PickRequest) -> bool:
    identity = record.identity
    if record.report.role not in _ROLES[request.role]:
        return False
    if any(ref.engine_id == identity.engine_id and ref.epoch == identity.epoch for ref in request.exclude):
        return False
    return fingerprint_difference(request.fingerprint, identity.fingerprint, POOL_FIELDS) is None
