"""Lists the operations of the HTTP API."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from tokenloom.request.sampling_params import SamplingFields

from ..request_log.finished_request import LastRequests
from . import batch_schemas as batches
from . import lora_schemas as lora
from . import pooling_schemas as pooling
from . import request_schemas as bodies
from . import response_schemas as answers
from .message_schemas import CountTokensRequest, MessageErrorResponse, MessagesRequest
from .response_api_schemas import ResponsesRequest


@dataclass(frozen=True)
class Operation:
    """One method of one path."""

    method: str
    path: str
    summary: str
    answer: type[msgspec.Struct] | None = None
    """None: plain text."""
    body: type[msgspec.Struct] | None = None
    is_form: bool = False
    """Whether the body is a form instead of JSON."""
    media_type: str = "text/plain"
    """Of an answer that is not JSON."""
    streams: bool = False
    """Whether it may answer with server-sent events."""
    may_be_away: bool = False
    """Whether a 503 response has the same body."""
    is_open: bool = False
    """Whether it needs no key."""
    path_parameter: str = ""
    query: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Query parameters and their schemas."""
    headers: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Request headers and their schemas."""
    error: type[msgspec.Struct] = answers.ErrorResponse
    """The form of its errors."""
    is_admin: bool = False
    """Whether it needs an admin key; gateways without one do not have the route."""


_CHAT = bodies.with_sampling(bodies.ChatCompletionRequest)
_COMPLETION = bodies.with_sampling(bodies.CompletionRequest)
_MESSAGES = bodies.with_sampling(MessagesRequest, SamplingFields, without=("logprobs", "prompt_logprobs"))
_RESPONSES = bodies.with_sampling(
    ResponsesRequest, SamplingFields, without=("logprobs", "prompt_logprobs", "max_tokens")
)
_ASKING = {
    "Idempotency-Key": {
        "type": "string",
        "pattern": "^[ -~]{1,255}$",
        "description": "Names the request. A repeat with the same key and body gets the answer of the first one, which "
        "it takes over if it still runs; with another body, 422.",
    },
    "Last-Event-ID": {
        "type": "string",
        "pattern": "^(|0|[0-9a-f]{40}[.][0-9a-f]{1,9}[.][-_0-9ef]{1,900}([.]u)?)$",
        "description": "For streams. Empty: none. 0: write an id into each event. The id of the last event that "
        "arrived, with the same body: continue the answer after that event. 404 REQUEST_LOST: send the request again "
        "without it.",
    },
}
OPERATIONS = (
    Operation("get", "/v1/models", "The served model", answers.ModelList),
    Operation("get", "/v1/models/{model}", "One model", answers.ModelCard, path_parameter="model"),
    Operation(
        "post",
        "/v1/chat/completions",
        "Answer in a conversation",
        answers.ChatCompletion,
        _CHAT,
        streams=True,
        headers=_ASKING,
    ),
    Operation(
        "post", "/v1/completions", "Continue prompts", answers.Completion, _COMPLETION, streams=True, headers=_ASKING
    ),
    Operation("post", "/v1/responses", "Answer in a stored conversation", answers.Response, _RESPONSES, streams=True),
    Operation("get", "/v1/responses/{id}", "A stored response", answers.Response, path_parameter="id"),
    Operation(
        "delete",
        "/v1/responses/{id}",
        "Forget a response; end its generation",
        answers.DeletedResponse,
        path_parameter="id",
    ),
    Operation(
        "post",
        "/v1/responses/{id}/cancel",
        "End the generation of a response in the background",
        answers.Response,
        path_parameter="id",
    ),
    Operation(
        "post",
        "/v1/messages",
        "Answer in a conversation, in Anthropic's form",
        answers.AnthropicMessage,
        _MESSAGES,
        streams=True,
        error=MessageErrorResponse,
    ),
    Operation(
        "post",
        "/v1/messages/count_tokens",
        "Count the tokens of a conversation, in Anthropic's form",
        answers.TokenCount,
        CountTokensRequest,
        error=MessageErrorResponse,
    ),
    Operation(
        "post", "/tokenize", "Encode a prompt or a conversation", answers.TokenizeResponse, bodies.TokenizeRequest
    ),
    Operation("post", "/v1/embeddings", "Vectors of texts", pooling.EmbeddingList, pooling.EmbeddingRequest),
    Operation("post", "/classify", "Classes of texts", pooling.ClassificationList, pooling.ClassifyRequest),
    Operation("post", "/pooling", "What a pooling task computes", pooling.PoolingList, pooling.PoolingRequest),
    *(
        Operation("post", path, "Relevance of texts to texts", pooling.ScoreList, pooling.ScoreRequest)
        for path in ("/score", "/v1/score")
    ),
    *(
        Operation("post", path, "Documents by their relevance", pooling.Ranking, pooling.RerankRequest)
        for path in ("/rerank", "/v1/rerank", "/v2/rerank")
    ),
    Operation("post", "/detokenize", "Decode token ids", answers.DetokenizeResponse, bodies.DetokenizeRequest),
    Operation(
        "get", "/health", "Whether the gateway can answer requests", answers.Status, may_be_away=True, is_open=True
    ),
    Operation("get", "/ping", "As /health", answers.Status, may_be_away=True, is_open=True),
    Operation("post", "/ping", "As /health", answers.Status, may_be_away=True, is_open=True),
    Operation("get", "/version", "Version of the gateway", answers.Version),
    Operation("get", "/load", "Load of this gateway", answers.ServerLoad),
    Operation("get", "/server_info", "The mesh behind this gateway", answers.ServerInfo),
    Operation("get", "/model_info", "The model, as SGLang reports it to routers", answers.ServedModelInfo),
    Operation("get", "/metrics", "Prometheus metrics"),
)
_PAGE: Mapping[str, Mapping[str, Any]] = {
    "after": {"type": "string", "description": "Id of the last object of the page before."},
    "limit": {"type": "integer", "minimum": 1, "description": "How many objects to return."},
}
_FILES: Mapping[str, Mapping[str, Any]] = {
    **_PAGE,
    "order": {"enum": ["asc", "desc"], "description": "desc: the newest first (default)."},
    "purpose": {"type": "string", "description": "Only files of this purpose."},
}
BATCH_OPERATIONS = (
    Operation("get", "/v1/files", "The stored files", batches.FileList, query=_FILES),
    Operation(
        "post",
        "/v1/files",
        "Store a file of requests for a batch",
        batches.File,
        batches.UploadFileRequest,
        is_form=True,
    ),
    Operation("get", "/v1/files/{id}", "A stored file", batches.File, path_parameter="id"),
    Operation("delete", "/v1/files/{id}", "Delete a file", batches.DeletedFile, path_parameter="id"),
    Operation(
        "get",
        "/v1/files/{id}/content",
        "What a file holds",
        path_parameter="id",
        media_type="application/octet-stream",
    ),
    Operation("get", "/v1/batches", "The batches", batches.BatchList, query=_PAGE),
    Operation("post", "/v1/batches", "Answer the requests of a file", batches.BatchObject, batches.CreateBatchRequest),
    Operation("get", "/v1/batches/{id}", "A batch", batches.BatchObject, path_parameter="id"),
    Operation(
        "post",
        "/v1/batches/{id}/cancel",
        "Stop a batch; its answers so far are kept",
        batches.BatchObject,
        path_parameter="id",
    ),
)
"""Those of a gateway with a directory for batches."""
_BOOLEAN = {"type": "boolean"}
_MODE = {"enum": ["abort", "wait", "keep"], "description": "What happens to running requests; default: abort."}
ADMIN_OPERATIONS = (
    Operation(
        "post",
        "/pause",
        "Pause every engine",
        answers.EnginesDone,
        query={"mode": _MODE, "clear_cache": {**_BOOLEAN, "description": "Forget cached prefixes too (default)."}},
        is_admin=True,
    ),
    Operation("post", "/resume", "Resume every engine", answers.EnginesDone, is_admin=True),
    Operation("get", "/is_paused", "Whether every engine is paused", answers.EnginesPaused, is_admin=True),
    Operation(
        "post",
        "/sleep",
        "Release the engines' memory",
        answers.EnginesDone,
        query={"level": {"enum": [0, 1, 2], "description": "Sleep level; default: 1."}, "mode": _MODE},
        is_admin=True,
    ),
    Operation(
        "post",
        "/wake_up",
        "Allocate the memory again",
        answers.EnginesDone,
        query={
            "tags": {
                "type": "array",
                "items": {"enum": ["weights", "kv_cache"]},
                "description": "What to wake; default: all.",
            }
        },
        is_admin=True,
    ),
    Operation("get", "/is_sleeping", "Whether every engine sleeps", answers.EnginesSleeping, is_admin=True),
    Operation(
        "post",
        "/reset_prefix_cache",
        "Forget cached prefixes",
        answers.EnginesDone,
        query={
            "reset_running_requests": {**_BOOLEAN, "description": "Preempt running requests rather than refuse."},
        },
        is_admin=True,
    ),
    Operation(
        "post",
        "/v1/load_lora_adapter",
        "Load a LoRA adapter on every engine, or on none",
        answers.EnginesDone,
        lora.LoadAdapter,
        is_admin=True,
    ),
    Operation(
        "post",
        "/v1/unload_lora_adapter",
        "Unload a LoRA adapter from every engine",
        answers.EnginesDone,
        lora.AdapterBody,
        is_admin=True,
    ),
    Operation(
        "post",
        "/v1/pin_lora_adapter",
        "Keep a LoRA adapter on every engine's device",
        answers.EnginesDone,
        lora.PinAdapter,
        is_admin=True,
    ),
    Operation("get", "/v1/lora_adapters", "LoRA adapters and where they are", lora.LoadedAdapters, is_admin=True),
    Operation("get", "/requests", "The last requests of this gateway", LastRequests, is_admin=True),
    Operation("post", "/start_profile", "Start recording steps", answers.EnginesDone, is_admin=True),
    Operation("post", "/stop_profile", "Write the recorded steps", answers.EnginesDone, is_admin=True),
)
