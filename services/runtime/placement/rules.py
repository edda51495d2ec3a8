"""The rules by which engines are compared. A rule returns what a leg costs on each of some engines; the least is best.

:func:`.rank.best` asks the rule only about engines that report in time and have room, if there are any, and decides
between engines of equal cost.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from tokenloom.v1.types_pb2 import EngineRole

from .engine_columns import BoolColumn, EngineColumns, FloatColumn, IntColumn, Rows

WAITING_WEIGHT = 4
"""A waiting request weighs four running ones: it will cost a prefill, and it shows that there was no room."""

HOME_SHARE = 0.25
"""A home is preferred as if it had computed so much of the prompt already."""
BATCH_STEPS = 64.0
"""As many steps of a full batch count for the share of it that is taken: what a request costs and is cost after its
prefill, while it and the others decode together."""
UNKNOWN_RATE = 10_000.0
"""Prompt tokens per second of engines of which none has measured its own."""
UNKNOWN_STEP_SECONDS = 0.02
"""Duration of a step of an engine that has not measured it."""

_DECODE = EngineRole.ENGINE_ROLE_DECODE
# Operands of arrays are arrays: NumPy takes a microsecond longer for each number of Python.
_WAITING_WEIGHT, _NONE = np.array(WAITING_WEIGHT), np.array(0.0)


@dataclass(frozen=True, slots=True)
class Ask:
    """Describes a leg to place.

    Attributes:
        role: PREFILL or DECODE, or BOTH for the whole request.
        prompt_tokens: All tokens of the prompt; at least 1.
        cached_tokens: Tokens of the prompt in each engine's KV cache as far as is known, by row, shape [capacity]; None
            if no engine has any.
        is_home: Whether the prompt's beginning is at home on an engine, by row, shape [capacity]; None: it has no home,
            or the rule does not ask.
    """

    role: EngineRole
    prompt_tokens: int
    cached_tokens: IntColumn | None = None
    is_home: BoolColumn | None = None

    def uncached_tokens(self, rows: Rows) -> IntColumn:
        """Return the prompt tokens to compute on each of ``rows``, shape [n]."""
        if self.cached_tokens is None:
            return np.full(len(rows), self.prompt_tokens, np.int64)
        return self.prompt_tokens - self.cached_tokens[rows]


Rule: TypeAlias = Callable[[EngineColumns, Rows, Ask], NDArray[np.int64] | NDArray[np.float64]]
"""Returns what the leg costs on each of the rows, shape [n]; it must not change the columns."""


def score(engines: EngineColumns, rows: Rows, ask: Ask) -> IntColumn | FloatColumn:
    """Return waiting * 4 + running, less what a cached prefix saves.

    A prefill that is cached in full saves what a waiting request weighs, and no engine becomes better than an idle one.
    A decode leg saves no prefill, only a copy: its cached prefix decides between equals.
    """
    scores: IntColumn = engines.waiting * _WAITING_WEIGHT  # all rows: faster than to take some of each
    scores += engines.running
    if ask.cached_tokens is None or ask.role == _DECODE:
        return scores.take(rows)
    reduced: FloatColumn = ask.cached_tokens / np.array(ask.prompt_tokens / WAITING_WEIGHT)
    np.rint(reduced, out=reduced)
    np.subtract(scores, reduced, out=reduced)
    np.maximum(reduced, _NONE, out=reduced)
    return reduced.take(rows)


def cost(engines: EngineColumns, rows: Rows, ask: Ask) -> FloatColumn:
    """Return the seconds that the leg is expected to cost there.

    They are the time to compute the uncached prompt tokens that wait there and those of the leg, at the engine's own
    rate, and :data:`BATCH_STEPS` of the pool's mean steps as far as its batch is full, waiting requests included. An
    engine that has not measured its rate gets the mean of the others. A decode leg computes no prompt. A home of the
    prompt counts as if it had computed :data:`HOME_SHARE` of it.
    """
    requests = engines.waiting[rows] + engines.running[rows]
    step_seconds = _known(engines.step_seconds[rows], UNKNOWN_STEP_SECONDS).mean()
    seconds: FloatColumn = BATCH_STEPS * step_seconds * requests / np.maximum(engines.seats[rows], 1)
    if ask.role == _DECODE:
        return seconds
    rates = _known(engines.computed_rate[rows], UNKNOWN_RATE)
    tokens = engines.uncached_tokens[rows] + ask.uncached_tokens(rows)
    if ask.is_home is not None:
        tokens -= ask.is_home[rows] * (HOME_SHARE * ask.prompt_tokens)
    seconds += tokens / rates
    return seconds


def _known(values: FloatColumn, default: float) -> FloatColumn:
    """Return the values with the mean of the known ones, or ``default``, in place of those that are 0."""
    is_known = values > 0
    if is_known.all():
        return values
    filled: FloatColumn = np.where(is_known, values, values[is_known].mean() if is_known.any() else default)
    return filled


RULES: dict[str, Rule] = {"score": score, "cost": cost}
"""The rules by the name that an operator gives them."""
