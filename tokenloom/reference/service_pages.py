"""Writes the pages about what services offer: their options, the HTTP API, and who may call whom."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any

from msgspec import NODEFAULT

from tokenloom.services.coordinator.coordinator_settings import CoordinatorSettings
from tokenloom.services.encoder.encoder_settings import EncoderSettings
from tokenloom.services.engine.records.engine_settings import EngineSettings
from tokenloom.services.gateway.openapi.document import document
from tokenloom.services.gateway.settings.gateway_settings import GatewaySettings
from tokenloom.services.output_processor.output_processor_settings import OutputProcessorSettings
from tokenloom.services.relay.relay_settings import RelaySettings
from tokenloom.services.runtime.host.options import Option, flag, options_of
from tokenloom.services.runtime.host.service_settings import ServiceSettings
from tokenloom.services.runtime.peers.callers import CALLERS
from tokenloom.services.tokenizer.tokenizer_settings import TokenizerSettings

_Json = Mapping[str, Any]

SERVICES: tuple[type[ServiceSettings], ...] = (
    GatewaySettings,
    TokenizerSettings,
    OutputProcessorSettings,
    CoordinatorSettings,
    EngineSettings,
    EncoderSettings,
    RelaySettings,
)

_CONFIGURATION = """# Configuration

`make docs` writes this page from the code. Each service reads flags, environment variables, and a file named by
`--config` (`.toml`, `.json` or `.yaml`). A flag overrides a variable, and a variable overrides the file. The variable
of an option is `TOKENLOOM_` and its name: `--max-num-seqs 64`, `TOKENLOOM_MAX_NUM_SEQS=64` and `max_num_seqs = 64` in a
file have the same effect. In a file, an option of the engine may also stand in a table of its group, such as
`[scheduler]`. Lists are separated by commas, and the flag of a list may be given more than once.

`tokenloom serve` offers the options of the engine and of the other services, starts all services, and sets the options
by which they find each other. `LLM(...)` takes the options of the engine's groups as keywords.
"""

_CALLERS = """# Who may call whom

`make docs` writes this page from `services/runtime/peers/callers.py`. Under mutual TLS the certificate names the
caller; every certificate of the mesh may call the health checks. The gateway's own `Inference` and HTTP are public: API
keys identify their clients.

| method | callers |
|---|---|
"""


_HTTP = """# HTTP

`make docs` writes this page from the OpenAPI document, which each gateway serves at `/openapi.json` and shows at
`/docs`. A request's `x-request-id` is returned, or a new one is made. Fields that may be null count as absent then. The
routes marked *admin* exist where the gateway has an admin key, and those of [files and batches](../use/batches.md)
where they are turned on.

| method | path | what it does |
|---|---|---|
"""


def configuration() -> str:
    """Return ``docs/reference/configuration.md``."""
    common = options_of(ServiceSettings)
    parts = [_CONFIGURATION, "\n## Every service\n\n", *_table(common.values())]
    for service in SERVICES:
        parts.append(f"\n## {service.service}\n\n`python -m tokenloom.services.{service.service}`\n")
        own = [option for option in options_of(service).values() if option.name not in common]
        for group, options in itertools.groupby(sorted(own, key=_by_group(own)), attrgetter("group")):
            if group != own[0].group:
                parts.append(f"\n### {group}\n")
            parts += ["\n", *_table(options)]
    return "".join(parts)


def callers() -> str:
    """Return ``docs/reference/callers.md``."""
    rows = (f"| `{method}` | {', '.join(sorted(who))} |\n" for method, who in CALLERS.items())
    return _CALLERS + "".join(rows)


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
    return _HTTP + "\n".join(lines).rstrip() + "\n"


def _by_group(options: Sequence[Option]) -> Callable[[Option], int]:
    """Return a key that sorts options by the order in which their groups first occur."""
    groups = list(dict.fromkeys(option.group for option in options))
    return lambda option: groups.index(option.group)


def _table(options: Iterable[Option]) -> Iterator[str]:
    yield "| flag | value | default | |\n|---|---|---|---|\n"
    for option in options:
        flags = " ".join(f"`{flag(name)}`" for name in option.names)
        value = ", ".join(f"`{choice}`" for choice in option.choices) or option.kind
        default = f"`{option.default_text}`" if option.default_text else ""
        asked = "required" if option.default is NODEFAULT else default
        yield f"| {flags} | {value} | {asked} | {_cell(option.text)} |\n"


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
