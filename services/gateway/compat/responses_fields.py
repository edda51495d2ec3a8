"""Lists the request fields of OpenAI's responses."""

from typing import Any

from .foreign_field import ForeignApi, ignored, refused, works
from .openai_fields import FUNCTION, SCHEMA

_TOOL: dict[str, Any] = {"type": "function", **FUNCTION}
_NAMESPACE = {"type": "namespace", "name": "weather", "tools": [_TOOL]}
_CALL = {"type": "function_call", "call_id": "1", "name": "get_weather", "arguments": "{}"}
_RESULT = {"type": "function_call_output", "call_id": "1", "output": "rain"}
_THOUGHT = {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]}
_USER = {"role": "user", "content": "hi"}
_IMAGE = {"role": "user", "content": [{"type": "input_image", "image_url": "https://example.com/a.png"}]}
_FILE = {"role": "user", "content": [{"type": "input_file", "file_id": "file-1"}]}
_FORMAT = {"format": {"type": "json_schema", "name": "answer", "schema": SCHEMA}}
_NO_ACCOUNTS = "The gateway has no accounts; use API keys."
_CACHED_ANYWAY = "Prefixes are cached without it."
_HOSTED = "Tools that run at OpenAI are left out; the model cannot call them."

RESPONSES = ForeignApi(
    "OpenAI responses",
    "/v1/responses",
    {"input": "hi"},
    (
        works("input", [{"role": "user", "content": "ho"}]),
        works("input[].function_call", [_USER, _CALL, _USER]),
        works("input[].function_call_output", [_USER, _CALL, _RESULT]),
        works("input[].reasoning", [_USER, _THOUGHT, {"role": "assistant", "content": "a"}, _USER]),
        refused("input[].content[].input_image", [_IMAGE], "Models read text only."),
        refused("input[].content[].input_file", [_FILE], "Models read text only."),
        refused("input[].item_reference", [_USER, {"type": "item_reference", "id": "x"}], "Send the item itself."),
        works("background", True),
        ignored("context_management", [{"type": "compaction"}], "The client shortens its conversation."),
        refused("conversation", "conv_1", "Use previous_response_id."),
        ignored("include", ["reasoning.encrypted_content"], "Reasoning is returned as text."),
        works("instructions", "Be brief."),
        works("max_output_tokens", 9),
        ignored("max_tool_calls", 3, "Limits tools that run at OpenAI."),
        works("metadata", {"a": "b"}),
        works("model", "fake"),
        works("parallel_tool_calls", False, tools=[_TOOL], tool_choice="required"),
        works("previous_response_id", "resp_1"),
        refused("prompt", {"id": "pmpt_1"}, "Templates of prompts are not stored."),
        ignored("prompt_cache_key", "k", _CACHED_ANYWAY),
        ignored("prompt_cache_retention", "24h", _CACHED_ANYWAY),
        works("reasoning.effort", {"effort": "low"}),
        ignored("reasoning.summary", {"summary": "auto"}, "Reasoning is returned in full."),
        ignored("reasoning.generate_summary", {"generate_summary": "auto"}, "Reasoning is returned in full."),
        ignored("safety_identifier", "s", _NO_ACCOUNTS),
        ignored("service_tier", "flex", "Use priority."),
        works("store", False),
        works("stream", True),
        ignored("stream_options", {"include_obfuscation": True}, "Nothing is padded.", stream=True),
        works("temperature", 0.5),
        works("text.format", _FORMAT),
        ignored("text.verbosity", {"verbosity": "low"}, "Ask for it in the conversation."),
        works("tool_choice", "required", tools=[_TOOL]),
        works("tool_choice.name", {"type": "function", "name": "get_weather"}, tools=[_TOOL]),
        works("tools", [_TOOL]),
        works("tools[].strict", [_TOOL | {"strict": True}]),
        works("tools[].namespace", [_NAMESPACE]),
        refused("tools[].custom", [{"type": "custom", "name": "patch"}], "Send functions."),
        ignored("client_metadata", {"a": "b"}, "Use API keys."),
        ignored("tools[].web_search", [{"type": "web_search"}], _HOSTED),
        ignored("tools[].file_search", [{"type": "file_search", "vector_store_ids": ["v"]}], _HOSTED),
        ignored("tools[].mcp", [{"type": "mcp", "server_label": "s", "server_url": "https://example.com"}], _HOSTED),
        refused("top_logprobs", 2, "Use /v1/chat/completions."),
        works("top_p", 0.5),
        refused("truncation", "auto", "Send a shorter input."),
        ignored("user", "me", _NO_ACCOUNTS),
    ),
)
