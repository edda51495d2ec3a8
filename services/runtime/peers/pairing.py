"""Who takes a leg of a request, and whether all of it: the one rule, by which the coordinator places and, while it is
away, every output processor. No I/O."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Generic, TypeVar

from tokenloom.request.errors import ResourceExhausted
from tokenloom.v1.types_pb2 import EngineRole, Fingerprint

from .hello import fingerprint_difference

POOL_FIELDS = ("model", "weights", "tokenizer")
"""Engines that are equal in these answer alike, and form a pool."""
PAIR_FIELDS = (*POOL_FIELDS, "kv_layout")
"""Engines that are equal in these can read each other's KV."""

_BOTH, _PREFILL, _DECODE = EngineRole.ENGINE_ROLE_BOTH, EngineRole.ENGINE_ROLE_PREFILL, EngineRole.ENGINE_ROLE_DECODE

T = TypeVar("T")

_RANK = attrgetter("rank")


@dataclass(frozen=True, slots=True)
class Candidate(Generic[T]):
    """An engine that could take the leg: it serves, it is in the pool, and its KV cache can hold the prompt.

    Attributes:
        engine: Whatever the caller knows it by.
        rank: How it compares with others, the lowest is next.
        uncached_tokens: Of the prompt, as far as is known.
        is_full: It should get no new request.
    """

    engine: T
    role: EngineRole
    fingerprint: Fingerprint
    rank: tuple[float, ...]
    uncached_tokens: int
    is_full: bool = False


def in_pool(asked: Fingerprint, engine: Fingerprint, leg: EngineRole) -> bool:
    """Whether an engine may take this leg of a request of that pool; for a decode leg, from the KV of that engine."""
    return fingerprint_difference(asked, engine, PAIR_FIELDS if leg == _DECODE else POOL_FIELDS) is None


def choose(candidates: Sequence[Candidate[T]], leg: EngineRole, pd_threshold: int) -> tuple[T, bool]:
    """The engine for ``leg`` among ``candidates`` (at least one), and whether it does the whole request.

    An engine that decodes takes the whole of a request with fewer than ``pd_threshold`` tokens to compute there. Longer
    ones begin on an engine that prefills, if it can hand over to another. Where a role is missing the others step in.

    ``ResourceExhausted`` when all who should take a new request are full. A decode leg is never refused: the request
    was admitted with its first leg.
    """
    decoders = [candidate for candidate in candidates if candidate.role in (_BOTH, _DECODE)]
    if leg == _DECODE:
        return min(decoders or candidates, key=_RANK).engine, False
    if leg == _BOTH:
        return _best_open(decoders or candidates).engine, True
    if decoders:
        straight = _best_open(decoders)
        if straight.uncached_tokens < pd_threshold:
            return straight.engine, True
    prefillers = [each for each in candidates if each.role == _BOTH or _can_hand_over(each, decoders)]
    chosen = _best_open(prefillers or candidates)
    return chosen.engine, not _can_hand_over(chosen, decoders)


def missing_role(roles: Iterable[EngineRole]) -> EngineRole | None:
    """The role that engines of these ``roles`` lack to serve as pairs; None when they lack none or form no pairs."""
    present = set(roles)
    if _BOTH in present or not present or {_PREFILL, _DECODE} <= present:
        return None
    return _DECODE if _PREFILL in present else _PREFILL


def _can_hand_over(prefill: Candidate[T], decoders: Iterable[Candidate[T]]) -> bool:
    """Whether another engine can go on from its KV. One that does everything hands over only to one that is there to
    decode: else nothing is gained."""
    if prefill.role == _DECODE:
        return False
    return any(
        (decoder.role == _DECODE or prefill.role == _PREFILL)
        and in_pool(prefill.fingerprint, decoder.fingerprint, _DECODE)
        for decoder in decoders
    )


def _best_open(candidates: Sequence[Candidate[T]]) -> Candidate[T]:
    best = None
    for candidate in candidates:
        if not candidate.is_full and (best is None or candidate.rank < best.rank):
            best = candidate
    if best is None:
        raise ResourceExhausted("every engine's queue is full; try again later")
    return best
