"""Finds the best of some engines for a leg."""

import numpy as np

from .engine_columns import EngineColumns, Rows
from .rules import Ask, Rule


def best(engines: EngineColumns, rows: Rows, ask: Ask, rule: Rule) -> int:
    """Return the row of the best engine among ``rows`` (at least one).

    Engines that report in time come first, then those with free room for the prompt, then those of the least cost by
    the rule, then those with most of the prompt cached, then the one that was not chosen for the longest time.
    """
    crowded = engines.free_tokens.take(rows) <= np.array(ask.prompt_tokens)
    if engines.num_late or crowded[crowded.argmax()]:
        tiers = engines.is_late.take(rows) * 2 + crowded
        rows = rows[tiers == tiers.min()]
    costs = rule(engines, rows, ask)
    equal = (costs == costs[costs.argmin()]).nonzero()[0]
    rows = rows.take(equal)
    if len(rows) > 1 and ask.cached_tokens is not None:
        cached = ask.cached_tokens[rows]
        rows = rows[cached == cached[cached.argmax()]]
    return int(rows[engines.last_turn.take(rows).argmin()])
