"""Computes what the rule ``cost`` expects of every engine, for those that watch. No I/O; picks never need it."""

import numpy as np

from tokenloom.services.runtime.placement.engine_columns import EngineColumns, FloatColumn, Rows
from tokenloom.services.runtime.placement.fingerprint_kinds import FingerprintKinds
from tokenloom.services.runtime.placement.pool import make_pool
from tokenloom.services.runtime.placement.rules import Ask, cost
from tokenloom.v1.types_pb2 import EngineRole

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
