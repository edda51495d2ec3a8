"""Reads what a chat passes to its template besides messages and tools."""

from typing import Any

from tokenloom.request.errors import InvalidArgument

from ..openapi.request_schemas import ChatCompletionRequest


def template_kwargs(fields: ChatCompletionRequest) -> dict[str, Any]:
    """Return the variables of the chat template; those of ``chat_template_kwargs`` win. Raises ``InvalidArgument``."""
    kwargs: dict[str, Any] = {}
    if fields.documents:
        kwargs["documents"] = fields.documents
    if (effort := fields.reasoning_effort or _member(fields, "reasoning", "effort", str)) is not None:
        kwargs["reasoning_effort"] = effort
        if effort == "none":
            kwargs["enable_thinking"] = False
    if (enabled := _member(fields, "reasoning", "enabled", bool)) is not None:
        kwargs["enable_thinking"] = enabled
    if (kind := _member(fields, "thinking", "type", str)) is not None:
        if kind not in ("enabled", "disabled", "adaptive"):
            raise InvalidArgument("thinking.type must be enabled, adaptive or disabled", "thinking.type")
        kwargs["enable_thinking"] = kind != "disabled"
    return kwargs | (fields.chat_template_kwargs or {})


def _member(fields: ChatCompletionRequest, field: str, name: str, kind: type) -> Any:
    """Return a member of a field that is an object; None if either is not set."""
    value = (getattr(fields, field) or {}).get(name)
    if value is not None and type(value) is not kind:
        article = "a boolean" if kind is bool else "a string"
        raise InvalidArgument(f"{field}.{name} must be {article}", f"{field}.{name}")
    return value
