"""Translates a body of OpenAI's Responses API into the body of a chat."""

from collections.abc import Mapping, Sequence
from typing import Any

from tokenloom.request.errors import InvalidArgument
from tokenloom.request.narrowing import narrow_int

from ..openai.body_reader import SAMPLING_FIELDS, Body
from ..openapi.request_schemas import ResponsesRequest
from ..records.cache_marks import openai_seconds
from .function_tools import tools_of
from .input_items import Turn

_REFUSED: Mapping[str, tuple[object, str]] = {
    "prompt": (None, "templates of prompts are not stored"),
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
    if fields.truncation not in (None, "auto", "disabled"):
        raise InvalidArgument("truncation must be auto or disabled", "truncation")
    chat: dict[str, Any] = {name: body[name] for name in body.keys() & (SAMPLING_FIELDS - {"max_tokens"})}
    chat["messages"] = [{"role": "system", "content": fields.instructions}] if fields.instructions else []
    chat["messages"] += turns
    chat["stream"] = fields.stream
    chat["response_format"] = _response_format(fields.text)
    return chat | tools_of(fields) | _reasoning(fields.reasoning)


def most_tokens(fields: ResponsesRequest) -> int:
    """Return the most tokens that the client accepts, which may exceed what the prompt leaves of the context; 0: it
    names no limit. Raises ``InvalidArgument``."""
    limit = fields.max_output_tokens
    return 0 if limit is None else narrow_int("max_output_tokens", limit, 1, 2**32 - 1)


def keep_seconds(fields: ResponsesRequest) -> int:
    """Return for how long the client wants the prompt kept in the cache; 0: it does not say. Raises
    ``InvalidArgument``."""
    items = fields.input if isinstance(fields.input, list) else ()
    parts = (
        (f"input[{index}].{member}", item.get(member))
        for index, item in enumerate(items)
        for member in ("content", "output")
    )
    return openai_seconds(fields.prompt_cache_options, parts)


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
