"""Lists the request fields of other servers' APIs, and what this gateway does with each.

The gateway reads from the lists which known fields it ignores, the documentation renders them, and
``tests/services/gateway/records/test_compat.py`` sends every field to a gateway and proves what its entry says.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class ForeignApi:
    """Lists the request fields of one API. The member of a field is named by its path, in which ``[]`` stands for any
    item."""

    name: str
    """Server and endpoint."""
    path: str
    """The route of this gateway."""
    works: str
    """The fields that work, separated by white space."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """By refused field, the reason or what to send instead. The request fails with status 400 and an error that names
    the field."""
    ignored: Mapping[str, str] = field(default_factory=dict)
    """By ignored field, the reason or what to send instead. The request succeeds, and its response names the field in
    ``x-tokenloom-ignored``."""


def top_field(name: str) -> str:
    """Return the field of the body that ``name`` is, or that it is a member of."""
    return re.split(r"[.\[]", name)[0]


_NO_ACCOUNTS = "The gateway has no accounts; use API keys."
_ONLY_TEXT = "Models read text only."
_WRITES_TEXT = "Models write text only."
_NO_FILES = "Send text or images."
_STRUCTURED = "Send structured_outputs."
_CACHED_ANYWAY = "Prefixes are cached without it."
_HOSTED = "Tools that run at OpenAI are left out; the model cannot call them."
_SALTED = "Prefixes are cached without it; cache_salt separates them."

_OF_VLLM = """
    top_k min_p repetition_penalty stop_token_ids include_stop_str_in_output ignore_eos min_tokens skip_special_tokens
    spaces_between_special_tokens truncate_prompt_tokens prompt_logprobs allowed_token_ids bad_words
    repetition_detection response_format.structural_tag structured_outputs.json structured_outputs.regex
    structured_outputs.choice structured_outputs.grammar structured_outputs.structural_tag
    structured_outputs.json_object structured_outputs.whitespace_pattern structured_outputs.disable_any_whitespace
    priority return_token_ids cache_salt stream_options.continuous_usage_stats thinking_token_budget
    skip_reading_prefix_cache stream_interval detokenize logprob_token_ids return_tokens_as_token_ids
"""
"""What works in both of vLLM's endpoints."""
_REFUSED_OF_VLLM = {
    "structured_outputs.disable_fallback": "A backend never falls back to another.",
    "guided_json": _STRUCTURED,
    "guided_regex": _STRUCTURED,
    "guided_choice": _STRUCTURED,
    "guided_grammar": _STRUCTURED,
    "logits_processors": "Clients send no code.",
    "vllm_xargs": "Only what plugins of the engines declare is read (--plugins).",
    "kv_transfer_params": "The mesh places prefill and decode itself.",
}
_IGNORED_OF_VLLM = {
    "truncation_side": "The last tokens are kept.",
    "guided_decoding_backend": "Engines choose it (--structured-outputs-backend).",
    "request_id": "Send the header x-request-id.",
}

