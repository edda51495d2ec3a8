"""Chooses the engine that takes a leg of a request. No I/O, and no state but the columns. Computes what the rule
``cost`` expects of every engine for those that watch; picks never need it."""

from dataclasses import dataclass

import numpy as np

from tokenloom.request.errors import InvalidArgument, ResourceExhausted, Unavailable
from tokenloom.services.runtime.placement import pairing, prefix_homes
from tokenloom.services.runtime.placement.engine_columns import EngineColumns, FloatColumn, IntColumn, Rows
from tokenloom.services.runtime.placement.fingerprint_kinds import FingerprintKinds
from tokenloom.services.runtime.placement.pool import Pool, make_pool
from tokenloom.services.runtime.placement.rules import STORED, Ask, Home, Rule, cost
from tokenloom.v1.coordinator_pb2 import PickRequest
from tokenloom.v1.types_pb2 import EngineRole

_DECODE = EngineRole.ENGINE_ROLE_DECODE
_NO_LEG = (EngineRole.ENGINE_ROLE_UNSPECIFIED, EngineRole.ENGINE_ROLE_ENCODE)


@dataclass(frozen=True, slots=True)
class Policy:
    """Holds what an operator decides.

    Attributes:
        pd_threshold: Uncached prompt tokens below which an engine that decodes does the whole request; 0: none does.
        rule: What a leg costs on an engine.
        has_sessions: Whether the turns of sessions are recognised.
        mixes_numerics: Whether requests go on between engines of ours and servers of others.
    """

    pd_threshold: int
    rule: Rule
    has_sessions: bool = True
    mixes_numerics: bool = False


def check_request(request: PickRequest) -> None:
    """Raise ``InvalidArgument`` for a request that no engine could take."""
    if request.role in _NO_LEG:
        raise InvalidArgument("role must be BOTH, PREFILL or DECODE", "role")
    if request.prompt_tokens == 0:
        raise InvalidArgument("prompt_tokens must be at least 1", "prompt_tokens")


