"""Lists the request fields that vLLM adds to OpenAI's chat completions and completions."""

from collections.abc import Sequence
from typing import Any

from .foreign_field import ForeignApi, ForeignField, ignored, refused, works
from .openai_fields import USER

_NO_IMAGES = "Models read text only."
_TAG: dict[str, Any] = {
    "type": "structural_tag",
    "structures": [{"begin": "<a>", "schema": {"type": "object"}, "end": "</a>"}],
    "triggers": ["<a>"],
}

_COMMON: Sequence[ForeignField] = (
    works("top_k", 3),
    works("min_p", 0.1),
    works("repetition_penalty", 1.5),
    works("stop_token_ids", [5]),
    works("include_stop_str_in_output", True, stop=["END"]),
    works("ignore_eos", True, max_tokens=5),
    works("min_tokens", 2),
    works("skip_special_tokens", False),
    works("spaces_between_special_tokens", False, skip_special_tokens=False),
    works("truncate_prompt_tokens", 1),
    ignored("truncation_side", "right", "The last tokens are kept."),
    works("prompt_logprobs", 1),
    works("allowed_token_ids", [5, 6]),
    works("bad_words", ["no"]),
    works("repetition_detection", {"max_pattern_size": 4, "min_count": 3}),
    works("response_format.structural_tag", _TAG),
    works("structured_outputs.json", {"json": {"type": "object"}}),
    works("structured_outputs.regex", {"regex": "a+"}),
    works("structured_outputs.choice", {"choice": ["a", "b"]}),
    works("structured_outputs.grammar", {"grammar": 'root ::= "a"'}),
    works("structured_outputs.structural_tag", {"structural_tag": _TAG}),
    works("structured_outputs.json_object", {"json_object": True}),
    works("structured_outputs.whitespace_pattern", {"json_object": True, "whitespace_pattern": " ?"}),
    works(
        "structured_outputs.disable_any_whitespace",
        {"json_object": True, "disable_any_whitespace": True},
    ),
    refused(
        "structured_outputs.disable_fallback",
        {"json_object": True, "disable_fallback": True},
        "A backend never falls back to another.",
    ),
    refused("guided_json", {"type": "object"}, "Send structured_outputs."),
    refused("guided_regex", "a+", "Send structured_outputs."),
    refused("guided_choice", ["a", "b"], "Send structured_outputs."),
    refused("guided_grammar", 'root ::= "a"', "Send structured_outputs."),
    ignored("guided_decoding_backend", "xgrammar", "Engines choose it (--structured-outputs-backend)."),
    works("priority", 3),
    ignored("request_id", "mine", "Send the header x-request-id."),
    refused("logits_processors", ["module.name"], "Clients send no code."),
    works("return_token_ids", True),
    works("cache_salt", "mine"),
    refused("kv_transfer_params", {"do_remote_decode": True}, "The mesh places prefill and decode itself."),
    refused("vllm_xargs", {"a": 1}, "There are no extensions that would read it."),
    works(
        "stream_options.continuous_usage_stats",
        {"include_usage": True, "continuous_usage_stats": True},
        stream=True,
    ),
    works("thinking_token_budget", 4),
    works("skip_reading_prefix_cache", True),
    works("stream_interval", 4, stream=True),
    works("detokenize", False, return_token_ids=True),
)


CHAT = ForeignApi(
    "vLLM chat completions",
    "/v1/chat/completions",
    {"messages": [USER]},
    (
        *_COMMON,
        works("logprob_token_ids", [5], logprobs=True),
        works("return_tokens_as_token_ids", True, logprobs=True),
        refused("add_special_tokens", True, "Templates add their own."),
        refused("echo", True, "Only in completions."),
        works("add_generation_prompt", False),
        works("continue_final_message", True),
        works("documents", [{"title": "t", "text": "x"}]),
        refused("chat_template", "{{ messages }}", "Operators choose the template."),
        works("chat_template_kwargs", {"enable_thinking": False}),
        ignored("media_io_kwargs", {"image": {}}, _NO_IMAGES),
        ignored("mm_processor_kwargs", {"a": 1}, _NO_IMAGES),
        works("include_reasoning", False),
        works("reasoning.effort", {"effort": "low"}),
        works("reasoning.enabled", {"enabled": False}),
        works("reasoning.exclude", {"exclude": True}),
        ignored("reasoning.max_tokens", {"max_tokens": 5}, "Send thinking_token_budget."),
        works("thinking.type", {"type": "disabled"}),
        ignored("thinking.budget_tokens", {"type": "enabled", "budget_tokens": 5}, "Send thinking_token_budget."),
        works(
            "messages[].reasoning_content",
            [USER, {"role": "assistant", "content": "a", "reasoning_content": "r"}],
        ),
        works(
            "messages[].reasoning",
            [USER, {"role": "assistant", "content": "a", "reasoning": "r"}],
        ),
    ),
)

COMPLETIONS = ForeignApi(
    "vLLM completions",
    "/v1/completions",
    {"prompt": "ab"},
    (
        *_COMMON,
        works("logprob_token_ids", [5], logprobs=1),
        works("return_tokens_as_token_ids", True, logprobs=1),
        works("add_special_tokens", False),
        works("response_format", {"type": "json_object"}),
        refused("prompt_embeds", "AAAA", "Only if engines accept embeddings (--enable-prompt-embeds)."),
        works("use_beam_search", True),
        works("length_penalty", 2.0, use_beam_search=True),
    ),
)
