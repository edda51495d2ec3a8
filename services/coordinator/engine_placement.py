"""The choice: which engine takes a leg of a request. No I/O, and no state but the records'."""

from collections.abc import Iterable
from dataclasses import dataclass

from tokenloom.request.errors import InvalidArgument, ResourceExhausted, Unavailable
from tokenloom.services.runtime.peers import pairing
from tokenloom.v1.coordinator_pb2 import PickRequest
from tokenloom.v1.types_pb2 import EngineRole

from .engine_record import WAITING_WEIGHT, EngineRecord

PD_THRESHOLD = 128
"""As many prompt tokens as a CPU engine computes in a step beside decodes: a shorter prompt delays others by one step
at most, and a pair costs more than that."""

_UNSPECIFIED, _DECODE = EngineRole.ENGINE_ROLE_UNSPECIFIED, EngineRole.ENGINE_ROLE_DECODE


@dataclass(frozen=True, slots=True)
class Policy:
    """What an operator decides.

    Attributes:
        max_waiting: Requests that may wait on one engine before it gets no new ones.
        pd_threshold: Uncached prompt tokens below which an engine that decodes does the whole request; 0: none does.
    """

    max_waiting: int = 1 << 31
    pd_threshold: int = PD_THRESHOLD


def choose(
    records: Iterable[EngineRecord], request: PickRequest, now: float, policy: Policy
) -> tuple[EngineRecord, bool]:
    """The engine for ``request``, and whether it does all of it (:func:`.pairing.choose` says which and when).

    ``Unavailable`` when no engine of the pool serves; ``ResourceExhausted`` when none of those may take it: too small
    for the prompt, or too many requests wait there already.
    """
    serving = [record for record in records if _is_in_pool(record, request) and record.is_serving(now)]
    if not serving:
        raise Unavailable("no engine is serving this model now; try again")
    able = [record for record in serving if record.can_hold(request.prompt_tokens)]
    if not able:
        raise ResourceExhausted(f"no engine's KV cache can hold a prompt of {request.prompt_tokens} tokens")
    candidates = [_candidate(record, request, policy) for record in able]
    return pairing.choose(candidates, request.role, policy.pd_threshold)


def check_request(request: PickRequest) -> None:
    """Refuses what cannot be placed whatever the engines do."""
    if request.role == _UNSPECIFIED:
        raise InvalidArgument("role must be BOTH, PREFILL or DECODE", "role")
    if request.prompt_tokens == 0:
        raise InvalidArgument("prompt_tokens must be at least 1", "prompt_tokens")


def _candidate(record: EngineRecord, request: PickRequest, policy: Policy) -> pairing.Candidate[EngineRecord]:
    """First those with free room for the prompt, then by the score less what a cached prefix saves, then by how much
    of the prompt is cached, then the one longest not chosen.

    A prefill that is cached in full saves what a waiting request weighs, and no engine becomes better than an idle one.
    A decode leg saves no prefill, only a copy: its cached prefix decides between equals.
    """
    cached = min(record.cached_tokens(request.block_hash_prefixes), request.prompt_tokens)
    saved = 0 if request.role == _DECODE else round(WAITING_WEIGHT * cached / request.prompt_tokens)
    return pairing.Candidate(
        engine=record,
        role=record.report.role,
        fingerprint=record.identity.fingerprint,
        rank=(
            not record.has_room(request.prompt_tokens),
            max(record.score - saved, 0),
            -cached,
            record.last_turn,
        ),
        uncached_tokens=request.prompt_tokens - cached,
        is_full=record.num_waiting >= policy.max_waiting,
    )


def _is_in_pool(record: EngineRecord, request: PickRequest) -> bool:
    identity = record.identity
    if any(ref.engine_id == identity.engine_id and ref.epoch == identity.epoch for ref in request.exclude):
        return False
    return pairing.in_pool(request.fingerprint, identity.fingerprint, request.role)
