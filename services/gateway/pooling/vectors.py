"""``/v1/embeddings``, ``/pooling`` and ``/classify``: one result for each input."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from tokenloom.request.errors import InvalidArgument
from tokenloom.request.narrowing import narrow_int
from tokenloom.v1 import types_pb2

from ..encoding.sse import encode_json
from ..generation.running_pooling import RunningPooling
from ..openai.body_reader import Body, BodyReader
from ..openapi.pooling_schemas import ClassifyRequest, EmbeddingRequest, PoolingRequest
from ..records.pooling_input import TASKS, PoolingInput
from ..tenants.tenant import Tenant
from .pooling_api import ListAnswer, Shape, ignored_fields, keeps_first, read_inputs
from .vector_json import numbers, result_blocks

Limits = Callable[[], types_pb2.ModelLimits]
"""Returns the limits of the model. Raises ``Unavailable`` before an engine serves."""

_DEFAULT_TASKS = (
    types_pb2.POOLING_TASK_TOKEN_EMBED,
    types_pb2.POOLING_TASK_TOKEN_CLASSIFY,
    types_pb2.POOLING_TASK_EMBED,
    types_pb2.POOLING_TASK_CLASSIFY,
    types_pb2.POOLING_TASK_SCORE,
)
"""What ``/pooling`` computes: the first of these that the model serves."""


@dataclass(frozen=True, slots=True)
class EmbeddingsApi:
    """Reads bodies of ``/v1/embeddings``."""

    reader: BodyReader

    def read(self, body: Body, tenant: Tenant) -> tuple[PoolingInput, Shape, Sequence[str]]:
        fields = self.reader.read(body, EmbeddingRequest)
        shape = _vectors(fields, ListAnswer("embd"), b"embedding", b"embedding")
        return _vector_input(fields, types_pb2.POOLING_TASK_EMBED, tenant), shape, ignored_fields(body, fields)


@dataclass(frozen=True, slots=True)
class PoolApi:
    """Reads bodies of ``/pooling``."""

    reader: BodyReader
    limits: Limits

    def read(self, body: Body, tenant: Tenant) -> tuple[PoolingInput, Shape, Sequence[str]]:
        fields = self.reader.read(body, PoolingRequest)
        shape = _vectors(fields, ListAnswer("pool"), b"pooling", b"data")
        return _vector_input(fields, self._task(fields.task), tenant), shape, ignored_fields(body, fields)

    def _task(self, name: str | None) -> types_pb2.PoolingTask:
        if name is not None:
            return TASKS[name]
        served = self.limits().pooling_tasks
        return next((task for task in _DEFAULT_TASKS if task in served), types_pb2.POOLING_TASK_TOKEN_EMBED)


@dataclass(frozen=True, slots=True)
class ClassifyApi:
    """Reads bodies of ``/classify``."""

    reader: BodyReader
    limits: Limits

    def read(self, body: Body, tenant: Tenant) -> tuple[PoolingInput, Shape, Sequence[str]]:
        fields = self.reader.read(body, ClassifyRequest)
        params = types_pb2.PoolingParams(task=types_pb2.POOLING_TASK_CLASSIFY, use_activation=fields.use_activation)
        pooling_input = PoolingInput(read_inputs(fields, tenant), params, keep_first=keeps_first(fields))
        return pooling_input, self._shape, ignored_fields(body, fields)

    def _shape(self, pooling: RunningPooling) -> Iterator[bytes]:
        return ListAnswer("classify").blocks(pooling, self._items(pooling))

    def _items(self, pooling: RunningPooling) -> Iterator[bytes]:
        labels = self.limits().class_labels
        for index, result in enumerate(pooling.results):
            probs = numbers(result.data)
            best = probs.index(max(probs))
            label = labels[best] if best < len(labels) else f"LABEL_{best}"
            item = {"index": index, "label": label, "probs": probs, "num_classes": len(probs)}
            yield (b"," if index else b"") + encode_json(item)


def _vector_input(fields: EmbeddingRequest, task: types_pb2.PoolingTask, tenant: Tenant) -> PoolingInput:
    activation = fields.use_activation
    if fields.normalize is not None:
        if activation not in (None, fields.normalize):
            raise InvalidArgument("normalize and use_activation must not differ", "normalize")
        activation = fields.normalize
    dimensions = fields.dimensions
    params = types_pb2.PoolingParams(
        task=task,
        dimensions=None if dimensions is None else narrow_int("dimensions", dimensions, 1, 2**32 - 1),
        use_activation=activation,
    )
    return PoolingInput(
        read_inputs(fields, tenant), params, keep_first=keeps_first(fields), prompt_name=fields.prompt_name or ""
    )


def _vectors(fields: EmbeddingRequest, answer: ListAnswer, object_name: bytes, member: bytes) -> Shape:
    """Return what shapes an answer whose objects hold a result as ``member``."""
    as_base64 = fields.encoding_format == "base64"
    items = partial(_vector_items, as_base64=as_base64, object_name=object_name, member=member)
    return lambda pooling: answer.blocks(pooling, items(pooling))


def _vector_items(pooling: RunningPooling, *, as_base64: bool, object_name: bytes, member: bytes) -> Iterator[bytes]:
    for index, result in enumerate(pooling.results):
        before = b"," if index else b""
        yield b'%b{"object":"%b","index":%d,"%b":' % (before, object_name, index, member)
        yield from result_blocks(result, as_base64=as_base64)
        yield b"}"
