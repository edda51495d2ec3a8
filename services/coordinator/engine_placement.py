"""Chooses the engine that takes a leg of a request. No I/O, and no state but the records'."""

from collections.abc import Sequence
from dataclasses import dataclass

from tokenloom.request.errors import InvalidArgument, ResourceExhausted, Unavailable
from tokenloom.services.runtime.peers import pairing
from tokenloom.v1.coordinator_pb2 import EngineRef, PickRequest
from tokenloom.v1.types_pb2 import EngineRole

from .defaults import PD_THRESHOLD
from .engine_record import WAITING_WEIGHT, EngineRecord

_UNSPECIFIED, _DECODE = EngineRole.ENGINE_ROLE_UNSPECIFIED, EngineRole.ENGINE_ROLE_DECODE


@dataclass(frozen=True, slots=True)
class Policy:
    """Holds what an operator decides.

    Attributes:
        pd_threshold: Uncached prompt tokens below which an engine that decodes does the whole request; 0: none does.
    """

    pd_threshold: int = PD_THRESHOLD


def choose(pool: Sequence[EngineRecord], request: PickRequest, policy: Policy) -> tuple[EngineRecord, bool]:
    """Return the engine for ``request``, and whether it does all of it (see :func:`.pairing.choose`).

    Args:
        pool: The engines that serve what the request asks for.

    Raises ``InvalidArgument`` for a request that no engine could take, ``Unavailable`` when no engine of the pool is
    left, ``ResourceExhausted`` when the KV cache of none of them can hold the prompt.
    """
    if request.role == _UNSPECIFIED:
        raise InvalidArgument("role must be BOTH, PREFILL or DECODE", "role")
    if request.prompt_tokens == 0:
        raise InvalidArgument("prompt_tokens must be at least 1", "prompt_tokens")
    if request.exclude:
        pool = _without(pool, request.exclude)
    if not pool:
        raise Unavailable("No engine is serving this model now; retry.")
    if request.query_id:
        names = [(each.identity.engine_id, each.identity.epoch, each.report.role) for each in pool]
        pool = [pairing.engine_of_query(pool, names, request.query_id)]
    num_places = request.prompt_tokens + (not request.pools)  # the first token needs a place too
    candidates = [_candidate(record, request, policy) for record in pool if num_places <= record.max_tokens]
    if not candidates:
        raise ResourceExhausted(f"No engine's KV cache can hold a prompt of {request.prompt_tokens} tokens.")
    # A request that pools has no use for an engine that decodes, however short it is.
    return pairing.choose(candidates, request.role, 0 if request.pools else policy.pd_threshold)


def choose_near(
    near: Sequence[EngineRecord] | None, pool: Sequence[EngineRecord], request: PickRequest, policy: Policy
) -> tuple[EngineRecord, bool]:
    """Return what :func:`choose` returns for ``near``, the engines that the output processor has streams to, unless
    none of them can take the request, or only another engine of ``pool`` has room for it at once. ``near``: None if all
    are equal. Raises what :func:`choose` raises for ``pool``."""
    if near is None:
        return choose(pool, request, policy)
    try:
        chosen = choose(near, request, policy)
    except (ResourceExhausted, Unavailable):
        return choose(pool, request, policy)
    if _has_room(chosen[0], request):
        return chosen
    other = choose(pool, request, policy)
    return other if _has_room(other[0], request) else chosen


def _has_room(record: EngineRecord, request: PickRequest) -> bool:
    return not record.is_late and request.prompt_tokens < record.free_tokens


def _without(pool: Sequence[EngineRecord], excluded: Sequence[EngineRef]) -> list[EngineRecord]:
    keys = {(each.engine_id, each.epoch) for each in excluded}
    return [record for record in pool if (record.identity.engine_id, record.identity.epoch) not in keys]


def _candidate(record: EngineRecord, request: PickRequest, policy: Policy) -> pairing.Candidate[EngineRecord]:
    """Rank engines that report in time first, then those with free room for the prompt, then by the score less what a
    cached prefix saves, then by how much of the prompt is cached, then by how long they were not chosen.

    A prefill that is cached in full saves what a waiting request weighs, and no engine becomes better than an idle one.
    A decode leg saves no prefill, only a copy: its cached prefix decides between equals.
    """
    fingerprint, prompt_tokens = record.identity.fingerprint, request.prompt_tokens
    cached = saved = 0
    if request.block_hash_prefixes:
        cached = min(record.prefixes.match(request.block_hash_prefixes) * fingerprint.block_size, prompt_tokens)
        saved = 0 if request.role == _DECODE else round(WAITING_WEIGHT * cached / prompt_tokens)
    return pairing.Candidate(
        engine=record,
        role=record.report.role,
        fingerprint=fingerprint,
        rank=(
            record.is_late,
            prompt_tokens >= record.free_tokens,
            max(record.score - saved, 0),
            -cached,
            record.last_turn,
        ),
        uncached_tokens=prompt_tokens - cached,
    )
