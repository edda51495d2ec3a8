"""Generates the OpenAPI 3.1 document of the HTTP API from the types of its bodies."""

import copy
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from typing import Any

import msgspec

from ..http.route import Route
from . import constraints
from .response_schemas import EnginesChanged, ErrorResponse
from .route_table import ROUTES

TITLE = "Tokenloom"
_REF = "#/components/schemas/{name}"
_JSON = "application/json"
_FORM = "multipart/form-data"
_KEY: list[dict[str, list[str]]] = [{"key": []}]
_ADMIN_KEY: list[dict[str, list[str]]] = [{"adminKey": []}]
_TAGS: Mapping[str, str] = {
    "openai": "OpenAI's API with vLLM's additional fields.",
    "anthropic": "Anthropic's Messages API.",
    "ollama": "Ollama's API.",
    "pooling": "Vectors, classes, scores and rankings of texts.",
    "batches": "Files of requests, and batches that answer them.",
    "server": "Tokens, health, and what the gateway serves.",
    "admin": "What an admin key is needed for.",
}
_BEGINNINGS: Mapping[str, str] = {
    "/v1/messages": "anthropic",
    "/api/": "ollama",
    **dict.fromkeys(("/v1/embeddings", "/v1/score", "/v1/rerank", "/v2/rerank"), "pooling"),
    **dict.fromkeys(("/classify", "/pooling", "/score", "/rerank"), "pooling"),
    "/v1/": "openai",
    "/inference/": "openai",
}
"""The groups of routes, by how their paths begin; the first one that fits."""
_TURNS = [{"role": "user", "content": "What is the capital of France?"}]
_DEMO = "tokenloom-demo"
_PAIR = {"text_1": "a question", "text_2": ["an answer", "another one"]}
_RANKED = {"query": "a question", "documents": ["an answer", "another one"]}
_GENERATED = {"request_id": "generate-tokens-1", "choices": [{"index": 0, "token_ids": [1, 2, 3]}]}
EXAMPLES: Mapping[str, Any] = {
    "/v1/chat/completions": {"messages": _TURNS, "max_tokens": 32},
    "/v1/completions": {"prompt": "Once upon a time", "max_tokens": 32, "temperature": 0},
    "/v1/chat/completions/render": {"messages": _TURNS, "max_tokens": 32},
    "/v1/completions/render": {"prompt": "Once upon a time", "max_tokens": 32, "temperature": 0},
    "/v1/chat/completions/derender": {"generate_response": _GENERATED},
    "/v1/completions/derender": {"generate_responses": [_GENERATED]},
    "/inference/v1/generate": {"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 32, "temperature": 0}},
    "/v1/responses": {"input": "What is the capital of France?", "max_output_tokens": 32},
    "/v1/messages": {"model": _DEMO, "max_tokens": 32, "messages": _TURNS},
    "/v1/messages/count_tokens": {"model": _DEMO, "messages": _TURNS},
    "/api/chat": {"model": _DEMO, "messages": _TURNS, "stream": False},
    "/api/generate": {"model": _DEMO, "prompt": "Once upon a time", "stream": False},
    "/api/embed": {"model": _DEMO, "input": ["A text.", "Another one."]},
    "/api/embeddings": {"model": _DEMO, "prompt": "A text."},
    "/api/show": {"model": _DEMO},
    "/api/pull": {"model": _DEMO, "stream": False},
    "/tokenize": {"prompt": "Once upon a time"},
    "/detokenize": {"tokens": [1, 2, 3]},
    "/v1/embeddings": {"input": ["A text.", "Another one."]},
    "/classify": {"input": ["A text."]},
    "/pooling": {"input": ["A text."]},
    **dict.fromkeys(("/score", "/v1/score"), _PAIR),
    **dict.fromkeys(("/rerank", "/v1/rerank", "/v2/rerank"), _RANKED),
}
"""A body for each route that has one, as the document shows it."""


def document(*, admin: bool, embeds: bool, batches: bool = False) -> dict[str, Any]:
    """Return the document. ``admin``: include the admin routes; ``embeds``: engines accept embeddings as prompts;
    ``batches``: include files and batches."""
    routes = [each for each in ROUTES if each.summary and each.is_admin <= admin and each.is_of_batches <= batches]
    types = {type_ for each in routes for type_ in (each.answer, each.body, _error(each)) if type_ is not None}
    _, schemas = msgspec.json.schema_components(sorted(types, key=lambda each: each.__name__), ref_template=_REF)
    for name, field in constraints.REQUIRED.items():
        schemas[name].setdefault("required", []).append(field)
    schemas = copy.deepcopy(schemas)  # parts of it are constants, which stand in several places
    _fit_generators(schemas)
    for name, constraint in constraints.of_bodies(embeds=embeds).items():
        _add(schemas[name], constraint)
    if not embeds:
        schemas["CompletionRequest"]["properties"]["prompt_embeds"] = constraints.NO_EMBEDS
    paths: dict[str, dict[str, Any]] = {}
    for each in routes:
        paths.setdefault(each.path, {})[each.method.lower()] = _operation(each)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": TITLE,
            "version": version("tokenloom"),
            "description": "OpenAI's API with vLLM's additional fields. Every response carries `x-request-id`, the "
            "client's own if it sent one. Errors have OpenAI's form, those of `/v1/messages` Anthropic's, "
            "those of `/api` Ollama's.",
        },
        "servers": [{"url": "/", "description": "This gateway."}],
        "tags": [{"name": name, "description": text} for name, text in _TAGS.items() if name in _used_tags(routes)],
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {
                "key": {
                    "type": "http",
                    "scheme": "bearer",
                    "description": "An API key, if the gateway requires one.",
                },
                "adminKey": {
                    "type": "http",
                    "scheme": "bearer",
                    "description": "An admin key; a gateway without one has no admin routes.",
                },
            },
        },
    }


