"""Chooses the engine for a leg of a request, and whether it does the whole request. The coordinator uses this rule and,
while the coordinator is unavailable, every output processor. No I/O."""

from collections.abc import Callable, Iterable
from typing import TypeAlias

import numpy as np

from tokenloom.v1.types_pb2 import EngineRole

from . import prefix_homes
from .engine_columns import EngineColumns, Rows
from .pool import Candidates, Pool
from .rules import Ask, Rule


def best(engines: EngineColumns, candidates: Candidates, ask: Ask, rule: Rule) -> int:
    """Return the row of the best engine among ``candidates`` (at least one).

    Engines that report in time come first, then those with free room for the prompt, then those of the least cost by
    the rule, then those with most of the prompt cached, then the one that was not chosen for the longest time. The
    engine of a session counts as one with room: its turn costs less to wait for than to compute anew elsewhere.
    """
    if len(candidates) == 1:  # there is nothing to compare, which would take a third of a pick's time
        return int(candidates.rows[0])
    free = engines.free_tokens[candidates.index]
    if engines.num_late or free[free.argmin()] <= ask.prompt_tokens:
        tiers = engines.is_late[candidates.index] * 2 + (free <= np.array(ask.prompt_tokens))
        if ask.session is not None and ask.session.row is not None:
            for at in candidates.positions((ask.session.row,)):
                tiers[at] &= 2
        is_left_out = tiers > tiers.min()
        if is_left_out.any():  # otherwise their speeds are known
            candidates = Candidates(candidates.rows[~is_left_out])
    costs = rule(engines, candidates, ask)
    least = costs.argmin()
    equal = (costs == costs[least]).nonzero()[0]
    if len(equal) == 1:
        return int(candidates.rows[least])
    rows = candidates.rows.take(equal)
    if ask.cached_tokens is not None:
        cached = ask.cached_tokens[rows]
        rows = rows[cached == cached[cached.argmax()]]
    return int(rows[engines.last_turn.take(rows).argmin()])


_BOTH, _PREFILL, _DECODE = EngineRole.ENGINE_ROLE_BOTH, EngineRole.ENGINE_ROLE_PREFILL, EngineRole.ENGINE_ROLE_DECODE


Best: TypeAlias = Callable[[EngineColumns, Candidates, Ask, Rule], int]
"""Is :func:`best`, or chooses the same engine in another way."""


def choose(
    engines: EngineColumns, pool: Pool, ask: Ask, rule: Rule, pd_threshold: int, best: Best = best
) -> tuple[int, bool]:
    """Return the row of the engine for a leg among those of ``pool`` (at least one), and whether it does the whole
    request.

    A request with fewer than ``pd_threshold`` tokens to compute runs whole on an engine that decodes. A longer one
    begins on an engine that prefills, if that can hand over to another. If a role is missing, engines of the other role
    replace it.
    """
    decoders = pool.decoders if len(pool.decoders.rows) else pool.engines
    if ask.role in (_BOTH, _DECODE):
        return best(engines, decoders, ask, rule), ask.role == _BOTH
    prefillers = pool.prefillers if len(pool.prefillers.rows) else pool.engines
    if pd_threshold and len(pool.decoders.rows):
        chosen = best(engines, pool.decoders, ask, rule)
        cached = 0 if ask.cached_tokens is None else int(ask.cached_tokens[chosen])
        if ask.prompt_tokens - cached < pd_threshold:
            return chosen, True
        if prefillers is pool.decoders:
            return chosen, not bool(pool.hands_over[chosen])
    chosen = best(engines, prefillers, ask, rule)
    return chosen, not bool(pool.hands_over[chosen])


def engine_of_query(engines: EngineColumns, rows: Rows, query_id: str) -> int:
    """Return the row of the engine that holds the vectors of a query, by its id alone: every process chooses the same,
    and an engine that joins or leaves moves few queries. An engine that only decodes is chosen only if no other one
    serves."""
    able = rows[engines.role[rows] != _DECODE]
    able = able if len(able) else rows
    return int(able[prefix_homes.weights(engines.name_hash[able], prefix_homes.name_hash(query_id)).argmax()])


def missing_role(roles: Iterable[int]) -> EngineRole | None:
    """Return the role that is missing for these ``roles`` to serve as pairs; None if none is, or they form no pairs."""
    present = set(roles)
    if _BOTH in present or not present or {_PREFILL, _DECODE} <= present:
        return None
    return _DECODE if _PREFILL in present else _PREFILL
