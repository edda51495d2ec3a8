"""Chooses the engine for a leg of a request, and whether it does the whole request. The coordinator uses this rule and,
while the coordinator is unavailable, every output processor. No I/O."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from operator import attrgetter
from typing import Generic, TypeVar

from tokenloom.v1.types_pb2 import EngineRole, Fingerprint

from .hello import fingerprint_difference

POOL_FIELDS = ("model", "weights", "tokenizer")
"""Engines that are equal in these fields give the same answers and form a pool."""
PAIR_FIELDS = (*POOL_FIELDS, "kv_layout")
"""Engines that are equal in these fields can read each other's KV."""

_BOTH, _PREFILL, _DECODE = EngineRole.ENGINE_ROLE_BOTH, EngineRole.ENGINE_ROLE_PREFILL, EngineRole.ENGINE_ROLE_DECODE

T = TypeVar("T")

_RANK = attrgetter("rank")


@dataclass(frozen=True, slots=True)
class Candidate(Generic[T]):
    """An engine that could run the leg: it serves, it is in the pool, and its KV cache can hold the prompt.

    Attributes:
        engine: The caller's name for it.
        rank: The candidate with the lowest rank is chosen.
        uncached_tokens: Prompt tokens to compute there, as far as is known.
    """

    engine: T
    role: EngineRole
    fingerprint: Fingerprint
    rank: tuple[float, ...]
    uncached_tokens: int


def in_pool(asked: Fingerprint, engine: Fingerprint, leg: EngineRole) -> bool:
    """Return whether ``engine`` may run this leg; for a decode leg, ``asked`` is the engine that has the KV."""
    return fingerprint_difference(asked, engine, PAIR_FIELDS if leg == _DECODE else POOL_FIELDS) is None


def choose(candidates: Sequence[Candidate[T]], leg: EngineRole, pd_threshold: int) -> tuple[T, bool]:
    """Return the engine for ``leg`` among ``candidates`` (at least one), and whether it does the whole request.

    A request with fewer than ``pd_threshold`` tokens to compute runs whole on an engine that decodes. A longer one
    begins on an engine that prefills, if that can hand over to another. If a role is missing, engines of the other role
    replace it.
    """
    decoders = [candidate for candidate in candidates if candidate.role in (_BOTH, _DECODE)]
    if leg == _DECODE:
        return min(decoders or candidates, key=_RANK).engine, False
    if leg == _BOTH:
        return min(decoders or candidates, key=_RANK).engine, True
    if decoders:
        straight = min(decoders, key=_RANK)
        if straight.uncached_tokens < pd_threshold:
            return straight.engine, True
    prefillers = [each for each in candidates if each.role == _BOTH or _can_hand_over(each, decoders)]
    chosen = min(prefillers or candidates, key=_RANK)
    return chosen.engine, not _can_hand_over(chosen, decoders)


def engine_of_query(engines: Sequence[T], names: Sequence[tuple[str, int, EngineRole]], query_id: str) -> T:
    """Return the engine that holds the vectors of a query, by its id alone: every process chooses the same, and an
    engine that joins or leaves moves few queries. ``names``: of each engine, its id, epoch and role; an engine that
    only decodes is chosen only if no other one serves."""
    able = [index for index, name in enumerate(names) if name[2] != _DECODE] or list(range(len(names)))

    def weight(index: int) -> bytes:
        engine_id, epoch, _ = names[index]
        return blake2b(f"{query_id} {engine_id} {epoch}".encode(), digest_size=8).digest()

    return engines[max(able, key=weight)]


def missing_role(roles: Iterable[EngineRole]) -> EngineRole | None:
    """Return the role that is missing for these ``roles`` to serve as pairs; None if none is, or they form no pairs."""
    present = set(roles)
    if _BOTH in present or not present or {_PREFILL, _DECODE} <= present:
        return None
    return _DECODE if _PREFILL in present else _PREFILL


def _can_hand_over(prefill: Candidate[T], decoders: Iterable[Candidate[T]]) -> bool:
    """Return whether another engine can continue from its KV. An engine of both roles hands over only to one that only
    decodes: otherwise nothing is gained."""
    if prefill.role == _DECODE:
        return False
    return any(
        (decoder.role == _DECODE or prefill.role == _PREFILL)
        and in_pool(prefill.fingerprint, decoder.fingerprint, _DECODE)
        for decoder in decoders
    )
