"""The rules by which engines are compared. A rule returns what a leg costs on each of some engines; the least is best.

:func:`.pairing.best` asks the rule only about engines that report in time and have room, if there are any, and decides
between engines of equal cost.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from tokenloom.v1.types_pb2 import EngineRole

from .engine_columns import EngineColumns, FloatColumn, IntColumn
from .pool import Candidates

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
_NONE, _FULL = np.array(0.0), np.array(1.0)


SESSION_TOKENS = 1024
"""So many tokens of a session that need not be computed again weigh as much as a waiting request, whose prompt is about
as long."""
MAX_SESSION_WEIGHT = 4 * WAITING_WEIGHT
"""What a session saves counts for so much at most: an engine that has more to do than others by four waiting requests
loses sessions to them, however long these are."""
MAX_PRESSURE = 4.0
"""A session finds an engine as much worse as its other sessions need KV caches, up to so many: by waiting requests with
``score``, by its prompt with ``cost``. Sessions that all went where their system prompt was cached had one engine evict
blocks while others had room."""
TIE = 0.5
"""Between engines of equal scores a session stays where it is."""
BROUGHT_BACK = 0.5
"""Share of a session's KV that is assumed where it ran last, if the cache there has evicted it: an engine may have kept
it elsewhere, and brings it back for less than it costs to compute."""
STORED = 0.5
"""Share of what one engine has of a prompt that counts on those which can load it from a store that they share."""
RECOMPUTED = 2.0
"""With ``cost``, tokens of a returning session's prompt count so often: computing its past elsewhere takes time, lets
the requests of that engine wait as long, and takes KV blocks that the session has already. Counted once, 3 of 93 turns
of ``bench agents`` left their KV; counted twice, none."""


class Home(NamedTuple):
    """Says where a session's KV lies.

    Attributes:
        row: Of the engine on which its last turn ran, or of one with more room that can load its KV from a store that
            both share; None: it begins, or that engine is gone.
        tokens: Those of the prompt that were part of that turn.
        share: Of that engine's KV cache, which the session needs and which counts there already.
    """

    row: int | None
    tokens: int = 0
    share: float = 0.0


class Ask(NamedTuple):
    """Describes a leg to place.

    Attributes:
        role: PREFILL or DECODE, or BOTH for the whole request.
        prompt_tokens: All tokens of the prompt; at least 1.
        cached_tokens: Tokens of the prompt in each engine's KV cache as far as is known, by row, shape [capacity], and
            :data:`STORED` of those that it can load from a store; None if no engine has any.
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


_Count = TypeVar("_Count", int, IntColumn)


def load_score(waiting: _Count, running: _Count) -> _Count:
    """Return waiting * 4 + running, of one engine or of columns of engines: the load that ``score``, metrics and
    ``tokenloom ps`` show and compare."""
    return waiting * WAITING_WEIGHT + running


def score(engines: EngineColumns, candidates: Candidates, ask: Ask) -> IntColumn | FloatColumn:
    """Return :func:`load_score`, less what a cached prefix saves. ``placement.cpp`` computes the same.

    A prefill that is cached in full saves what a waiting request weighs, and no engine becomes better than an idle one.
    A decode leg saves no prefill, only a copy: its cached prefix decides between equals. A session saves more, the
    longer it is, and stays where it is rather than go to an idle engine.
    """
    index = candidates.index
    scores: IntColumn = load_score(engines.waiting[index], engines.running[index])
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
            reduced[at] = scores[at] - min(weight, MAX_SESSION_WEIGHT) - TIE
        reduced += WAITING_WEIGHT * pressure
    return reduced


def cost(engines: EngineColumns, candidates: Candidates, ask: Ask) -> FloatColumn:
    """Return the seconds that the leg is expected to cost there.

    They are the time to compute the uncached prompt tokens that wait there and those of the leg, at the engine's own
    rate, :data:`.BATCH_STEPS` of the mean steps as far as its batch is full, waiting requests included, and
    :data:`EXCESS_STEPS` for each request above :data:`EXCESS` times the mean. A decode leg computes no prompt. A home
    of the prompt counts as if it had computed :data:`HOME_SHARE` of it. On the engine of a session only requests that
    wait for room count; :func:`_session_tokens` says which tokens of its prompt do.
    """
    index, speeds = candidates.index, candidates.speeds(engines)
    session = ask.session if ask.role != _DECODE else None
    at_home = candidates.positions((session.row,)) if session is not None and session.row is not None else ()
    requests = engines.waiting[index] + engines.running[index]
    for at in at_home:
        requests[at] = _num_without_room(engines, int(candidates.rows[at]), ask)
    seconds: FloatColumn = requests * speeds.seconds_per_request
    limit = EXCESS / len(requests) * float(np.add.reduce(requests))
    if requests[requests.argmax()] > limit:
        excess: FloatColumn = np.maximum(requests, np.array(limit))
        excess -= np.array(limit)
        excess *= np.array(EXCESS_STEPS * speeds.step_seconds)
        seconds += excess
    if ask.role == _DECODE:
        return seconds
    if session is not None:
        tokens = _session_tokens(engines, candidates, ask, session, at_home)
    else:
        tokens = engines.uncached_tokens[index] + np.array(float(ask.prompt_tokens))
        if ask.cached_tokens is not None:
            tokens -= ask.cached_tokens[index]
    for home in candidates.positions(ask.homes) if ask.homes else ():
        tokens[home] -= HOME_SHARE * ask.prompt_tokens
    tokens *= speeds.seconds_per_token
    seconds += tokens
    return seconds


