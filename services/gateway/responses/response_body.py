"""Translates a body of OpenAI's Responses API into the body of a chat."""

from collections.abc import Mapping, Sequence
from typing import Any

from tokenloom.request.errors import InvalidArgument

from ..openai.body_reader import SAMPLING_FIELDS, Body
from ..openapi.request_schemas import ResponsesRequest
from .function_tools import tools_of
from .input_items import Turn

_REFUSED: Mapping[str, tuple[object, str]] = {
    "conversation": (None, "use previous_response_id"),
    "prompt": (None, "templates of prompts are not stored"),
    "truncation": ("disabled", "send a shorter input"),
    "top_logprobs": (0, "this API returns no log probabilities here; use /v1/chat/completions"),
}
"""Fields that may only be null or have one other value, and what to do instead."""


def chat_body(body: Body, fields: ResponsesRequest, turns: Sequence[Turn]) -> dict[str, Any]:
    """Return the chat that a body asks for, in the spelling of :class:`ChatApi`. Raises ``InvalidArgument``.

    ``turns``: the whole conversation, without the instructions.
    """
    for name, (neutral, advice) in _REFUSED.items():
        if getattr(fields, name) not in (None, neutral):
            raise InvalidArgument(f"{name} is not supported; {advice}", name)
    chat: dict[str, Any] = {name: body[name] for name in body.keys() & SAMPLING_FIELDS}
    chat["messages"] = [{"role": "system", "content": fields.instructions}] if fields.instructions else []
    chat["messages"] += turns
    chat["stream"] = fields.stream
    chat["max_tokens"] = fields.max_output_tokens
    chat["response_format"] = _response_format(fields.text)
    return chat | tools_of(fields) | _reasoning(fields.reasoning)


def _reasoning(reasoning: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the variables of the chat template, which has the say over what an effort means."""
    effort = None if reasoning is None else reasoning.get("effort")
    if effort is None:
        return {}
    if not isinstance(effort, str):
        raise InvalidArgument("reasoning.effort must be a string", "reasoning.effort")
    switch = {"enable_thinking": False} if effort == "none" else {}
    return {"chat_template_kwargs": {"reasoning_effort": effort, **switch}}


def _response_format(text: Mapping[str, Any] | None) -> dict[str, Any] | None:
    form = None if text is None else text.get("format")
    if form is None:
        return None
    if not isinstance(form, dict):
        raise InvalidArgument("text.format must be an object", "text.format")
    if form.get("type") != "json_schema":
        return form
    names = ("name", "schema", "strict")
    return {"type": "json_schema", "json_schema": {name: form[name] for name in names if form.get(name) is not None}}
