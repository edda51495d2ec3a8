"""The description of the HTTP API, OpenAPI 3.1, generated from the types of its bodies."""

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import msgspec

from . import constraints, requests, responses

TITLE = "Tokenloom"
_REF = "#/components/schemas/{name}"
_JSON = "application/json"


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


OPERATIONS = (
    Operation("get", "/v1/models", "The served model", responses.ModelList),
    Operation("get", "/v1/models/{model}", "One model", responses.Model, path_parameter="model"),
    Operation(
        "post",
        "/v1/chat/completions",
        "Answer in a conversation",
        responses.ChatCompletion,
        requests.ChatCompletionRequest,
        streams=True,
    ),
    Operation(
        "post",
        "/v1/completions",
        "Continue prompts",
        responses.Completion,
        requests.CompletionRequest,
        streams=True,
    ),
    Operation(
        "post", "/tokenize", "Encode a prompt or a conversation", responses.TokenizeResponse, requests.TokenizeRequest
    ),
    Operation("post", "/detokenize", "Decode token ids", responses.DetokenizeResponse, requests.DetokenizeRequest),
    Operation(
        "get",
        "/health",
        "Whether a request would be answered",
        responses.Status,
        may_be_away=True,
        is_open=True,
    ),
    Operation("get", "/ping", "As /health", responses.Status, may_be_away=True, is_open=True),
    Operation("post", "/ping", "As /health", responses.Status, may_be_away=True, is_open=True),
    Operation("get", "/version", "Version of the gateway", responses.Version),
    Operation("get", "/load", "How much is asked of this gateway", responses.Load),
    Operation("get", "/server_info", "The mesh behind this gateway", responses.ServerInfo),
    Operation("get", "/model_info", "The model, as SGLang tells routers", responses.ModelInfo),
    Operation("get", "/metrics", "Prometheus metrics"),
)
_KEY: list[dict[str, list[str]]] = [{"key": []}]


def document() -> dict[str, Any]:
    """The whole description."""
    types = {type_ for each in OPERATIONS for type_ in (each.answer, each.body) if type_ is not None}
    types.add(responses.ErrorResponse)
    _, schemas = msgspec.json.schema_components(sorted(types, key=lambda each: each.__name__), ref_template=_REF)
    for name, constraint in constraints.OF_BODIES.items():
        schemas[name].update(constraint)
    paths: dict[str, dict[str, Any]] = {}
    for each in OPERATIONS:
        paths.setdefault(each.path, {})[each.method] = _operation(each)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": TITLE,
            "version": version("tokenloom"),
            "description": "OpenAI's API with vLLM's further fields. Every answer carries `x-request-id`, the client's "
            "own when it sent one. Errors have OpenAI's form.",
        },
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {
                "key": {
                    "type": "http",
                    "scheme": "bearer",
                    "description": "An API key, where the gateway asks for one.",
                }
            },
        },
    }


def _operation(each: Operation) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "operationId": f"{each.method}_{each.path.strip('/').replace('/', '_').replace('{', '').replace('}', '')}",
        "summary": each.summary,
        "responses": dict(_responses(each)),
        "security": [] if each.is_open else [{}, *_KEY],
    }
    if each.body is not None:
        operation["requestBody"] = {"required": True, "content": {_JSON: {"schema": _ref(each.body)}}}
    if each.path_parameter:
        operation["parameters"] = [
            {
                "name": each.path_parameter,
                "in": "path",
                "required": True,
                "description": "Its name; a name may hold slashes.",
                "schema": {"type": "string"},
            }
        ]
    return operation


def _responses(each: Operation) -> Iterator[tuple[str, dict[str, Any]]]:
    if each.answer is None:
        content: dict[str, Any] = {"text/plain": {"schema": {"type": "string"}}}
    else:
        content = {_JSON: {"schema": _ref(each.answer)}}
    if each.streams:
        content["text/event-stream"] = {
            "schema": {"type": "string", "description": "Events with pieces of the answer, then [DONE]."}
        }
    yield "200", {"description": each.summary, "content": content}
    if each.may_be_away and each.answer is not None:
        yield "503", {"description": "It would not be", "content": {_JSON: {"schema": _ref(each.answer)}}}
    yield "default", {"description": "A failure", "content": {_JSON: {"schema": _ref(responses.ErrorResponse)}}}


def _ref(type_: type[msgspec.Struct]) -> dict[str, str]:
    return {"$ref": _REF.format(name=type_.__name__)}
