"""Samples of the fields of other servers' APIs, for ``test_compat.py``."""

from typing import Any, NamedTuple


class Sample:
    """A value of a whole field, which has an effect where the field works, with other fields that it needs."""

    def __init__(self, value: Any, **needs: Any) -> None:
        self.value = value
        self.needs = needs


class Samples(NamedTuple):
    """The samples of an API's fields."""

    base: dict[str, Any]
    """The smallest body that the route answers."""
    fields: dict[str, Any]
    """By field, its :class:`Sample`, or only the value where it needs no other fields."""


SCHEMA: dict[str, Any] = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTION: dict[str, Any] = {"name": "get_weather", "description": "Returns the weather.", "parameters": SCHEMA}
TOOL: dict[str, Any] = {"type": "function", "function": FUNCTION}
STRICT_TOOL: dict[str, Any] = {"type": "function", "function": FUNCTION | {"strict": True}}
USER: dict[str, Any] = {"role": "user", "content": "hi"}
_CALL: dict[str, Any] = {"id": "1", "type": "function", "function": {"name": "get_weather", "arguments": "{}"}}
_CALLING: dict[str, Any] = {"role": "assistant", "content": None, "tool_calls": [_CALL]}
_JSON_SCHEMA = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True}}
_URL = "data:image/png;base64,AAAA"
_IMAGE: dict[str, Any] = {"type": "image_url", "image_url": {"url": _URL}}
_DETAILED: dict[str, Any] = {"type": "image_url", "image_url": {"url": _URL, "detail": "low"}}
_AUDIO: dict[str, Any] = {"type": "input_audio", "input_audio": {"data": "AA==", "format": "wav"}}
_AUDIO_URL: dict[str, Any] = {"type": "audio_url", "audio_url": {"url": "data:audio/wav;base64,AAAA"}}
_VIDEO: dict[str, Any] = {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}}
_FILE: dict[str, Any] = {"type": "file", "file": {"file_id": "file-1"}}
_GRAMMAR_TOOL = {"type": "custom", "custom": {"name": "patch"}}
_ALLOWED = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [TOOL]}}
_RESPONSES_TOOL: dict[str, Any] = {"type": "function", **FUNCTION}
_RESPONSES_NAMESPACE = {"type": "namespace", "name": "weather", "tools": [_RESPONSES_TOOL]}
_RESPONSES_CALL = {"type": "function_call", "call_id": "1", "name": "get_weather", "arguments": "{}"}
_RESPONSES_RESULT = {"type": "function_call_output", "call_id": "1", "output": "rain"}
_RESPONSES_THOUGHT = {
    "type": "reasoning",
    "id": "r",
    "summary": [],
    "content": [{"type": "reasoning_text", "text": "Hm."}],
}
_RESPONSES_IMAGE = {"role": "user", "content": [{"type": "input_image", "image_url": "https://example.com/a.png"}]}
_RESPONSES_FILE = {"role": "user", "content": [{"type": "input_file", "file_id": "file-1"}]}
_RESPONSES_FORMAT = {"format": {"type": "json_schema", "name": "answer", "schema": SCHEMA}}
_CACHE = {"cache_control": {"type": "ephemeral"}}
_TEXT: dict[str, Any] = {"type": "text", "text": "ho"}
_ANTHROPIC_TOOL: dict[str, Any] = {"name": "get_weather", "description": "Returns the weather.", "input_schema": SCHEMA}
_USE = {"type": "tool_use", "id": "1", "name": "get_weather", "input": {"city": "Oslo"}}
_ANTHROPIC_RESULT = {"type": "tool_result", "tool_use_id": "1", "content": "rain"}
_ANTHROPIC_THOUGHT = {"type": "thinking", "thinking": "Hm.", "signature": ""}
_ANTHROPIC_IMAGE = {"type": "image", "source": {"type": "url", "url": "https://example.com/a.png"}}
_PDF = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "AA=="}}
_NOTE = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "x"}}
_ANTHROPIC_FORMAT = {"format": {"type": "json_schema", "schema": SCHEMA}}


def _says(*blocks: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(blocks)}]


def _answered(*blocks: Any) -> list[dict[str, Any]]:
    return [USER, {"role": "assistant", "content": list(blocks)}, USER]