FOREIGN_APIS = (
    ForeignApi(
        "OpenAI chat completions",
        "/v1/chat/completions",
        """
        messages messages[].content[].text messages[].content[].image_url messages[].content[].input_audio
        messages[].name
        messages[].tool_calls messages[].tool_call_id
        messages[].refusal messages[].content[].refusal model frequency_penalty logit_bias logprobs
        max_completion_tokens max_tokens n parallel_tool_calls presence_penalty prompt_cache_key
        prompt_cache_options messages[].content[].prompt_cache_breakpoint reasoning_effort
        response_format response_format.json_schema seed stop stream stream_options.include_usage temperature
        tool_choice tool_choice.function tool_choice.allowed_tools tools tools[].function.strict top_logprobs top_p
        """,
        refused={
            "messages[].content[].file": _NO_FILES,
            "messages[].function_call": "Obsolete; send tool_calls.",
            "messages[].audio": _WRITES_TEXT,
            "audio": _WRITES_TEXT,
            "function_call": "Obsolete; send tool_choice.",
            "functions": "Obsolete; send tools.",
            "modalities": 'Only ["text"].',
            "prediction": "See speculative decoding for what drafts tokens.",
            "tools[].custom": "Only functions.",
        },
        ignored={
            "messages[].content[].image_url.detail": "mm_processor_kwargs sets the pixels.",
            "messages[].annotations": "Templates have no citations.",
            "metadata": "Chats are not stored; /v1/responses returns it.",
            "prompt_cache_options.prewarm": "Ask with the prompt and few max_tokens.",
            "prompt_cache_retention": _SALTED,
            "safety_identifier": _NO_ACCOUNTS,
            "service_tier": "Use priority.",
            "store": "Chats are not stored; /v1/responses stores.",
            "stream_options.include_obfuscation": "Nothing is padded.",
            "user": _NO_ACCOUNTS,
            "verbosity": "Ask for it in the conversation.",
            "web_search_options": "The gateway does not search the web.",
        },
    ),
    ForeignApi(
        "OpenAI completions",
        "/v1/completions",
        """
        prompt model echo frequency_penalty logit_bias logprobs max_tokens n presence_penalty seed stop stream
        stream_options.include_usage temperature top_p
        """,
        refused={
            "best_of": "Only the value of n.",
            "suffix": "Models continue text only.",
        },
        ignored={
            "user": _NO_ACCOUNTS,
        },
    ),
    ForeignApi(
        "OpenAI responses",
        "/v1/responses",
        """
        input input[].content[].input_image input[].content[].input_audio input[].function_call
        input[].function_call_output input[].reasoning
        input[].compaction conversation
        background instructions
        max_output_tokens metadata model parallel_tool_calls previous_response_id prompt_cache_key
        prompt_cache_options input[].content[].prompt_cache_breakpoint
        reasoning.effort store stream temperature text.format tool_choice tool_choice.name tools tools[].strict
        tools[].namespace top_p
        """,
        refused={
            "input[].content[].input_file": _NO_FILES,
            "input[].item_reference": "Send the item itself.",
            "prompt": "Templates of prompts are not stored.",
            "tools[].custom": "Send functions.",
            "top_logprobs": "Use /v1/chat/completions.",
        },
        ignored={
            "truncation": "A longer input is refused, as with disabled.",
            "context_management": "The client shortens its conversation.",
            "include": "Reasoning is returned as text.",
            "max_tool_calls": "Limits the calls of tools of MCP servers, if the operator names any (--mcp-servers).",
            "prompt_cache_options.prewarm": "Ask with the prompt and few max_output_tokens.",
            "prompt_cache_retention": _CACHED_ANYWAY,
            "reasoning.summary": "Reasoning is returned in full.",
            "reasoning.generate_summary": "Reasoning is returned in full.",
            "safety_identifier": _NO_ACCOUNTS,
            "service_tier": "Use priority.",
            "stream_options": "Nothing is padded.",
            "text.verbosity": "Ask for it in the conversation.",
            "client_metadata": "Use API keys.",
            "tools[].web_search": _HOSTED,
            "tools[].file_search": _HOSTED,
            "tools[].mcp": "Left out unless the operator names the server (--mcp-servers).",
            "user": _NO_ACCOUNTS,
        },
    ),
    ForeignApi(
        "Anthropic messages",
        "/v1/messages",
        """
        messages messages[].content[].text messages[].content[].image messages[].content[].tool_use
        messages[].content[].tool_result
        messages[].content[].is_error messages[].content[].thinking messages[].content[].document
        metadata.user_id model max_tokens
        output_config.effort output_config.format output_format stop_sequences stream system system[].text temperature
        thinking.type thinking.budget_tokens tool_choice.type tool_choice.name tool_choice.disable_parallel_tool_use
        tools tools[].strict top_k top_p context_management diagnostics cache_control
        messages[].content[].cache_control system[].cache_control tools[].cache_control
        """,
        refused={
            "messages[].content[].document (PDF)": "Plain text only.",
            "mcp_servers": "The client runs tools.",
            "tools[].type": "The client runs tools.",
        },
        ignored={
            "messages[].content[].citations": "No citations.",
            "messages[].content[].title": "Only the document's text is read.",
            "container": "No code runs at the server.",
            "context_management.edits[].compact_20260112": "The client compacts its conversation.",
            "inference_geo": "The mesh runs where it is.",
            "output_config.task_budget": "Use max_tokens.",
            "service_tier": "Use priority.",
            "speed": "Use priority.",
            "thinking.display": "Thinking is returned in full.",
            "tools[].defer_loading": "All tools are in the prompt.",
            "tools[].input_examples": "Not in templates.",
            "tools[].eager_input_streaming": "Arguments are always streamed as they come.",
        },
    ),
    ForeignApi(
        "Ollama chat",
        "/api/chat",
        """
        messages messages[].images tools format options.num_predict options.repeat_penalty options.seed options.stop
        options.temperature options.top_k stream think
        """,
        ignored={
            "keep_alive": "The model stays loaded.",
            "options.num_ctx": "Operators set --max-model-len.",
        },
    ),
    ForeignApi(
        "Ollama generate",
        "/api/generate",
        """
        prompt images system raw format options.num_predict options.repeat_penalty options.seed options.stop
        options.temperature options.top_k stream think
        """,
        refused={
            "suffix": "Models continue, they do not fill in.",
        },
        ignored={
            "context": "Send the conversation to /api/chat.",
            "keep_alive": "The model stays loaded.",
            "options.num_ctx": "Operators set --max-model-len.",
            "template": "Operators choose the template.",
        },
    ),
    ForeignApi(
        "vLLM chat completions",
        "/v1/chat/completions",
        _OF_VLLM
        + """
        add_generation_prompt continue_final_message documents chat_template_kwargs include_reasoning reasoning.effort
        reasoning.enabled reasoning.exclude thinking.type messages[].reasoning_content messages[].reasoning
        mm_processor_kwargs messages[].content[].uuid messages[].content[].audio_url messages[].content[].video_url
        """,
        refused={
            **_REFUSED_OF_VLLM,
            "add_special_tokens": "Templates add their own.",
            "echo": "Only in completions.",
            "chat_template": "Operators choose the template.",
        },
        ignored={
            **_IGNORED_OF_VLLM,
            "media_io_kwargs": "Send mm_processor_kwargs for the frames of videos.",
            "reasoning.max_tokens": "Send thinking_token_budget.",
            "thinking.budget_tokens": "Send thinking_token_budget.",
        },
    ),
    ForeignApi(
        "vLLM completions",
        "/v1/completions",
        _OF_VLLM + "add_special_tokens response_format use_beam_search length_penalty",
        refused={
            **_REFUSED_OF_VLLM,
            "prompt_embeds": "Only if engines accept embeddings (--enable-prompt-embeds).",
        },
        ignored=_IGNORED_OF_VLLM,
    ),
    ForeignApi(
        "OpenAI and vLLM embeddings",
        "/v1/embeddings",
        """
        input model dimensions encoding_format truncate_prompt_tokens truncation_side add_special_tokens normalize
        use_activation priority cache_salt
        """,
        ignored={
            "user": "Keys identify tenants.",
            "request_id": "Send the header x-request-id.",
            "mm_processor_kwargs": _ONLY_TEXT,
        },
    ),
    ForeignApi(
        "vLLM embeddings of conversations",
        "/v1/embeddings",
        "messages add_generation_prompt continue_final_message chat_template_kwargs",
    ),
)