class Placement:
    """Places legs on the engines of ``columns`` by one policy.

    Attributes:
        best: Compares engines.
    """

    def __init__(self, columns: EngineColumns, kinds: FingerprintKinds, policy: Policy) -> None:
        self._columns = columns
        self._kinds = kinds
        self.policy = policy
        self.best: pairing.Best = pairing.best

    def choose(
        self,
        pool: Pool,
        request: PickRequest,
        excluded: list[int],
        cached_tokens: IntColumn | None,
        home: Home | None = None,
    ) -> tuple[int, bool]:
        """Return the row of the engine for ``request``, and whether it does all of it.

        The columns are compared by :func:`tokenloom.services.runtime.placement.pairing.choose`.

        Args:
            pool: The engines that serve what the request asks for.
            excluded: Rows of engines that just failed this request.
            cached_tokens: See :class:`.Ask`.
            home: Where the KV of the request's session lies; None: it has no session.

        Raises ``Unavailable`` when no engine of the pool is left, ``ResourceExhausted`` when the KV cache of none of
        them can hold the prompt.
        """
        if excluded:
            pool = self._among(pool.rows[~np.isin(pool.rows, excluded)])
        if not len(pool.rows):
            raise Unavailable("No engine is serving this model now; retry.")
        if request.query_id:
            row = pairing.engine_of_query(self._columns, pool.rows, request.query_id)
            pool = self._among(np.array([row], np.intp))
        num_places = request.prompt_tokens + (not request.pools)  # the first token needs a place too
        if num_places > pool.min_max_tokens:
            pool = self._among(pool.rows[self._columns.max_tokens[pool.rows] >= num_places])
            if not len(pool.rows):
                raise ResourceExhausted(f"No engine's KV cache can hold a prompt of {request.prompt_tokens} tokens.")
        # A request that pools has no use for an engine that decodes, however short it is.
        threshold = 0 if request.pools else self.policy.pd_threshold
        asks_homes = self.policy.rule is cost and request.role != _DECODE
        homes = prefix_homes.homes_of(self._columns, pool, request.block_hash_prefixes) if asks_homes else ()
        ask = Ask(request.role, request.prompt_tokens, cached_tokens, homes, home)
        return pairing.choose(self._columns, pool, ask, self.policy.rule, threshold, self.best)

    def choose_near(
        self,
        near: Pool,
        pool: Pool,
        request: PickRequest,
        excluded: list[int],
        cached_tokens: IntColumn | None,
        home: Home | None = None,
    ) -> tuple[int, bool]:
        """Return what :meth:`choose` returns for ``near``, the engines that the output processor works with, unless
        none of them can take the request, or only another one of ``pool`` has room for it at once. Raises what
        :meth:`choose` raises for ``pool``."""
        try:
            chosen = self.choose(near, request, excluded, cached_tokens, home)
        except (ResourceExhausted, Unavailable):
            return self.choose(pool, request, excluded, cached_tokens, home)
        if self._has_room(chosen[0], request):
            return chosen
        other = self.choose(pool, request, excluded, cached_tokens, home)
        return other if self._has_room(other[0], request) else chosen

    def reach(
        self, pool: Pool, request: PickRequest, excluded: list[int], cached_tokens: IntColumn | None, home: Home | None
    ) -> tuple[IntColumn | None, Home | None]:
        """Return the cached tokens and the home as stores make them, from which engines load what others computed.

        What one engine of a store has counts :data:`.STORED` on the others. A session's turn for which its engine has
        no room begins where there is some, or a queue that is shorter by more than the turn itself.
        """
        at = None if home is None or request.role == _DECODE else home.row
        if home is not None and at is not None and self._columns.store[at]:
            cached_tokens = self._with_stored(cached_tokens, home)
            return cached_tokens, self._with_room(pool, request, excluded, home, at)
        return cached_tokens if cached_tokens is None else self._with_stored(cached_tokens, None), home

    def _with_stored(self, cached_tokens: IntColumn | None, home: Home | None) -> IntColumn:
        store = self._columns.store
        cached = np.zeros(len(store), np.int64) if cached_tokens is None else cached_tokens
        most: IntColumn = np.zeros(int(store[store.argmax()]) + 1, np.int64)
        np.maximum.at(most, store, cached)
        if home is not None and home.row is not None:  # its cache may have evicted what the store has
            number = store[home.row]
            most[number] = max(most[number], home.tokens)
        most[0] = 0
        stored: IntColumn = (STORED * most).astype(np.int64)[store]
        return np.maximum(cached, stored, out=stored)

    def _with_room(self, pool: Pool, request: PickRequest, excluded: list[int], home: Home, at: int) -> Home:
        columns, rows, tokens = self._columns, pool.rows, request.prompt_tokens
        here = int(columns.free_tokens[at])
        is_able = columns.is_serving[at] and not columns.is_late[at] and at not in excluded
        if is_able and here > tokens:
            return home
        able = (columns.store[rows] == columns.store[at]) & (columns.role[rows] == columns.role[at])
        rows = rows[able & ~columns.is_late[rows] & ~np.isin(rows, excluded)]
        if not len(rows):
            return home
        best = int(rows[columns.free_tokens[rows].argmax()])
        there = int(columns.free_tokens[best])
        # Loading takes time and blocks. It is worth that only if the turn begins earlier by what another one needs.
        return Home(best, home.tokens) if there > tokens or there - here > tokens or not is_able else home

    def _has_room(self, row: int, request: PickRequest) -> bool:
        columns = self._columns
        return bool(columns.free_tokens[row] > request.prompt_tokens and not columns.is_late[row])

    def _among(self, rows: Rows) -> Pool:
        return make_pool(self._columns, self._kinds, rows)


_OTHERS_TOKENS = Ask(EngineRole.ENGINE_ROLE_PREFILL, 0)
"""A leg without a prompt: what it costs is due to the requests that are there already."""


class EngineCosts:
    """Holds columns by row, shape [capacity]; 0 for an engine that does not serve.

    Attributes:
        seconds: Expected of a request, without those of its own prompt.
        rates: Prompt tokens per second, as the rule assumes them.
    """

    def __init__(self, columns: EngineColumns, kinds: FingerprintKinds) -> None:
        self._columns, self._kinds = columns, kinds
        self._revision = -1
        self.seconds: FloatColumn = np.zeros(0)
        self.rates: FloatColumn = np.zeros(0)

    def look(self, revision: int) -> None:
        """Compute the columns, unless they are those of this revision of the registry already: a snapshot of a thousand
        engines asks a thousand times."""
        if revision == self._revision:
            return
        self._revision = revision
        self.seconds, self.rates = np.zeros(self._columns.capacity), np.zeros(self._columns.capacity)
        for is_of_pool in self._kinds.pools():
            self._look_at(self._columns.serving(is_of_pool))

    def _look_at(self, rows: Rows) -> None:
        """Compare the engines of a pool as picks do: among those of equal use, because the rule has means in it. One
        that prefills and decodes is shown as for the beginning of a request."""
        pool = make_pool(self._columns, self._kinds, rows)
        for candidates in (pool.engines, pool.decoders, pool.prefillers):
            if len(candidates):
                self.seconds[candidates.rows] = cost(self._columns, candidates, _OTHERS_TOKENS)
                self.rates[candidates.rows] = 1.0 / candidates.speeds(self._columns).seconds_per_token