_TAG: dict[str, Any] = {
    "type": "structural_tag",
    "structures": [{"begin": "<a>", "schema": {"type": "object"}, "end": "</a>"}],
    "triggers": ["<a>"],
}
_OF_VLLM: dict[str, Any] = {
    "top_k": 3,
    "min_p": 0.1,
    "repetition_penalty": 1.5,
    "stop_token_ids": [5],
    "include_stop_str_in_output": Sample(True, stop=["END"]),
    "ignore_eos": Sample(True, max_tokens=5),
    "min_tokens": 2,
    "skip_special_tokens": False,
    "spaces_between_special_tokens": Sample(False, skip_special_tokens=False),
    "truncate_prompt_tokens": 1,
    "truncation_side": "right",
    "prompt_logprobs": 1,
    "allowed_token_ids": [5, 6],
    "bad_words": ["no"],
    "repetition_detection": {"max_pattern_size": 4, "min_count": 3},
    "response_format.structural_tag": _TAG,
    "structured_outputs.json": {"json": {"type": "object"}},
    "structured_outputs.regex": {"regex": "a+"},
    "structured_outputs.choice": {"choice": ["a", "b"]},
    "structured_outputs.grammar": {"grammar": 'root ::= "a"'},
    "structured_outputs.structural_tag": {"structural_tag": _TAG},
    "structured_outputs.json_object": {"json_object": True},
    "structured_outputs.whitespace_pattern": {"json_object": True, "whitespace_pattern": " ?"},
    "structured_outputs.disable_any_whitespace": {"json_object": True, "disable_any_whitespace": True},
    "structured_outputs.disable_fallback": {"json_object": True, "disable_fallback": True},
    "guided_json": {"type": "object"},
    "guided_regex": "a+",
    "guided_choice": ["a", "b"],
    "guided_grammar": 'root ::= "a"',
    "guided_decoding_backend": "xgrammar",
    "priority": 3,
    "request_id": "mine",
    "logits_processors": ["module.name"],
    "return_token_ids": True,
    "cache_salt": "mine",
    "kv_transfer_params": {"do_remote_decode": True},
    "vllm_xargs": {"a": 1},
    "stream_options.continuous_usage_stats": Sample(
        {"include_usage": True, "continuous_usage_stats": True}, stream=True
    ),
    "thinking_token_budget": 4,
    "skip_reading_prefix_cache": True,
    "stream_interval": Sample(4, stream=True),
    "detokenize": Sample(False, return_token_ids=True),
}