def _num_without_room(engines: EngineColumns, row: int, ask: Ask) -> int:
    """Return how many requests a session's turn finds waiting for a seat or for KV blocks on its engine; 0: it can
    begin at once."""
    # Those that run are no wait: their share of the batch, and that one is more than the mean of one and none, weighed
    # as much as thousands of tokens, for which 16 of 93 turns of ``bench agents`` left their KV.
    running, waiting, seats = engines.running[row], engines.waiting[row], engines.seats[row]
    has_seat = not seats or waiting + running < seats
    # While none runs, those that wait begin at once.
    return 0 if not running or (has_seat and engines.free_tokens[row] > ask.prompt_tokens) else int(waiting)


def _session_tokens(
    engines: EngineColumns, candidates: Candidates, ask: Ask, session: Home, at_home: Sequence[int]
) -> FloatColumn:
    """Return the tokens to compute on each engine until a session's turn is prefilled, shape [n].

    Those of the turn count :data:`RECOMPUTED` times where one of the engines has its KV (``at_home``), of which
    :data:`BROUGHT_BACK` is assumed at least, and elsewhere once more for each KV cache that the sessions of an engine
    need and it has not. Otherwise the whole prompt counts once more for each KV cache that the
    sessions of an engine need, so that sessions are spread.
    """
    index = candidates.index
    own = np.full(len(candidates), float(ask.prompt_tokens))
    if ask.cached_tokens is not None:
        own -= ask.cached_tokens[index]
    if at_home:
        for at in at_home:
            own[at] = min(own[at], ask.prompt_tokens - BROUGHT_BACK * session.tokens)
        own *= np.array(RECOMPUTED)
        # Where the sessions of another engine need more than its KV cache, what is computed there evicts theirs.
        evicted = np.clip(engines.session_share[index] - _FULL, _NONE, np.array(MAX_PRESSURE))
        evicted[list(at_home)] = 0
        own += evicted * np.array(ask.prompt_tokens)
    else:
        own += np.minimum(engines.session_share[index], np.array(MAX_PRESSURE)) * np.array(ask.prompt_tokens)
    own += engines.uncached_tokens[index]
    return own


RULES: dict[str, Rule] = {"score": score, "cost": cost}
"""The rules by the name that an operator gives them."""


class Offers(NamedTuple):
    """What the rule of a plugin sees of a leg and of the engines that may get it, as copies; columns have shape [n].

    Attributes:
        role: ``prefill`` or ``decode``, or ``both`` for the whole request.
        prompt_tokens: All tokens of the prompt; at least 1.
        cached_tokens: Tokens of the prompt in each engine's KV cache, as far as is known; half of those count that it
            can load from a store.
        waiting: Requests that wait there.
        running: Requests in the batch there.
        free_tokens: Tokens that its free KV blocks hold once all waiting prompts are computed; may be negative.
        uncached_tokens: Prompt tokens that are to be computed there.
        seats: Requests that may run there at the same time; 0: not known.
        seconds_per_token: Of a prompt there, as measured, or the mean of the others.
    """

    role: str
    prompt_tokens: int
    cached_tokens: NDArray[np.int64]
    waiting: IntColumn
    running: IntColumn
    free_tokens: IntColumn
    uncached_tokens: FloatColumn
    seats: IntColumn
    seconds_per_token: FloatColumn


PluggedCosts: TypeAlias = Callable[[Offers], "NDArray[np.float64] | Sequence[float]"]
"""What a plugin of the kind ``placement_rules`` is: it returns what the leg costs on each engine; the least is best."""


def plugged_rule(costs: PluggedCosts, on_failure: Callable[[str], None]) -> Rule:
    """Return the rule of a plugin. If it fails, or returns anything but n numbers, :func:`score` decides this pick, and
    ``on_failure`` gets the reason."""

    def rule(engines: EngineColumns, candidates: Candidates, ask: Ask) -> IntColumn | FloatColumn:
        try:
            found = np.asarray(costs(_offers(engines, candidates, ask)), dtype=np.float64)
            if found.shape != (len(candidates),) or np.isnan(found).any():
                raise ValueError(f"it returned {found.tolist()!r:.80} for {len(candidates)} engines, not a number each")
            return found
        except Exception as error:  # a pick must not fail, whatever the code of others does
            on_failure(f"{type(error).__name__}: {error!s:.200}")
            return score(engines, candidates, ask)

    return rule


def _offers(engines: EngineColumns, candidates: Candidates, ask: Ask) -> Offers:
    index, count = candidates.index, len(candidates)
    cached = np.zeros(count, np.int64) if ask.cached_tokens is None else ask.cached_tokens[index]
    return Offers(
        EngineRole.Name(ask.role).removeprefix("ENGINE_ROLE_").lower(),
        ask.prompt_tokens,
        cached.copy(),
        engines.waiting[index].copy(),
        engines.running[index].copy(),
        engines.free_tokens[index].copy(),
        engines.uncached_tokens[index].copy(),
        engines.seats[index].copy(),
        candidates.speeds(engines).seconds_per_token.copy(),
    )
