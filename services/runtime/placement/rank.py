"""Finds the best of some engines for a leg."""

import numpy as np

from .candidates import Candidates
from .engine_columns import EngineColumns
from .rules import Ask, Rule


def best(engines: EngineColumns, candidates: Candidates, ask: Ask, rule: Rule) -> int:
    """Return the row of the best engine among ``candidates`` (at least one).

    Engines that report in time come first, then those with free room for the prompt, then those of the least cost by
    the rule, then those with most of the prompt cached, then the one that was not chosen for the longest time.
    """
    if len(candidates) == 1:  # there is nothing to compare, which would take a third of a pick's time
        return int(candidates.rows[0])
    free = engines.free_tokens[candidates.index]
    if engines.num_late or free[free.argmin()] <= ask.prompt_tokens:
        tiers = engines.is_late[candidates.index] * 2 + (free <= np.array(ask.prompt_tokens))
        candidates = Candidates(candidates.rows[tiers == tiers.min()])
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
