"""Applies the scheduler's rules for requests that are pooled instead of generating tokens, and scores documents against
the token vectors of queries, by late interaction."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..data.core_params import LateInteraction, ModelPooling, PoolingTask
from ..data.messages import EngineCoreOutput, ErrorKind
from ..data.request import Request

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


NO_GENERATION = "this model generates no tokens; it serves the pooling tasks {}"


class PooledRequests:
    """Checks pooling requests against what the model pools, and makes their outputs."""

    def __init__(self, model: ModelPooling, max_model_len: int, clock: Callable[[], int]) -> None:
        """``clock`` returns nanoseconds."""
        self.generates = model.generates
        self._model = model
        self._max_model_len = max_model_len
        self._queries = QueryVectors(clock)

    def refusal(self, request: Request) -> str:
        """Return why a request cannot be pooled; empty if it can. A task that reads hidden states of all tokens makes
        the request skip the prefix cache."""
        params = request.pooling_params
        if params is None:
            return "" if self.generates else NO_GENERATION.format(task_names(self._model.tasks))
        if params.task not in self._model.tasks:
            return f"task {params.task.name.lower()} is not among the model's: {task_names(self._model.tasks)}"
        if params.late_interaction is not None and params.task is not PoolingTask.TOKEN_EMBED:
            return "late_interaction is only possible with the task token_embed"
        if params.dimensions is not None and (error := self._wrong_dimensions(params.dimensions)):
            return error
        if request.num_prompt_tokens > self._max_model_len:
            return f"prompt has {request.num_prompt_tokens} tokens; the context holds {self._max_model_len}"
        # A cached block holds KV and no hidden states, and such a task returns or sums the states of all tokens.
        request.kv.skip_reading_prefix_cache = params.task in self._model.whole_prompt
        return ""

    def _wrong_dimensions(self, dimensions: int) -> str:
        """Return why vectors cannot be shortened to this length; empty if they can."""
        allowed = self._model.dimensions
        if allowed and dimensions not in allowed:
            return f"dimensions is {dimensions}; this model's vectors can have {', '.join(map(str, allowed))}"
        if dimensions > self._model.vector_size:
            return f"dimensions is {dimensions}; this model's vectors have {self._model.vector_size}"
        return ""

    def output(self, request: Request, pooled: Floats) -> EngineCoreOutput:
        """Return the output of a request whose prompt is computed; it has an error if its query is not held."""
        output = EngineCoreOutput(request.request_id, [], pooled=pooled)
        assert request.pooling_params is not None
        if (part := request.pooling_params.late_interaction) is not None:
            self._queries.answer(output, part)
        return output


def task_names(tasks: tuple[PoolingTask, ...]) -> str:
    """Return the names of pooling tasks for messages."""
    return ", ".join(task.name.lower() for task in tasks) or "none"
