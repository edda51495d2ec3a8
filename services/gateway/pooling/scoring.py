"""Scores documents for queries, in the way that suits the model."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from operator import mul

from tokenloom.request.errors import InvalidArgument
from tokenloom.v1 import types_pb2

from ..generation.running_pooling import RunningPooling
from ..records.generate_request import GenerateRequest
from ..records.pooling_input import PoolingInput, check_count
from .vector_json import numbers


@dataclass(frozen=True, slots=True)
class Scoring:
    """A call that scores.

    Attributes:
        job: What to compute.
        scores: Yields the score of each document, in order, from what was computed.
    """

    job: PoolingInput
    scores: Callable[[RunningPooling], Iterator[float]]


def plan_scoring(
    queries: Sequence[str],
    documents: Sequence[str],
    common: GenerateRequest,
    limits: types_pb2.ModelLimits,
    *,
    fields: tuple[str, str],
    use_activation: bool | None = None,
    keep_first: bool = False,
) -> Scoring:
    """Return how to score each document for its query, or for the only query.

    A model that serves ``score`` reads query and document at once. Otherwise the score is the cosine of their vectors
    or, if the model has only vectors of tokens, their late interaction at the engine.

    Args:
        common: What the body says about prompts.
        fields: The client's names for queries and documents.

    Raises ``InvalidArgument`` for numbers of texts that do not fit.
    """
    check_count(len(queries), fields[0])
    check_count(len(documents), fields[1])
    if len(queries) not in (1, len(documents)):
        message = f"{fields[0]} must hold one text, or as many as {fields[1]}: {len(documents)}, not {len(queries)}"
        raise InvalidArgument(message, fields[0])
    tasks = limits.pooling_tasks
    has_vectors = types_pb2.POOLING_TASK_EMBED in tasks or types_pb2.POOLING_TASK_TOKEN_EMBED in tasks
    if types_pb2.POOLING_TASK_SCORE in tasks or not has_vectors:
        params = types_pb2.PoolingParams(task=types_pb2.POOLING_TASK_SCORE, use_activation=use_activation)
        firsts = queries if len(queries) == len(documents) else list(queries) * len(documents)
        job = PoolingInput(replace(common, prompts=firsts, prompt_field=fields[1]), params, documents, keep_first)
        return Scoring(job, _single_numbers)
    both = replace(common, prompts=[*queries, *documents], prompt_field=fields[1])
    if types_pb2.POOLING_TASK_EMBED in tasks:
        params = types_pb2.PoolingParams(task=types_pb2.POOLING_TASK_EMBED, use_activation=True)
        num_queries = len(queries)
        return Scoring(
            PoolingInput(both, params, keep_first=keep_first), lambda pooling: _cosines(pooling, num_queries)
        )
    params = types_pb2.PoolingParams(task=types_pb2.POOLING_TASK_TOKEN_EMBED)
    job = PoolingInput(both, params, keep_first=keep_first, num_queries=len(queries))
    return Scoring(job, _single_numbers)


def _single_numbers(pooling: RunningPooling) -> Iterator[float]:
    for result in pooling.results:
        yield numbers(result.data)[0]


def _cosines(pooling: RunningPooling, num_queries: int) -> Iterator[float]:
    """Yield the cosines of vectors that have length 1."""
    results = pooling.results
    queries = [numbers(result.data) for result in results[:num_queries]]
    for index, result in enumerate(results[num_queries:]):
        query = queries[index if num_queries > 1 else 0]
        yield sum(map(mul, query, numbers(result.data)))