# One list serves the gateway, the documentation and the tests, so that an entry that is not true fails a test, and
# clients learn from each response which of their fields had no effect.
IGNORED_FIELDS = frozenset(name for api in FOREIGN_APIS for name in api.ignored if name == top_field(name))
"""The fields of bodies that some API ignores; not the members of such fields."""


@dataclass(frozen=True, slots=True)
class Exclusion:
    """Fields that work each by itself, and not together."""

    one: str
    """The fields of which one, separated by white space, stands beside one of ``other``."""
    other: str
    reason: str
    gives_way: bool = False
    """Whether those of ``other`` have no effect then, and are named in ``x-tokenloom-ignored``; otherwise the request
    is refused with status 400."""


EXCLUSIONS = (
    Exclusion("response_format", "structured_outputs", "Each is the constraint of the whole output."),
    Exclusion("stop include_stop_str_in_output", "detokenize", "Stop strings are found in the text."),
    Exclusion(
        "stream stream_options stream_interval", "prompt_logprobs", "They come with the whole answer, before its text."
    ),
    Exclusion("use_beam_search length_penalty", "stream stream_options stream_interval", "Beams are known at the end."),
    Exclusion(
        "use_beam_search length_penalty",
        "stop include_stop_str_in_output spaces_between_special_tokens",
        "Beams end with an end token, and their text is made at the end.",
    ),
    Exclusion(
        "use_beam_search length_penalty",
        "frequency_penalty presence_penalty repetition_penalty logit_bias min_tokens allowed_token_ids bad_words",
        "Beams are compared by the model's own probabilities.",
    ),
    Exclusion(
        "use_beam_search length_penalty",
        "response_format structured_outputs thinking_token_budget repetition_detection prompt_logprobs "
        "logprob_token_ids",
        "Each step of a search is a request of one token, which knows nothing of the beam's past.",
    ),
    Exclusion("truncate_prompt_tokens", "mm_processor_kwargs", "A prompt with images or sounds is not cut."),
    Exclusion("background", "store", "A response in the background is stored, and fetched later."),
    Exclusion("input", "messages", "Vectors are of texts or of one conversation."),
    Exclusion(
        "tool_choice",
        "response_format structured_outputs text output_config output_format",
        "A call that is forced wins, as with vLLM: the arguments are all of the output.",
        gives_way=True,
    ),
    Exclusion(
        "structured_outputs",
        "guided_json guided_regex guided_choice guided_grammar",
        "They are its old names, which some clients send as well.",
        gives_way=True,
    ),
)
