"""The rules by which engines are compared. A rule returns what a leg costs on each of some engines; the least is best.

:func:`.pairing.best` asks the rule only about engines that report in time and have room, if there are any, and decides
between engines of equal cost.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tokenloom.v1.types_pb2 import EngineRole

from .candidates import Candidates
from .engine_columns import EngineColumns, FloatColumn, IntColumn

WAITING_WEIGHT = 4
"""A waiting request weighs four running ones: it will cost a prefill, and it shows that there was no room."""

HOME_SHARE = 0.1
"""A home is preferred as if it had computed so much of the prompt already."""
EXCESS = 1.2
"""An engine with more than so many times the mean of the requests is passed over, also by what it has cached, unless it
saves more than :data:`EXCESS_STEPS` for each request that it has too many: a prefix that many requests share is
computed once more elsewhere then (Mirrokni et al., Consistent hashing with bounded loads, 2018)."""
EXCESS_STEPS = 24.0
"""As many steps count for each request that an engine has above :data:`EXCESS`."""

_DECODE = EngineRole.ENGINE_ROLE_DECODE
# Operands of arrays are arrays: NumPy takes a microsecond longer for each number of Python.
_WAITING_WEIGHT, _NONE = np.array(WAITING_WEIGHT), np.array(0.0)


SESSION_TOKENS = 1024
"""So many tokens of a session that need not be computed again weigh as much as a waiting request, whose prompt is about
as long."""
MAX_SESSION_WEIGHT = 4 * WAITING_WEIGHT
"""What a session saves counts for so much at most: an engine that has more to do than others by four waiting requests
loses sessions to them, however long these are."""
MAX_PRESSURE = 4.0
"""A turn of a session finds an engine as much worse by waiting requests as its other sessions need KV caches, up to so
many: sessions that all went where their system prompt was cached had one engine evict blocks while others had room."""
_TIE = 0.5
"""Between engines of equal scores a session stays where it is."""
BROUGHT_BACK = 0.5
"""Share of a session's KV that is assumed where it ran last, if the cache there has evicted it: an engine may have kept
it elsewhere, and brings it back for less than it costs to compute."""


class Home(NamedTuple):
    """Says where a session's KV lies.

    Attributes:
        row: Of the engine on which its last turn ran; None: it begins, or that engine is gone.
        tokens: Those of the prompt that were part of that turn.
        share: Of that engine's KV cache, which the session needs.
    """

    row: int | None
    tokens: int = 0
    share: float = 0.0


class Ask(NamedTuple):
    """Describes a leg to place.

    Attributes:
        role: PREFILL or DECODE, or BOTH for the whole request.
        prompt_tokens: All tokens of the prompt; at least 1.
        cached_tokens: Tokens of the prompt in each engine's KV cache as far as is known, by row, shape [capacity]; None
            if no engine has any.
        homes: Rows of the engines at which the prompt's beginning is at home; none, if the rule does not ask.
        session: Where the KV of the request's session lies; None: it has none.
    """

    role: EngineRole
    prompt_tokens: int
    cached_tokens: IntColumn | None = None
    homes: Sequence[int] = ()
    session: Home | None = None


Rule: TypeAlias = Callable[[EngineColumns, Candidates, Ask], NDArray[np.int64] | NDArray[np.float64]]
"""Returns what the leg costs on each of the engines, shape [n]; it must not change the columns."""


def score(engines: EngineColumns, candidates: Candidates, ask: Ask) -> IntColumn | FloatColumn:
    """Return waiting * 4 + running, less what a cached prefix saves.

    A prefill that is cached in full saves what a waiting request weighs, and no engine becomes better than an idle one.
    A decode leg saves no prefill, only a copy: its cached prefix decides between equals. A session saves more, the
    longer it is, and stays where it is rather than go to an idle engine.
    """
    index = candidates.index
    scores: IntColumn = engines.waiting[index] * _WAITING_WEIGHT
    scores += engines.running[index]
    if (ask.cached_tokens is None and ask.session is None) or ask.role == _DECODE:
        return scores
    cached = np.zeros(len(scores)) if ask.cached_tokens is None else ask.cached_tokens[index]
    reduced: FloatColumn = cached / np.array(ask.prompt_tokens / WAITING_WEIGHT)
    np.rint(reduced, out=reduced)
    np.subtract(scores, reduced, out=reduced)
    np.maximum(reduced, _NONE, out=reduced)
    if (home := ask.session) is not None:
        pressure: FloatColumn = np.minimum(engines.session_share[index], np.array(MAX_PRESSURE))
        for at in candidates.positions((home.row,)) if home.row is not None else ():
            pressure[at] -= min(home.share, float(pressure[at]))
            saved = max(int(cached[at]), BROUGHT_BACK * home.tokens)
            weight = WAITING_WEIGHT * saved / min(ask.prompt_tokens, SESSION_TOKENS)
            reduced[at] = scores[at] - min(weight, MAX_SESSION_WEIGHT) - _TIE
        reduced += WAITING_WEIGHT * pressure
    return reduced


def cost(engines: EngineColumns, candidates: Candidates, ask: Ask) -> FloatColumn:
    """Return the seconds that the leg is expected to cost there.

    They are the time to compute the uncached prompt tokens that wait there and those of the leg, at the engine's own
    rate, :data:`.BATCH_STEPS` of the mean steps as far as its batch is full, waiting requests included, and
    :data:`EXCESS_STEPS` for each request above :data:`EXCESS` times the mean. A decode leg computes no prompt. A home
    of the prompt counts as if it had computed :data:`HOME_SHARE` of it, and the engine of a session as if it had
    :data:`BROUGHT_BACK` of its KV at least.
    """
    index, speeds = candidates.index, candidates.speeds(engines)
    requests = engines.waiting[index] + engines.running[index]
    seconds: FloatColumn = requests * speeds.seconds_per_request
    limit = EXCESS / len(requests) * float(np.add.reduce(requests))
    if requests[requests.argmax()] > limit:
        excess: FloatColumn = np.maximum(requests, np.array(limit))
        excess -= np.array(limit)
        excess *= np.array(EXCESS_STEPS * speeds.step_seconds)
        seconds += excess
    if ask.role == _DECODE:
        return seconds
    tokens: FloatColumn = engines.uncached_tokens[index] + np.array(float(ask.prompt_tokens))
    if ask.cached_tokens is not None:
        tokens -= ask.cached_tokens[index]
    if (session := ask.session) is not None and session.row is not None:
        known = 0 if ask.cached_tokens is None else int(ask.cached_tokens[session.row])
        for at in candidates.positions((session.row,)):
            tokens[at] -= max(BROUGHT_BACK * session.tokens - known, 0.0)
    for home in candidates.positions(ask.homes) if ask.homes else ():
        tokens[home] -= HOME_SHARE * ask.prompt_tokens
    tokens *= speeds.seconds_per_token
    seconds += tokens
    return seconds


RULES: dict[str, Rule] = {"score": score, "cost": cost}
"""The rules by the name that an operator gives them."""