SAMPLES: dict[str, Samples] = {
    "OpenAI chat completions": Samples(
        {"messages": [USER]},
        {
            "messages": [USER, {"role": "assistant", "content": "a"}, USER],
            "messages[].content[].text": [{"role": "user", "content": [{"type": "text", "text": "ho"}]}],
            "messages[].name": [USER | {"name": "me"}],
            "messages[].tool_calls": [USER, _CALLING, USER],
            "messages[].tool_call_id": [USER, _CALLING, {"role": "tool", "tool_call_id": "1", "content": "rain"}],
            "messages[].refusal": [USER, {"role": "assistant", "content": None, "refusal": "I will not."}, USER],
            "messages[].content[].refusal": [
                USER,
                {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
                USER,
            ],
            "messages[].content[].image_url": [{"role": "user", "content": [_IMAGE]}],
            "messages[].content[].image_url.detail": [{"role": "user", "content": [_DETAILED]}],
            "messages[].content[].input_audio": [{"role": "user", "content": [_AUDIO]}],
            "messages[].content[].file": [{"role": "user", "content": [_FILE]}],
            "messages[].function_call": [
                USER,
                {"role": "assistant", "function_call": {}}
                | _CALLING
                | {"function_call": {"name": "f", "arguments": "{}"}},
            ],
            "messages[].audio": [USER, {"role": "assistant", "audio": {"id": "a"}}, USER],
            "messages[].annotations": [USER, {"role": "assistant", "content": "a", "annotations": [{}]}, USER],
            "model": "fake",
            "audio": {"voice": "alloy", "format": "wav"},
            "frequency_penalty": 0.5,
            "function_call": {"name": "get_weather"},
            "functions": [FUNCTION],
            "logit_bias": {"5": 2.0},
            "logprobs": True,
            "max_completion_tokens": 9,
            "max_tokens": 9,
            "metadata": {"a": "b"},
            "modalities": ["text", "audio"],
            "n": 2,
            "parallel_tool_calls": Sample(False, tools=[TOOL], tool_choice="required"),
            "prediction": {"type": "content", "content": "x"},
            "presence_penalty": 0.5,
            "prompt_cache_key": "k",
            "prompt_cache_options": {"ttl": "30m"},
            "prompt_cache_options.prewarm": {"prewarm": True},
            "messages[].content[].prompt_cache_breakpoint": [
                {
                    "role": "user",
                    "content": [{"type": "text", "text": "ho", "prompt_cache_breakpoint": {"mode": "explicit"}}],
                }
            ],
            "prompt_cache_retention": "24h",
            "reasoning_effort": "low",
            "response_format": {"type": "json_object"},
            "response_format.json_schema": _JSON_SCHEMA,
            "safety_identifier": "s",
            "seed": 7,
            "service_tier": "flex",
            "stop": ["END"],
            "store": True,
            "stream": True,
            "stream_options.include_usage": Sample({"include_usage": True}, stream=True),
            "stream_options.include_obfuscation": Sample({"include_obfuscation": True}, stream=True),
            "temperature": 0.5,
            "tool_choice": Sample("required", tools=[TOOL]),
            "tool_choice.function": Sample({"type": "function", "function": {"name": "get_weather"}}, tools=[TOOL]),
            "tool_choice.allowed_tools": Sample(
                _ALLOWED, tools=[TOOL, {"type": "function", "function": FUNCTION | {"name": "other"}}]
            ),
            "tools": [TOOL],
            "tools[].function.strict": [STRICT_TOOL],
            "tools[].custom": [_GRAMMAR_TOOL],
            "top_logprobs": Sample(2, logprobs=True),
            "top_p": 0.5,
            "user": "me",
            "verbosity": "low",
            "web_search_options": {},
        },
    ),
    "OpenAI completions": Samples(
        {"prompt": "a"},
        {
            "prompt": ["b", "c"],
            "model": "fake",
            "best_of": 3,
            "echo": True,
            "frequency_penalty": 0.5,
            "logit_bias": {"5": 2.0},
            "logprobs": 2,
            "max_tokens": 9,
            "n": 2,
            "presence_penalty": 0.5,
            "seed": 7,
            "stop": "END",
            "stream": True,
            "stream_options.include_usage": Sample({"include_usage": True}, stream=True),
            "suffix": "b",
            "temperature": 0.5,
            "top_p": 0.5,
            "user": "me",
        },
    ),
    "OpenAI responses": Samples(
        {"input": "hi"},
        {
            "input": [{"role": "user", "content": "ho"}],
            "input[].function_call": [USER, _RESPONSES_CALL, USER],
            "input[].function_call_output": [USER, _RESPONSES_CALL, _RESPONSES_RESULT],
            "input[].reasoning": [USER, _RESPONSES_THOUGHT, {"role": "assistant", "content": "a"}, USER],
            "input[].compaction": [{"type": "compaction", "encrypted_content": "tokenloom-1:SGkh"}, USER],
            "input[].content[].input_image": [_RESPONSES_IMAGE],
            "input[].content[].input_audio": [{"role": "user", "content": [_AUDIO]}],
            "input[].content[].input_file": [_RESPONSES_FILE],
            "input[].item_reference": [USER, {"type": "item_reference", "id": "x"}],
            "background": True,
            "context_management": [{"type": "compaction"}],
            "conversation": "conv_1",
            "include": ["reasoning.encrypted_content"],
            "instructions": "Be brief.",
            "max_output_tokens": 9,
            "max_tool_calls": 3,
            "metadata": {"a": "b"},
            "model": "fake",
            "parallel_tool_calls": Sample(False, tools=[_RESPONSES_TOOL], tool_choice="required"),
            "previous_response_id": "resp_1",
            "prompt": {"id": "pmpt_1"},
            "prompt_cache_key": "k",
            "prompt_cache_options": {"ttl": "30m"},
            "prompt_cache_options.prewarm": {"prewarm": True},
            "input[].content[].prompt_cache_breakpoint": [
                {
                    "role": "user",
                    "content": [{"type": "input_text", "text": "ho", "prompt_cache_breakpoint": {"mode": "explicit"}}],
                }
            ],
            "prompt_cache_retention": "24h",
            "reasoning.effort": {"effort": "low"},
            "reasoning.summary": {"summary": "auto"},
            "reasoning.generate_summary": {"generate_summary": "auto"},
            "safety_identifier": "s",
            "service_tier": "flex",
            "store": False,
            "stream": True,
            "stream_options": Sample({"include_obfuscation": True}, stream=True),
            "temperature": 0.5,
            "text.format": _RESPONSES_FORMAT,
            "text.verbosity": {"verbosity": "low"},
            "tool_choice": Sample("required", tools=[_RESPONSES_TOOL]),
            "tool_choice.name": Sample({"type": "function", "name": "get_weather"}, tools=[_RESPONSES_TOOL]),
            "tools": [_RESPONSES_TOOL],
            "tools[].strict": [_RESPONSES_TOOL | {"strict": True}],
            "tools[].namespace": [_RESPONSES_NAMESPACE],
            "tools[].custom": [{"type": "custom", "name": "patch"}],
            "client_metadata": {"a": "b"},
            "tools[].web_search": [{"type": "web_search"}],
            "tools[].file_search": [{"type": "file_search", "vector_store_ids": ["v"]}],
            "tools[].mcp": [{"type": "mcp", "server_label": "s", "server_url": "https://example.com"}],
            "top_logprobs": 2,
            "top_p": 0.5,
            "truncation": "auto",
            "user": "me",
        },
    ),
    "Anthropic messages": Samples(
        {"max_tokens": 5, "messages": [USER]},
        {
            "messages": _answered(_TEXT),
            "messages[].content[].text": _says(_TEXT),
            "messages[].content[].tool_use": _answered(_USE),
            "messages[].content[].tool_result": [*_answered(_USE)[:2], *_says(_ANTHROPIC_RESULT)],
            "messages[].content[].is_error": [*_answered(_USE)[:2], *_says(_ANTHROPIC_RESULT | {"is_error": True})],
            "messages[].content[].thinking": _answered(_ANTHROPIC_THOUGHT, _TEXT),
            "messages[].content[].document": _says(_NOTE),
            "messages[].content[].image": _says(_ANTHROPIC_IMAGE),
            "messages[].content[].document (PDF)": _says(_PDF),
            "messages[].content[].cache_control": _says(_TEXT | _CACHE),
            "messages[].content[].citations": _says(_NOTE | {"citations": {"enabled": True}}),
            "messages[].content[].title": _says(_NOTE | {"title": "t"}),
            "model": "fake",
            "max_tokens": 9,
            "cache_control": {"type": "ephemeral"},
            "container": "c",
            "context_management": {"edits": [{"type": "clear_thinking_20251015"}]},
            "context_management.edits[].compact_20260112": {"edits": [{"type": "compact_20260112"}]},
            "diagnostics": {"previous_message_id": None},
            "inference_geo": "us",
            "mcp_servers": [{"type": "url", "url": "https://example.com", "name": "s"}],
            "metadata.user_id": {"user_id": "me"},
            "output_config.effort": {"effort": "low"},
            "output_config.format": _ANTHROPIC_FORMAT,
            "output_config.task_budget": {"task_budget": {"type": "tokens", "total": 9}},
            "output_format": _ANTHROPIC_FORMAT["format"],
            "service_tier": "auto",
            "speed": "fast",
            "stop_sequences": ["END"],
            "stream": True,
            "system": "Be brief.",
            "system[].text": [_TEXT],
            "system[].cache_control": [_TEXT | _CACHE],
            "temperature": 0.5,
            "thinking.type": {"type": "enabled", "budget_tokens": 3},
            "thinking.budget_tokens": {"type": "enabled", "budget_tokens": 3},
            "thinking.display": {"type": "adaptive", "display": "omitted"},
            "tool_choice.type": Sample({"type": "any"}, tools=[_ANTHROPIC_TOOL]),
            "tool_choice.name": Sample({"type": "tool", "name": "get_weather"}, tools=[_ANTHROPIC_TOOL]),
            "tool_choice.disable_parallel_tool_use": Sample(
                {"type": "any", "disable_parallel_tool_use": True}, tools=[_ANTHROPIC_TOOL]
            ),
            "tools": [_ANTHROPIC_TOOL],
            "tools[].strict": [_ANTHROPIC_TOOL | {"strict": True}],
            "tools[].cache_control": [_ANTHROPIC_TOOL | _CACHE],
            "tools[].defer_loading": [_ANTHROPIC_TOOL | {"defer_loading": True}],
            "tools[].input_examples": [_ANTHROPIC_TOOL | {"input_examples": [{"city": "Oslo"}]}],
            "tools[].eager_input_streaming": [_ANTHROPIC_TOOL | {"eager_input_streaming": True}],
            "tools[].type": [{"type": "web_search_20250305", "name": "web_search"}],
            "top_k": 3,
            "top_p": 0.5,
        },
    ),
    "Ollama chat": Samples(
        {"model": "fake", "messages": [USER]},
        {
            "messages": [USER, {"role": "assistant", "content": "a"}, USER],
            "messages[].images": [USER | {"images": ["AA=="]}],
            "tools": [TOOL],
            "format": SCHEMA,
            "keep_alive": "5m",
            "options.num_ctx": {"num_ctx": 4096},
            "options.num_predict": {"num_predict": 9},
            "options.repeat_penalty": {"repeat_penalty": 1.5},
            "options.seed": {"seed": 7},
            "options.stop": {"stop": ["END"]},
            "options.temperature": {"temperature": 0.5},
            "options.top_k": {"top_k": 3},
            "stream": False,
            "think": False,
        },
    ),
    "Ollama generate": Samples(
        {"model": "fake", "prompt": "hi"},
        {
            "prompt": "hello",
            "system": "Be brief.",
            "raw": True,
            "images": ["AA=="],
            "suffix": "b",
            "context": [1, 2],
            "template": "{{ .Prompt }}",
            "format": SCHEMA,
            "keep_alive": "5m",
            "options.num_ctx": {"num_ctx": 4096},
            "options.num_predict": {"num_predict": 9},
            "options.repeat_penalty": {"repeat_penalty": 1.5},
            "options.seed": {"seed": 7},
            "options.stop": {"stop": ["END"]},
            "options.temperature": {"temperature": 0.5},
            "options.top_k": {"top_k": 3},
            "stream": False,
            "think": False,
        },
    ),
    "vLLM chat completions": Samples(
        {"messages": [USER]},
        {
            **_OF_VLLM,
            "logprob_token_ids": Sample([5], logprobs=True),
            "return_tokens_as_token_ids": Sample(True, logprobs=True),
            "add_special_tokens": True,
            "echo": True,
            "add_generation_prompt": False,
            "continue_final_message": True,
            "documents": [{"title": "t", "text": "x"}],
            "chat_template": "{{ messages }}",
            "chat_template_kwargs": {"enable_thinking": False},
            "media_io_kwargs": {"image": {}},
            "messages[].content[].audio_url": [{"role": "user", "content": [_AUDIO_URL]}],
            "messages[].content[].video_url": [{"role": "user", "content": [_VIDEO]}],
            "messages[].content[].uuid": [{"role": "user", "content": [{**_IMAGE, "uuid": "sky"}]}],
            "mm_processor_kwargs": Sample({"max_pixels": 9}, messages=[{"role": "user", "content": [_IMAGE]}]),
            "include_reasoning": False,
            "reasoning.effort": {"effort": "low"},
            "reasoning.enabled": {"enabled": False},
            "reasoning.exclude": {"exclude": True},
            "reasoning.max_tokens": {"max_tokens": 5},
            "thinking.type": {"type": "disabled"},
            "thinking.budget_tokens": {"type": "enabled", "budget_tokens": 5},
            "messages[].reasoning_content": [USER, {"role": "assistant", "content": "a", "reasoning_content": "r"}],
            "messages[].reasoning": [USER, {"role": "assistant", "content": "a", "reasoning": "r"}],
        },
    ),
    "vLLM completions": Samples(
        {"prompt": "ab"},
        {
            **_OF_VLLM,
            "logprob_token_ids": Sample([5], logprobs=1),
            "return_tokens_as_token_ids": Sample(True, logprobs=1),
            "add_special_tokens": False,
            "response_format": {"type": "json_object"},
            "prompt_embeds": "AAAA",
            "use_beam_search": True,
            "length_penalty": Sample(2.0, use_beam_search=True),
        },
    ),
    "OpenAI and vLLM embeddings": Samples(
        {"input": "ab"},
        {
            "input": ["a", "bc"],
            "model": "fake",
            "dimensions": 1,
            "encoding_format": "base64",
            "user": "me",
            "truncate_prompt_tokens": 1,
            "truncation_side": Sample("right", truncate_prompt_tokens=1),
            "add_special_tokens": False,
            "normalize": False,
            "use_activation": False,
            "priority": 3,
            "cache_salt": "mine",
            "request_id": "mine",
            "mm_processor_kwargs": {"a": 1},
        },
    ),
    "vLLM embeddings of conversations": Samples(
        {"messages": [USER]},
        {
            "messages": [USER, USER],
            "add_generation_prompt": True,
            "continue_final_message": True,
            "chat_template_kwargs": {"enable_thinking": False},
        },
    ),
}
