"""``/score`` and ``/rerank``: the relevance of documents to queries."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from operator import mul
from typing import Any

from tokenloom.request.errors import InvalidArgument
from tokenloom.v1 import types_pb2

from ..encoding.sse import encode_json
from ..generation.running_pooling import RunningPooling
from ..openai.body_reader import Body, BodyReader
from ..openapi.pooling_schemas import PoolingFields, RerankRequest, ScoreRequest
from ..records.generate_request import GenerateRequest
from ..records.pooling_input import PoolingInput, check_count
from ..tenants.tenant import Tenant
from .pooling_api import ListAnswer, Shape, ignored_fields, keeps_first, make_generate_request, tail
from .vector_json import numbers
from .vectors import Limits


@dataclass(frozen=True, slots=True)
class Scoring:
    """A call that scores.

    Attributes:
        pooling_input: What to compute.
        scores: Yields the score of each document, in order, from what was computed.
    """

    pooling_input: PoolingInput
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
        pooling_input = PoolingInput(
            replace(common, prompts=firsts, prompt_field=fields[1]), params, documents, keep_first
        )
        return Scoring(pooling_input, _single_numbers)
    both = replace(common, prompts=[*queries, *documents], prompt_field=fields[1])
    if types_pb2.POOLING_TASK_EMBED in tasks:
        params = types_pb2.PoolingParams(task=types_pb2.POOLING_TASK_EMBED, use_activation=True)
        num_queries = len(queries)
        return Scoring(
            PoolingInput(both, params, keep_first=keep_first), lambda pooling: _cosines(pooling, num_queries)
        )
    params = types_pb2.PoolingParams(task=types_pb2.POOLING_TASK_TOKEN_EMBED)
    pooling_input = PoolingInput(both, params, keep_first=keep_first, num_queries=len(queries))
    return Scoring(pooling_input, _single_numbers)


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


@dataclass(frozen=True, slots=True)
class ScoreApi:
    """Reads bodies of ``/score``."""

    reader: BodyReader
    limits: Limits

    def read(self, body: Body, tenant: Tenant) -> tuple[PoolingInput, Shape, Sequence[str]]:
        fields = self.reader.read(body, ScoreRequest)
        first, second = _texts(fields, "text_1", "queries"), _texts(fields, "text_2", "documents")
        scoring = _plan(fields, first, second, self.limits, tenant)

        def items(pooling: RunningPooling) -> Iterator[bytes]:
            for index, score in enumerate(scoring.scores(pooling)):
                item = encode_json({"object": "score", "index": index, "score": score})
                yield b"," + item if index else item

        answer = ListAnswer("score")
        return (
            scoring.pooling_input,
            lambda pooling: answer.blocks(pooling, items(pooling)),
            ignored_fields(body, fields),
        )


@dataclass(frozen=True, slots=True)
class RerankApi:
    """Reads bodies of ``/rerank``, in the form of Jina's and Cohere's APIs."""

    reader: BodyReader
    limits: Limits

    def read(self, body: Body, tenant: Tenant) -> tuple[PoolingInput, Shape, Sequence[str]]:
        fields = self.reader.read(body, RerankRequest)
        documents = [_text(document, index) for index, document in enumerate(fields.documents)]
        scoring = _plan(fields, ("query", [fields.query]), ("documents", documents), self.limits, tenant)

        def shape(pooling: RunningPooling) -> Iterator[bytes]:
            scores: list[float] = []
            for score in scoring.scores(pooling):
                scores.append(score)
                yield b""  # the event loop may run between two scores
            yield from self._blocks(pooling, scores, fields, documents)

        return scoring.pooling_input, shape, ignored_fields(body, fields)

    def _blocks(
        self, pooling: RunningPooling, scores: list[float], fields: RerankRequest, documents: Sequence[str]
    ) -> Iterator[bytes]:
        order = sorted(range(len(scores)), key=scores.__getitem__, reverse=True)[: fields.top_n or len(scores)]
        head = {"id": f"rerank-{pooling.request_id}", "model": pooling.model, "created": int(time.time())}
        yield encode_json(head)[:-1] + b',"results":['
        for number, index in enumerate(order):
            result: dict[str, Any] = {"index": index, "relevance_score": scores[index]}
            if fields.return_documents is not False:
                result["document"] = {"text": documents[index]}
            yield (b"," if number else b"") + encode_json(result)
        yield tail(pooling)


def _plan(
    fields: PoolingFields,
    queries: tuple[str, Sequence[str]],
    documents: tuple[str, Sequence[str]],
    limits: Limits,
    tenant: Tenant,
) -> Scoring:
    """Return how to score; ``queries`` and ``documents`` come with the names of their fields."""
    return plan_scoring(
        queries[1],
        documents[1],
        make_generate_request(fields, (), documents[0], tenant),
        limits(),
        fields=(queries[0], documents[0]),
        use_activation=fields.use_activation,
        keep_first=keeps_first(fields),
    )


def _texts(fields: ScoreRequest, *names: str) -> tuple[str, Sequence[str]]:
    """Return the texts of the only one of these fields that is set, with its name."""
    given = [(name, value) for name in names if (value := getattr(fields, name)) is not None]
    if len(given) != 1:
        raise InvalidArgument(f"exactly one of {' and '.join(names)} must be set", names[0])
    name, value = given[0]
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise InvalidArgument(f"{name} must be a string or a list of strings", name)
    return name, texts


def _text(document: str | dict[str, Any], index: int) -> str:
    text = document if isinstance(document, str) else document.get("text")
    if not isinstance(text, str):
        raise InvalidArgument(f'documents[{index}] must be a string or an object {{"text": …}}', "documents")
    return text
