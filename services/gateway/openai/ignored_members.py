"""Finds members of request fields that have no effect, so that the response can name them."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from ..assistant.message_plans import UNBOUND_STRICT

_UNBOUND_HERE = "tools[].strict"
_STREAM_OPTIONS = frozenset({"include_usage", "continuous_usage_stats"})
_REASONING = frozenset({"effort", "enabled", "exclude"})
_THINKING = frozenset({"type"})
_MESSAGE = frozenset(
    {
        *("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content", "reasoning", "refusal"),
        *("function_call", "audio"),  # refused unless they are empty
    }
)
_PART = frozenset({"type", "text", "refusal"})


def ignored_members(where: str, values: Iterable[Any], known: frozenset[str]) -> Iterator[str]:
    """Yield the path of each member of the objects among ``values`` that is not known and not empty."""
    for value in values:
        if isinstance(value, dict) and not value.keys() <= known:
            yield from (f"{where}.{name}" for name in value if name not in known and value[name])


def unbound_strict(ignored: Collection[str]) -> tuple[str, ...]:
    """Return what has no effect of the tools that an API has translated into those of a chat.

    ``ignored``: what has no effect in that chat.
    """
    return (_UNBOUND_HERE,) if UNBOUND_STRICT in ignored else ()


def ignored_in_stream_options(body: Mapping[str, Any]) -> Iterator[str]:
    yield from ignored_members("stream_options", (body.get("stream_options"),), _STREAM_OPTIONS)


def ignored_in_chat(body: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the members of a chat's fields that have no effect, each once. The body was checked."""
    messages = body["messages"]
    found = [*ignored_in_stream_options(body), *ignored_members("messages[]", messages, _MESSAGE)]
    for message in messages:
        if isinstance(parts := message.get("content"), list):
            found += ignored_members("messages[].content[]", parts, _PART)
    found += ignored_members("reasoning", (body.get("reasoning"),), _REASONING)
    found += ignored_members("thinking", (body.get("thinking"),), _THINKING)
    return tuple(dict.fromkeys(found)) if found else ()
