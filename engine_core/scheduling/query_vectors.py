"""Keeps the token vectors of queries and scores documents against them, by late interaction."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..data.core_pooling_params import LateInteraction
from ..data.messages import EngineCoreOutput, ErrorKind

Floats = npt.NDArray[np.float32]
_SECONDS = 60.0
"""How long a query is kept without a document; its caller may have gone."""


@dataclass(slots=True)
class _Query:
    vectors: Floats
    num_documents: int
    used_ns: int


class QueryVectors:
    """Holds a bounded number of queries, each until its last document was scored or it was not used for a minute."""

    def __init__(self, clock: Callable[[], int], max_queries: int = 256, max_bytes: int = 64 << 20) -> None:
        """``clock`` returns nanoseconds."""
        self._clock = clock
        self._max_queries = max_queries
        self._max_bytes = max_bytes
        self._queries: dict[str, _Query] = {}  # the one that was not used for the longest time comes first
        self.nbytes = 0
        """Size of all vectors."""

    def __len__(self) -> int:
        """Return the number of queries."""
        return len(self._queries)

    def answer(self, output: EngineCoreOutput, part: LateInteraction) -> None:
        """Replace the token vectors in ``output`` by nothing, for a query, which is kept, or by a document's score.
        Sets the error of a query that does not fit, and of a document whose query is not here."""
        vectors, output.pooled = output.pooled, None
        assert vectors is not None
        if part.num_documents:
            # Refused, never evicting another query: two callers that each need more than is left would evict each other
            # for ever.
            output.error = self._keep(part, vectors)
            output.error_kind = ErrorKind.ENGINE_FULL
            output.pooled = np.empty(0, dtype=np.float32)
        elif (query := self._use(part.query_id)) is not None:
            if query.vectors.shape[1] == vectors.shape[1]:
                output.pooled = np.asarray((query.vectors @ vectors.T).max(axis=1).sum(), dtype=np.float32)
            else:
                output.error = "dimensions: those of a document must equal those of its query"
                output.error_field = "dimensions"
        else:
            output.error = "the engine does not hold the query of this document any more; send the query again"
            output.error_kind = ErrorKind.QUERY_LOST

    def _keep(self, part: LateInteraction, vectors: Floats) -> str:
        """Keep a query. Returns why it does not fit; empty if it does."""
        self._drop(part.query_id)
        now = self._clock()
        while self._queries and (oldest := next(iter(self._queries.items())))[1].used_ns <= now - _SECONDS * 1e9:
            self._drop(oldest[0])
        if len(self._queries) >= self._max_queries or self.nbytes + vectors.nbytes > self._max_bytes:
            return (
                f"the engine holds {len(self._queries)} queries with {self.nbytes} bytes of token vectors, at most "
                f"{self._max_queries} queries and {self._max_bytes} bytes; retry later"
            )
        # Copied: the array may be a part of the step's hidden states.
        self._queries[part.query_id] = _Query(vectors.copy(), part.num_documents, now)
        self.nbytes += vectors.nbytes
        return ""

    def _use(self, query_id: str) -> _Query | None:
        """Return a query for one of its documents, and forget it with the last one."""
        if (query := self._queries.pop(query_id, None)) is None:
            return None
        query.num_documents -= 1
        query.used_ns = self._clock()
        if query.num_documents:
            self._queries[query_id] = query
        else:
            self.nbytes -= query.vectors.nbytes
        return query

    def _drop(self, query_id: str) -> None:
        if (query := self._queries.pop(query_id, None)) is not None:
            self.nbytes -= query.vectors.nbytes
