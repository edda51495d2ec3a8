"""Makes requests for vectors, classes and scores, and joins their responses."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tokenloom.v1 import inference_pb2, types_pb2

PoolInput = str | Sequence[int]
"""A text, or token ids of the model's tokenizer."""
Arrays = list[npt.NDArray[np.float32]]


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


def inputs_of(inputs: Iterable[PoolInput]) -> list[inference_pb2.PoolInput]:
    return [
        inference_pb2.PoolInput(text=each)
        if isinstance(each, str)
        else inference_pb2.PoolInput(token_ids=types_pb2.TokenIds(ids=each))
        for each in inputs
    ]


def input_options(truncate_prompt_tokens: int | None = None, priority: int = 0) -> inference_pb2.PoolInputOptions:
    return inference_pb2.PoolInputOptions(truncate_prompt_tokens=truncate_prompt_tokens, priority=priority)


def embed_request(
    inputs: Iterable[PoolInput],
    *,
    model: str | None = None,
    dimensions: int | None = None,
    normalize: bool | None = None,
    **options: Any,
) -> inference_pb2.EmbedRequest:
    return inference_pb2.EmbedRequest(
        model=model or "",
        inputs=inputs_of(inputs),
        dimensions=dimensions,
        normalize=normalize,
        options=input_options(**options),
    )


def classify_request(
    inputs: Iterable[PoolInput], *, model: str | None = None, use_activation: bool | None = None, **options: Any
) -> inference_pb2.ClassifyRequest:
    return inference_pb2.ClassifyRequest(
        model=model or "", inputs=inputs_of(inputs), use_activation=use_activation, options=input_options(**options)
    )


def score_request(
    query: str,
    documents: Iterable[str],
    *,
    model: str | None = None,
    use_activation: bool | None = None,
    **options: Any,
) -> inference_pb2.ScoreRequest:
    return inference_pb2.ScoreRequest(
        model=model or "",
        query=query,
        documents=documents,
        use_activation=use_activation,
        options=input_options(**options),
    )


def pool_request(
    inputs: Iterable[PoolInput],
    task: str,
    *,
    model: str | None = None,
    dimensions: int | None = None,
    use_activation: bool | None = None,
    **options: Any,
) -> inference_pb2.PoolRequest:
    """``task``: its name in vLLM, such as ``token_embed``. Raises ``ValueError`` for one that does not exist."""
    return inference_pb2.PoolRequest(
        model=model or "",
        inputs=inputs_of(inputs),
        task=f"POOLING_TASK_{task.upper()}",
        dimensions=dimensions,
        use_activation=use_activation,
        options=input_options(**options),
    )


def read_pooled(responses: Iterable[inference_pb2.PoolResponse]) -> Pooled:
    """Return the results of a call, from all its responses."""
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
