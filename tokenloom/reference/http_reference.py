"""Writes the page about the HTTP API from its OpenAPI document."""

from collections.abc import Iterator, Mapping
from typing import Any

from tokenloom.services.gateway.openapi.document import document

_Json = Mapping[str, Any]

_HEAD = """# HTTP

`make docs` writes this page from the OpenAPI document, which each gateway serves at `/openapi.json` and shows at
`/docs`. A request's `x-request-id` is returned, or a new one is made. Fields that may be null count as absent then. The
routes marked *admin* exist where the gateway has an admin key, and those of [files and batches](../use/batches.md)
where they are turned on.

| method | path | what it does |
|---|---|---|
"""


def http_api() -> str:
    """Return ``docs/reference/http.md``."""
    api = document(admin=True, embeds=True, batches=True)
    operations = [(path, method, each) for path, methods in api["paths"].items() for method, each in methods.items()]
    lines = [
        f"| {method.upper()} | [{path}](#{_anchor(f'{method} {path}')}) | {_summary(each)} |"
        for path, method, each in operations
    ]
    lines += ["", "## Routes", ""]
    for path, method, operation in operations:
        lines += _operation(path, method, operation)
    lines += ["## Objects", ""]
    for name, schema in sorted(api["components"]["schemas"].items()):
        lines += _object(name, schema)
    return _HEAD + "\n".join(lines).rstrip() + "\n"


def _summary(operation: _Json) -> str:
    is_admin = any("adminKey" in way for way in operation.get("security", ()))
    return str(operation["summary"]) + (" (*admin*)" if is_admin else "")


def _operation(path: str, method: str, operation: _Json) -> Iterator[str]:
    yield f"### {method.upper()} {path}\n"
    yield f"{_summary(operation)}. {_body(operation)}{_answers(operation)}\n"
    parameters = operation.get("parameters", ())
    if parameters:
        yield "| parameter | in | value | |\n|---|---|---|---|"
    for each in parameters:
        schema = each["schema"]
        yield f"| `{each['name']}` | {each['in']} | {_kind(schema)} | {_cell(schema.get('description', ''))} |"
    if parameters:
        yield ""


def _body(operation: _Json) -> str:
    schema = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema")
    return f"Body: {_kind(schema)}. " if schema else ""


def _answers(operation: _Json) -> str:
    texts = []
    for status, answer in operation["responses"].items():
        for media, content in answer.get("content", {}).items():
            kind = "events" if media == "text/event-stream" else _kind(content.get("schema", {}))
            texts.append(f"{'other statuses' if status == 'default' else status}: {kind}")
    return f"Answers: {'; '.join(texts)}." if texts else ""


def _object(name: str, schema: _Json) -> Iterator[str]:
    yield f"### {name}\n"
    if "description" in schema:
        yield f"{schema['description']}\n"
    properties = schema.get("properties", {})
    if properties:
        yield "| field | value | |\n|---|---|---|"
    required = set(schema.get("required", ()))
    for field, each in properties.items():
        text = _cell(each.get("description", ""))
        yield f"| `{field}`{' (required)' if field in required else ''} | {_kind(each)} | {text} |"
    yield ""


def _kind(schema: _Json) -> str:
    """Return what values a schema allows, on one line. Null is left out: it counts as absent."""
    if "$ref" in schema:
        name = schema["$ref"].rsplit("/", 1)[1]
        return f"[{name}](#{_anchor(name)})"
    if "anyOf" in schema:
        kinds = [_kind(each) for each in schema["anyOf"] if each.get("type") != "null"]
        return " or ".join(dict.fromkeys(kinds))
    if "const" in schema or "enum" in schema:
        values = [schema["const"]] if "const" in schema else schema["enum"]
        return ", ".join(f"`{value}`" for value in values if value is not None)
    if schema.get("type") == "array":
        return f"array of {_kind(schema.get('items', {}))}" + _bounds(schema, "minItems", "maxItems")
    low, high = ("minLength", "maxLength") if schema.get("type") == "string" else ("minimum", "maximum")
    return str(schema.get("type", "any")) + _bounds(schema, low, high)


def _bounds(schema: _Json, low: str, high: str) -> str:
    texts = []
    for key, word in ((low, "≥"), ("exclusiveMinimum", ">"), (high, "≤"), ("exclusiveMaximum", "<")):
        if key in schema:
            texts.append(f"{word} {schema[key]}")
    return f" {', '.join(texts)}" if texts else ""


def _anchor(heading: str) -> str:
    """Return the id that a heading of this page gets, on a code forge and on the site."""
    return "".join(each for each in heading.lower().replace(" ", "-") if each.isalnum() or each in "-_")


def _cell(text: str) -> str:
    """Return a text as the cell of a table."""
    return text.replace("|", "\\|")
