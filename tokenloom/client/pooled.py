"""Makes requests for vectors, classes and scores, and joins their responses."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from google.protobuf.message import Message

from tokenloom.request.errors import InvalidArgument
from tokenloom.request.narrowing import narrow_token_ids
from tokenloom.v1 import inference_pb2

from .client_request import set_field

if TYPE_CHECKING:  # only results need numpy, which a client that generates text is installed without
    import numpy as np
    import numpy.typing as npt

R = TypeVar("R", bound=Message)
PoolInput = str | Sequence[int]
"""A text, or token ids of the model's tokenizer."""
Arrays: TypeAlias = "list[npt.NDArray[np.float32]]"
_OF_EVERY_CALL = frozenset({"truncate_prompt_tokens", "priority"})
_ARGUMENTS = frozenset({"inputs", "query", "documents", "task", "options"})


@dataclass(frozen=True)
class Pooled:
    """Holds the results of one call.

    Attributes:
        arrays: By input: [] a score, [n] a vector or classes, [tokens, n] a row for each token; float32.
        prompt_tokens, cached_tokens: Of all inputs.
    """

    arrays: Arrays
    prompt_tokens: int
    cached_tokens: int


def embed_request(inputs: Iterable[PoolInput], **options: Any) -> inference_pb2.EmbedRequest:
    """``options``: ``model``, ``dimensions``, ``normalize`` and those of every call. Raises ``InvalidArgument``."""
    return _filled(inference_pb2.EmbedRequest(inputs=_inputs(inputs)), options)


def classify_request(inputs: Iterable[PoolInput], **options: Any) -> inference_pb2.ClassifyRequest:
    """``options``: ``model``, ``use_activation`` and those of every call. Raises ``InvalidArgument``."""
    return _filled(inference_pb2.ClassifyRequest(inputs=_inputs(inputs)), options)


def score_request(query: str, documents: Iterable[str], **options: Any) -> inference_pb2.ScoreRequest:
    """``options``: as of :func:`classify_request`. Raises ``InvalidArgument``."""
    request = inference_pb2.ScoreRequest()
    set_field(request, "query", query)
    set_field(request, "documents", list(documents) if _is_list(documents) else documents)
    return _filled(request, options)


def pool_request(inputs: Iterable[PoolInput], task: str, **options: Any) -> inference_pb2.PoolRequest:
    """``task``: its name in vLLM, such as ``token_embed``; ``options``: ``model``, ``dimensions``, ``use_activation``
    and those of every call. Raises ``InvalidArgument``."""
    request = inference_pb2.PoolRequest(inputs=_inputs(inputs))
    set_field(request, "task", f"POOLING_TASK_{task}".upper())
    return _filled(request, options)


def _inputs(inputs: Iterable[PoolInput]) -> list[inference_pb2.PoolInput]:
    if not _is_list(inputs):
        raise InvalidArgument("inputs must be a list of texts or lists of token ids", "inputs")
    found = []
    for index, each in enumerate(inputs):
        found.append(inference_pb2.PoolInput())
        if isinstance(each, str):
            set_field(found[-1], "text", each, f"inputs[{index}]")
        else:
            found[-1].token_ids.ids.extend(narrow_token_ids(f"inputs[{index}]", each))
    return found


def _is_list(value: object) -> bool:
    return isinstance(value, Iterable) and not isinstance(value, str | bytes)


def _filled(request: R, options: Mapping[str, Any]) -> R:
    """Set the options that the caller has given. Raises ``TypeError`` for a name that is none, as Python does."""
    for name, value in options.items():
        message: Message = request.options if name in _OF_EVERY_CALL else request  # type: ignore[attr-defined]
        if name not in message.DESCRIPTOR.fields_by_name or name in _ARGUMENTS:
            raise TypeError(f"{name!r} is not an option of this call")
        if value is not None:
            set_field(message, name, value)
    return request


def read_pooled(responses: Iterable[inference_pb2.PoolResponse]) -> Pooled:
    """Return the results of a call, from all its responses. Raises ``ImportError`` without numpy."""
    import numpy as np

    parts: list[bytearray] = []
    shapes: list[Sequence[int]] = []
    usage = inference_pb2.Usage()
    for response in responses:
        usage.MergeFrom(response.usage)
        for output in response.outputs:
            if not output.offset:
                parts.append(bytearray())
                shapes.append(list(output.shape))
            parts[-1] += output.data
    arrays: Arrays = [np.frombuffer(data, "<f4").reshape(shape) for data, shape in zip(parts, shapes, strict=True)]
    return Pooled(arrays, usage.prompt_tokens, usage.cached_tokens)
