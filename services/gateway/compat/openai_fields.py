"""Lists the request fields of OpenAI's chat completions and completions."""

from typing import Any

from .foreign_field import ForeignApi, ignored, refused, works

SCHEMA: dict[str, Any] = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTION: dict[str, Any] = {"name": "get_weather", "description": "Returns the weather.", "parameters": SCHEMA}
TOOL: dict[str, Any] = {"type": "function", "function": FUNCTION}
STRICT_TOOL: dict[str, Any] = {"type": "function", "function": FUNCTION | {"strict": True}}
USER: dict[str, Any] = {"role": "user", "content": "hi"}
_CALL: dict[str, Any] = {"id": "1", "type": "function", "function": {"name": "get_weather", "arguments": "{}"}}
_CALLING: dict[str, Any] = {"role": "assistant", "content": None, "tool_calls": [_CALL]}
_JSON_SCHEMA = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True}}
_IMAGE: dict[str, Any] = {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}
_AUDIO: dict[str, Any] = {"type": "input_audio", "input_audio": {"data": "AA==", "format": "wav"}}
_FILE: dict[str, Any] = {"type": "file", "file": {"file_id": "file-1"}}
_GRAMMAR_TOOL = {"type": "custom", "custom": {"name": "patch"}}
_ALLOWED = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [TOOL]}}
_NO_ACCOUNTS = "The gateway has no accounts; use API keys."
_CACHED_ANYWAY = "Prefixes are cached without it; cache_salt separates them."
_ONLY_TEXT = "Models read text only."

CHAT = ForeignApi(
    "OpenAI chat completions",
    "/v1/chat/completions",
    {"messages": [USER]},
    (
        works("messages", [USER, {"role": "assistant", "content": "a"}, USER]),
        works("messages[].content[].text", [{"role": "user", "content": [{"type": "text", "text": "ho"}]}]),
        works("messages[].name", [USER | {"name": "me"}]),
        works("messages[].tool_calls", [USER, _CALLING, USER]),
        works(
            "messages[].tool_call_id",
            [USER, _CALLING, {"role": "tool", "tool_call_id": "1", "content": "rain"}],
        ),
        works(
            "messages[].refusal",
            [USER, {"role": "assistant", "content": None, "refusal": "I will not."}, USER],
        ),
        works(
            "messages[].content[].refusal",
            [USER, {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}, USER],
        ),
        refused("messages[].content[].image_url", [{"role": "user", "content": [_IMAGE]}], _ONLY_TEXT),
        refused("messages[].content[].input_audio", [{"role": "user", "content": [_AUDIO]}], _ONLY_TEXT),
        refused("messages[].content[].file", [{"role": "user", "content": [_FILE]}], _ONLY_TEXT),
        refused(
            "messages[].function_call",
            [
                USER,
                {"role": "assistant", "function_call": {}}
                | _CALLING
                | {"function_call": {"name": "f", "arguments": "{}"}},
            ],
            "Obsolete; send tool_calls.",
        ),
        refused("messages[].audio", [USER, {"role": "assistant", "audio": {"id": "a"}}, USER], _ONLY_TEXT),
        ignored(
            "messages[].annotations",
            [USER, {"role": "assistant", "content": "a", "annotations": [{}]}, USER],
            "Templates have no citations.",
        ),
        works("model", "fake"),
        refused("audio", {"voice": "alloy", "format": "wav"}, "Models write text only."),
        works("frequency_penalty", 0.5),
        refused("function_call", {"name": "get_weather"}, "Obsolete; send tool_choice."),
        refused("functions", [FUNCTION], "Obsolete; send tools."),
        works("logit_bias", {"5": 2.0}),
        works("logprobs", True),
        works("max_completion_tokens", 9),
        works("max_tokens", 9),
        ignored("metadata", {"a": "b"}, "Chats are not stored; /v1/responses returns it."),
        refused("modalities", ["text", "audio"], 'Only ["text"].'),
        works("n", 2),
        works("parallel_tool_calls", False, tools=[TOOL], tool_choice="required"),
        refused("prediction", {"type": "content", "content": "x"}, "See speculative decoding for what drafts tokens."),
        works("presence_penalty", 0.5),
        ignored("prompt_cache_key", "k", _CACHED_ANYWAY),
        ignored("prompt_cache_retention", "24h", _CACHED_ANYWAY),
        works("reasoning_effort", "low"),
        works("response_format", {"type": "json_object"}),
        works("response_format.json_schema", _JSON_SCHEMA),
        ignored("safety_identifier", "s", _NO_ACCOUNTS),
        works("seed", 7),
        ignored("service_tier", "flex", "Use priority."),
        works("stop", ["END"]),
        ignored("store", True, "Chats are not stored; /v1/responses stores."),
        works("stream", True),
        works("stream_options.include_usage", {"include_usage": True}, stream=True),
        ignored("stream_options.include_obfuscation", {"include_obfuscation": True}, "Nothing is padded.", stream=True),
        works("temperature", 0.5),
        works("tool_choice", "required", tools=[TOOL]),
        works(
            "tool_choice.function",
            {"type": "function", "function": {"name": "get_weather"}},
            tools=[TOOL],
        ),
        works(
            "tool_choice.allowed_tools",
            _ALLOWED,
            tools=[TOOL, {"type": "function", "function": FUNCTION | {"name": "other"}}],
        ),
        works("tools", [TOOL]),
        works("tools[].function.strict", [STRICT_TOOL]),
        refused("tools[].custom", [_GRAMMAR_TOOL], "Only functions."),
        works("top_logprobs", 2, logprobs=True),
        works("top_p", 0.5),
        ignored("user", "me", _NO_ACCOUNTS),
        ignored("verbosity", "low", "Ask for it in the conversation."),
        ignored("web_search_options", {}, "The gateway does not search the web."),
    ),
)

COMPLETIONS = ForeignApi(
    "OpenAI completions",
    "/v1/completions",
    {"prompt": "a"},
    (
        works("prompt", ["b", "c"]),
        works("model", "fake"),
        refused("best_of", 3, "Only the value of n."),
        works("echo", True),
        works("frequency_penalty", 0.5),
        works("logit_bias", {"5": 2.0}),
        works("logprobs", 2),
        works("max_tokens", 9),
        works("n", 2),
        works("presence_penalty", 0.5),
        works("seed", 7),
        works("stop", "END"),
        works("stream", True),
        works("stream_options.include_usage", {"include_usage": True}, stream=True),
        refused("suffix", "b", "Models continue text only."),
        works("temperature", 0.5),
        works("top_p", 0.5),
        ignored("user", "me", _NO_ACCOUNTS),
    ),
)
