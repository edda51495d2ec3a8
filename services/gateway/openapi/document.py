"""Generates the OpenAPI 3.1 document of the HTTP API from the types of its bodies."""

from collections.abc import Iterator, Mapping
from importlib.metadata import version
from typing import Any

import msgspec

from ..http.route import Route
from . import constraints
from .response_schemas import ErrorResponse
from .route_table import ROUTES

TITLE = "Tokenloom"
_REF = "#/components/schemas/{name}"
_JSON = "application/json"
_FORM = "multipart/form-data"
_KEY: list[dict[str, list[str]]] = [{"key": []}]
_ADMIN_KEY: list[dict[str, list[str]]] = [{"adminKey": []}]


def document(*, admin: bool, embeds: bool, batches: bool = False) -> dict[str, Any]:
    """Return the document. ``admin``: include the admin routes; ``embeds``: engines accept embeddings as prompts;
    ``batches``: include files and batches."""
    routes = [each for each in ROUTES if each.summary and each.is_admin <= admin and each.is_of_batches <= batches]
    types = {type_ for each in routes for type_ in (each.answer, each.body, _error(each)) if type_ is not None}
    _, schemas = msgspec.json.schema_components(sorted(types, key=lambda each: each.__name__), ref_template=_REF)
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
            "client's own if it sent one. Errors have OpenAI's form, those of `/v1/messages` Anthropic's.",
        },
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


def _add(schema: dict[str, Any], constraint: Mapping[str, Any]) -> None:
    """Add a rule to a schema."""
    schema.setdefault("allOf", []).append(constraint)


def _operation(each: Route) -> dict[str, Any]:
    name = each.path.strip("/").replace("/", "_").replace("{", "").replace("}", "")
    operation: dict[str, Any] = {
        "operationId": f"{each.method.lower()}_{name}",
        "summary": each.summary,
        "responses": dict(_responses(each)),
        "security": _ADMIN_KEY if each.is_admin else [] if each.is_open else [{}, *_KEY],
    }
    if each.is_admin:
        operation["tags"] = ["admin"]
    if each.body is not None:
        operation["requestBody"] = {
            "required": True,
            "content": {_FORM if each.is_form else _JSON: {"schema": _ref(each.body)}},
        }
    if parameters := list(_parameters(each)):
        operation["parameters"] = parameters
    return operation


def _parameters(each: Route) -> Iterator[dict[str, Any]]:
    if each.parameter:
        yield {
            "name": each.parameter,
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
        content = {_JSON: {"schema": _ref(each.answer)}}
    if each.streams:
        content["text/event-stream"] = {
            "schema": {
                "type": "object",
                "description": "Each event holds a part of the answer, or an error, as JSON; the last is [DONE].",
                "properties": {"data": {"type": "string"}, "id": {"type": "string"}},
                "required": ["data"],
            }
        }
    yield "200", {"description": each.summary, "content": content}
    if each.may_be_away and each.answer is not None:
        yield "503", {"description": "Not available", "content": {_JSON: {"schema": _ref(each.answer)}}}
    yield "default", {"description": "An error", "content": {_JSON: {"schema": _ref(_error(each))}}}


def _error(each: Route) -> type[msgspec.Struct]:
    return each.error or ErrorResponse


def _ref(type_: type[msgspec.Struct]) -> dict[str, str]:
    return {"$ref": _REF.format(name=type_.__name__)}
