"""Lists the request fields of Anthropic's messages."""

from typing import Any

from .foreign_field import ForeignApi, ignored, refused, works
from .openai_fields import SCHEMA

_CACHE = {"cache_control": {"type": "ephemeral"}}
_TEXT: dict[str, Any] = {"type": "text", "text": "ho"}
_USER = {"role": "user", "content": "hi"}
_TOOL: dict[str, Any] = {"name": "get_weather", "description": "Returns the weather.", "input_schema": SCHEMA}
_USE = {"type": "tool_use", "id": "1", "name": "get_weather", "input": {"city": "Oslo"}}
_RESULT = {"type": "tool_result", "tool_use_id": "1", "content": "rain"}
_THOUGHT = {"type": "thinking", "thinking": "Hm.", "signature": ""}
_IMAGE = {"type": "image", "source": {"type": "url", "url": "https://example.com/a.png"}}
_PDF = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "AA=="}}
_NOTE = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "x"}}
_FORMAT = {"format": {"type": "json_schema", "schema": SCHEMA}}
_CACHED_ANYWAY = "Prefixes are cached without it."


def _says(*blocks: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(blocks)}]


def _answered(*blocks: Any) -> list[dict[str, Any]]:
    return [_USER, {"role": "assistant", "content": list(blocks)}, _USER]


MESSAGES = ForeignApi(
    "Anthropic messages",
    "/v1/messages",
    {"max_tokens": 5, "messages": [_USER]},
    (
        works("messages", _answered(_TEXT)),
        works("messages[].content[].text", _says(_TEXT)),
        works("messages[].content[].tool_use", _answered(_USE)),
        works("messages[].content[].tool_result", [*_answered(_USE)[:2], *_says(_RESULT)]),
        works(
            "messages[].content[].is_error",
            [*_answered(_USE)[:2], *_says(_RESULT | {"is_error": True})],
        ),
        works("messages[].content[].thinking", _answered(_THOUGHT, _TEXT)),
        works("messages[].content[].document", _says(_NOTE)),
        refused("messages[].content[].image", _says(_IMAGE), "Models read text only."),
        refused("messages[].content[].document (PDF)", _says(_PDF), "Plain text only."),
        ignored("messages[].content[].cache_control", _says(_TEXT | _CACHE), _CACHED_ANYWAY),
        ignored("messages[].content[].citations", _says(_NOTE | {"citations": {"enabled": True}}), "No citations."),
        ignored("messages[].content[].title", _says(_NOTE | {"title": "t"}), "Only the document's text is read."),
        works("model", "fake"),
        works("max_tokens", 9),
        ignored("cache_control", {"type": "ephemeral"}, _CACHED_ANYWAY),
        ignored("container", "c", "No code runs at the server."),
        ignored("context_management", {"edits": []}, "The client shortens its conversation."),
        ignored("inference_geo", "us", "The mesh runs where it is."),
        refused("mcp_servers", [{"type": "url", "url": "https://example.com", "name": "s"}], "The client runs tools."),
        ignored("metadata", {"user_id": "me"}, "Use API keys."),
        works("output_config.effort", {"effort": "low"}),
        works("output_config.format", _FORMAT),
        ignored("output_config.task_budget", {"task_budget": {"type": "tokens", "total": 9}}, "Use max_tokens."),
        works("output_format", _FORMAT["format"]),
        ignored("service_tier", "auto", "Use priority."),
        ignored("speed", "fast", "Use priority."),
        works("stop_sequences", ["END"]),
        works("stream", True),
        works("system", "Be brief."),
        works("system[].text", [_TEXT]),
        ignored("system[].cache_control", [_TEXT | _CACHE], _CACHED_ANYWAY),
        works("temperature", 0.5),
        works("thinking.type", {"type": "enabled", "budget_tokens": 3}),
        works(
            "thinking.budget_tokens",
            {"type": "enabled", "budget_tokens": 3},
        ),
        ignored("thinking.display", {"type": "adaptive", "display": "omitted"}, "Thinking is returned in full."),
        works("tool_choice.type", {"type": "any"}, tools=[_TOOL]),
        works("tool_choice.name", {"type": "tool", "name": "get_weather"}, tools=[_TOOL]),
        works(
            "tool_choice.disable_parallel_tool_use",
            {"type": "any", "disable_parallel_tool_use": True},
            tools=[_TOOL],
        ),
        works("tools", [_TOOL]),
        works("tools[].strict", [_TOOL | {"strict": True}]),
        ignored("tools[].cache_control", [_TOOL | _CACHE], _CACHED_ANYWAY),
        ignored("tools[].defer_loading", [_TOOL | {"defer_loading": True}], "All tools are in the prompt."),
        ignored("tools[].input_examples", [_TOOL | {"input_examples": [{"city": "Oslo"}]}], "Not in templates."),
        ignored(
            "tools[].eager_input_streaming",
            [_TOOL | {"eager_input_streaming": True}],
            "Arguments are always streamed as they come.",
        ),
        refused("tools[].type", [{"type": "web_search_20250305", "name": "web_search"}], "The client runs tools."),
        works("top_k", 3),
        works("top_p", 0.5),
    ),
)
