"""``/api/embed`` and the older ``/api/embeddings`` of Ollama's API."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tokenloom.request.narrowing import narrow_int
from tokenloom.v1 import types_pb2

from ..encoding.sse import encode_json
from ..generation.running_pooling import RunningPooling
from ..openai.body_reader import Body, BodyReader
from ..openapi.ollama_schemas import OllamaEmbedRequest
from ..openapi.pooling_schemas import PoolingFields
from ..pooling.pooling_api import Shape, ignored_fields, make_generate_request, split_inputs
from ..pooling.vector_json import result_blocks
from ..records.pooling_input import PoolingInput, check_count
from ..tenants.tenant import Tenant


@dataclass(frozen=True, slots=True)
class OllamaEmbedApi:
    """Reads bodies of one of the two endpoints. ``is_older``: that of a single prompt."""

    reader: BodyReader
    is_older: bool

    def read(self, body: Body, tenant: Tenant) -> tuple[PoolingInput, Shape, Sequence[str]]:
        """Return what the body asks for, what shapes the answer, and the fields that have no effect. Raises
        :class:`errors.InvalidArgument` naming the field."""
        began = time.monotonic_ns()
        fields = self.reader.read(body, OllamaEmbedRequest)
        field = "prompt" if self.is_older else "input"
        inputs = split_inputs(getattr(fields, field), field)
        check_count(len(inputs), field)
        cut = PoolingFields(truncate_prompt_tokens=None if fields.truncate is False else -1)
        params = types_pb2.PoolingParams(
            task=types_pb2.POOLING_TASK_EMBED,
            dimensions=None if not fields.dimensions else narrow_int("dimensions", fields.dimensions, 1, 2**32 - 1),
        )
        pooling_input = PoolingInput(make_generate_request(cut, inputs, field, tenant), params, keep_first=True)
        shape = _single if self.is_older else lambda pooling: _all(pooling, began)
        return pooling_input, shape, ignored_fields(body, fields)


def _single(pooling: RunningPooling) -> Iterator[bytes]:
    yield b'{"embedding":'
    yield from result_blocks(pooling.results[0], as_base64=False)
    yield b"}"


def _all(pooling: RunningPooling, began_ns: int) -> Iterator[bytes]:
    yield encode_json({"model": pooling.model})[:-1] + b',"embeddings":['
    for index, result in enumerate(pooling.results):
        yield b"," if index else b""
        yield from result_blocks(result, as_base64=False)
    counts = {"prompt_eval_count": pooling.usage.prompt_tokens, "total_duration": time.monotonic_ns() - began_ns}
    yield b"]," + encode_json(counts | {"load_duration": 0})[1:]
