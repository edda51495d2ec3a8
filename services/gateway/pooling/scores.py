"""``/score`` and ``/rerank``: the relevance of documents to queries."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tokenloom.request.errors import InvalidArgument

from ..encoding.sse import encode_json
from ..generation.running_pooling import RunningPooling
from ..openai.body_reader import Body, BodyReader
from ..openapi.pooling_schemas import PoolingFields, RerankRequest, ScoreRequest
from ..records.pooling_input import PoolingInput
from ..tenants.tenant import Tenant
from .pooling_api import ListAnswer, Shape, ignored_fields, keeps_first, make_job, usage_object
from .scoring import Scoring, plan_scoring
from .vectors import Limits


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
        return scoring.job, lambda pooling: answer.blocks(pooling, items(pooling)), ignored_fields(body, fields)


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

        return scoring.job, shape, ignored_fields(body, fields)

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
        yield b'],"usage":%b}' % encode_json(usage_object(pooling))


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
        make_job(fields, (), documents[0], tenant),
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
