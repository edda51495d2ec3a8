"""Lists the fields of all bodies whose values are read; the others are skipped while a body is decoded."""

import msgspec

from ..openai.body_reader import NOT_SUPPORTED_YET, RENAMED, SAMPLING_FIELDS
from ..openapi.ollama_schemas import OllamaEmbedRequest, OllamaRequest
from ..openapi.pooling_schemas import ClassifyRequest, EmbeddingRequest, PoolingRequest, RerankRequest, ScoreRequest
from ..openapi.request_schemas import (
    ChatCompletionRequest,
    CompletionRequest,
    CountTokensRequest,
    DetokenizeRequest,
    MessagesRequest,
    ResponsesRequest,
    TokenizeRequest,
)

_BODIES: tuple[type[msgspec.Struct], ...] = (
    ChatCompletionRequest,
    CompletionRequest,
    TokenizeRequest,
    DetokenizeRequest,
    MessagesRequest,
    CountTokensRequest,
    ResponsesRequest,
    OllamaRequest,
    OllamaEmbedRequest,
    EmbeddingRequest,
    PoolingRequest,
    ClassifyRequest,
    ScoreRequest,
    RerankRequest,
)
READ_FIELDS = frozenset(
    {
        *(name for model in _BODIES for name in model.__struct_fields__),
        *SAMPLING_FIELDS,
        *NOT_SUPPORTED_YET,
        *RENAMED,
    }
)
"""The fields whose values some endpoint reads."""
