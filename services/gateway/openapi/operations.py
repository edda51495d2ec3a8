"""What can be asked of a gateway over HTTP."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from . import request_schemas, response_schemas


@dataclass(frozen=True)
class Operation:
    """One method of one path."""

    method: str
    path: str
    summary: str
    answer: type[msgspec.Struct] | None = None
    """None: text."""
    body: type[msgspec.Struct] | None = None
    streams: bool = False
    """May answer with server-sent events."""
    may_be_away: bool = False
    """Answers 503 in the same form."""
    is_open: bool = False
    """Needs no key."""
    path_parameter: str = ""
    query: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Parameters behind the question mark and their schemas."""
    is_admin: bool = False
    """Needs an admin key, of which gateways without one know nothing."""


OPERATIONS = (
    Operation("get", "/v1/models", "The served model", response_schemas.ModelList),
    Operation("get", "/v1/models/{model}", "One model", response_schemas.Model, path_parameter="model"),
    Operation(
        "post",
        "/v1/chat/completions",
        "Answer in a conversation",
        response_schemas.ChatCompletion,
        request_schemas.with_sampling(request_schemas.ChatCompletionRequest),
        streams=True,
    ),
    Operation(
        "post",
        "/v1/completions",
        "Continue prompts",
        response_schemas.Completion,
        request_schemas.with_sampling(request_schemas.CompletionRequest),
        streams=True,
    ),
    Operation(
        "post",
        "/tokenize",
        "Encode a prompt or a conversation",
        response_schemas.TokenizeResponse,
        request_schemas.TokenizeRequest,
    ),
    Operation(
        "post",
        "/detokenize",
        "Decode token ids",
        response_schemas.DetokenizeResponse,
        request_schemas.DetokenizeRequest,
    ),
    Operation(
        "get",
        "/health",
        "Whether a request would be answered",
        response_schemas.Status,
        may_be_away=True,
        is_open=True,
    ),
    Operation("get", "/ping", "As /health", response_schemas.Status, may_be_away=True, is_open=True),
    Operation("post", "/ping", "As /health", response_schemas.Status, may_be_away=True, is_open=True),
    Operation("get", "/version", "Version of the gateway", response_schemas.Version),
    Operation("get", "/load", "How much is asked of this gateway", response_schemas.Load),
    Operation("get", "/server_info", "The mesh behind this gateway", response_schemas.ServerInfo),
    Operation("get", "/model_info", "The model, as SGLang tells routers", response_schemas.ModelInfo),
    Operation("get", "/metrics", "Prometheus metrics"),
)
_BOOLEAN = {"type": "boolean"}
_MODE = {"enum": ["abort", "wait", "keep"], "description": "What happens to running requests; abort if not said."}
ADMIN_OPERATIONS = (
    Operation(
        "post",
        "/pause",
        "Pause every engine",
        response_schemas.EnginesDone,
        query={"mode": _MODE, "clear_cache": {**_BOOLEAN, "description": "Forget cached prefixes too (default)."}},
        is_admin=True,
    ),
    Operation("post", "/resume", "Go on", response_schemas.EnginesDone, is_admin=True),
    Operation("get", "/is_paused", "Whether every engine is paused", response_schemas.EnginesPaused, is_admin=True),
    Operation(
        "post",
        "/sleep",
        "Give memory back to the system",
        response_schemas.EnginesDone,
        query={"level": {"enum": [0, 1, 2], "description": "How deep; 1 if not said."}, "mode": _MODE},
        is_admin=True,
    ),
    Operation(
        "post",
        "/wake_up",
        "Take memory again",
        response_schemas.EnginesDone,
        query={
            "tags": {
                "type": "array",
                "items": {"enum": ["weights", "kv_cache"]},
                "description": "What to wake; all if not said.",
            }
        },
        is_admin=True,
    ),
    Operation("get", "/is_sleeping", "Whether every engine sleeps", response_schemas.EnginesSleeping, is_admin=True),
    Operation(
        "post",
        "/reset_prefix_cache",
        "Forget cached prefixes",
        response_schemas.EnginesDone,
        query={
            "reset_running_requests": {**_BOOLEAN, "description": "Preempt running requests rather than refuse."},
        },
        is_admin=True,
    ),
    Operation("post", "/start_profile", "Begin to record steps", response_schemas.EnginesDone, is_admin=True),
    Operation("post", "/stop_profile", "Write what was recorded", response_schemas.EnginesDone, is_admin=True),
)