def _fit_generators(schemas: Any) -> None:
    """Write what generators of clients would misread in a form that means the same to all."""
    if isinstance(schemas, dict):
        # It says only that a field may be absent, and validators refuse it where null is no value.
        if schemas.get("default", "") is None:
            del schemas["default"]
        # An object without a word about its members has none, to generators of TypeScript.
        if schemas.get("type") == "object" and not schemas.keys() & {"properties", "anyOf", "allOf", "oneOf"}:
            schemas.setdefault("additionalProperties", True)
        schemas = list(schemas.values())
    if isinstance(schemas, list):
        for each in schemas:
            _fit_generators(each)


def _used_tags(routes: list[Route]) -> set[str]:
    return {_tag(each) for each in routes}


def _tag(each: Route) -> str:
    """Return the group of a route."""
    if each.is_admin:
        return "admin"
    if each.is_of_batches:
        return "batches"
    return next((tag for beginning, tag in _BEGINNINGS.items() if each.path.startswith(beginning)), "server")


def _add(schema: dict[str, Any], constraint: Mapping[str, Any]) -> None:
    """Add a rule to a schema."""
    schema.setdefault("allOf", []).append(constraint)


def _operation(each: Route) -> dict[str, Any]:
    name = each.path.strip("/").replace("/", "_").replace("{", "").replace("}", "")
    operation: dict[str, Any] = {
        "operationId": f"{each.method.lower()}_{name}",
        "summary": each.summary,
        "tags": [_tag(each)],
        "responses": dict(_responses(each)),
        "security": _ADMIN_KEY if each.is_admin else [] if each.is_open else [{}, *_KEY],
    }
    if each.body is not None:
        content: dict[str, Any] = {"schema": _ref(each.body)}
        if (example := EXAMPLES.get(each.path)) is not None:
            content["example"] = example
        operation["requestBody"] = {"required": True, "content": {_FORM if each.is_form else _JSON: content}}
    if parameters := list(_parameters(each)):
        operation["parameters"] = parameters
    return operation


def _parameters(each: Route) -> Iterator[dict[str, Any]]:
    for name in each.parameters:
        yield {
            "name": name,
            "in": "path",
            "required": True,
            "description": "Name of the object; it may hold slashes.",
            "schema": {"type": "string"},
        }
    for name, schema in each.query.items():
        yield {"name": name, "in": "query", "schema": schema}
    for name, schema in each.headers.items():
        yield {"name": name, "in": "header", "schema": schema}


def _responses(each: Route) -> Iterator[tuple[str, dict[str, Any]]]:
    if each.answer is None:
        content: dict[str, Any] = {each.media_type: {"schema": {"type": "string"}}}
    else:
        schema: dict[str, Any] = _ref(each.answer)
        content = {_JSON: {"schema": {"type": "array", "items": schema} if each.answers_list else schema}}
    if each.streams:
        content["text/event-stream"] = {
            "schema": {
                "type": "object",
                "description": "Each event holds a part of the answer, or an error, as JSON; the last is [DONE].",
                "properties": {"data": {"type": "string"}, "id": {"type": "string"}},
                "required": ["data"],
            }
        }
    if each.streams_lines and each.answer is not None:
        content["application/x-ndjson"] = {"schema": _ref(each.answer)}
    yield "200", {"description": each.summary, "content": content}
    if each.answer is EnginesChanged:
        yield "202", {"description": "Some engines are on their way", "content": content}
    if each.may_be_away and each.answer is not None:
        yield "503", {"description": "Not available", "content": {_JSON: {"schema": _ref(each.answer)}}}
    yield "default", {"description": "An error", "content": {_JSON: {"schema": _ref(_error(each))}}}


def _error(each: Route) -> type[msgspec.Struct]:
    return each.error or ErrorResponse


def _ref(type_: type[msgspec.Struct]) -> dict[str, str]:
    return {"$ref": _REF.format(name=type_.__name__)}
