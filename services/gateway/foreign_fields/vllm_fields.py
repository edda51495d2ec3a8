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
    works("top_k", 3, "Sampling parameter."),
    works("min_p", 0.1, "Sampling parameter."),
    works("repetition_penalty", 1.5, "Sampling parameter."),
    works("stop_token_ids", [5], "Tokens that end the output."),
    works("include_stop_str_in_output", True, "Keeps the stop string.", stop=["END"]),
    works("ignore_eos", True, "Continues after an end-of-sequence token.", max_tokens=5),
    works("min_tokens", 2, "Tokens before which no stop token may come."),
    works("skip_special_tokens", False, "Keeps special tokens in the text."),
    works("spaces_between_special_tokens", False, "No spaces around special tokens.", skip_special_tokens=False),
    works("truncate_prompt_tokens", 1, "Keeps only the prompt's last tokens."),
    ignored("truncation_side", "right", "The last tokens are kept."),
    works("prompt_logprobs", 1, "Log probabilities of the prompt; not in streams."),
    works("allowed_token_ids", [5, 6], "The only tokens that may be drawn."),
    works("bad_words", ["no"], "Texts that must not appear."),
    works("repetition_detection", {"max_pattern_size": 4, "min_count": 3}, "Ends outputs that repeat themselves."),
    works("response_format.structural_tag", _TAG, "Constrains parts of the output."),
    works("structured_outputs.json", {"json": {"type": "object"}}, "Constrains the output."),
    works("structured_outputs.regex", {"regex": "a+"}, "Constrains the output."),
    works("structured_outputs.choice", {"choice": ["a", "b"]}, "Constrains the output."),
    works("structured_outputs.grammar", {"grammar": 'root ::= "a"'}, "Constrains the output."),
    works("structured_outputs.structural_tag", {"structural_tag": _TAG}, "Constrains parts of the output."),
    works("structured_outputs.json_object", {"json_object": True}, "Constrains the output."),
    works("structured_outputs.whitespace_pattern", {"json_object": True, "whitespace_pattern": " ?"}, "As in vLLM."),
    works(
        "structured_outputs.disable_any_whitespace",
        {"json_object": True, "disable_any_whitespace": True},
        "As in vLLM.",
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
    works("priority", 3, "Lower runs first; refused if engines do not schedule by priority."),
    ignored("request_id", "mine", "Send the header x-request-id."),
    refused("logits_processors", ["module.name"], "Clients send no code."),
    works("return_token_ids", True, "Returns the ids of prompt and output."),
    works("cache_salt", "mine", "Separates cached prefixes within the tenant."),
    refused("kv_transfer_params", {"do_remote_decode": True}, "The mesh places prefill and decode itself."),
    refused("vllm_xargs", {"a": 1}, "There are no extensions that would read it."),
    works(
        "stream_options.continuous_usage_stats",
        {"include_usage": True, "continuous_usage_stats": True},
        "Usage in every event.",
        stream=True,
    ),
    works("thinking_token_budget", 4, "Ends the reasoning of models whose reasoning is parsed."),
    works("skip_reading_prefix_cache", True, "Computes the whole prompt."),
    works("stream_interval", 4, "Tokens between two events.", stream=True),
    works("detokenize", False, "Returns token ids and no text.", return_token_ids=True),
)


CHAT = ForeignApi(
    "vLLM chat completions",
    "/v1/chat/completions",
    {"messages": [USER]},
    (
        *_COMMON,
        works("logprob_token_ids", [5], "Tokens whose log probabilities are returned.", logprobs=True),
        works("return_tokens_as_token_ids", True, "Writes tokens of logprobs as token_id:5.", logprobs=True),
        refused("add_special_tokens", True, "Templates add their own."),
        refused("echo", True, "Only in completions."),
        works("add_generation_prompt", False, "Does not open the assistant's turn."),
        works("continue_final_message", True, "Continues the last message."),
        works("documents", [{"title": "t", "text": "x"}], "Variable of the chat template."),
        refused("chat_template", "{{ messages }}", "Operators choose the template."),
        works("chat_template_kwargs", {"enable_thinking": False}, "Variables of the chat template."),
        ignored("media_io_kwargs", {"image": {}}, _NO_IMAGES),
        ignored("mm_processor_kwargs", {"a": 1}, _NO_IMAGES),
        works("include_reasoning", False, "Leaves the reasoning out."),
        works("reasoning.effort", {"effort": "low"}, "Variable of the chat template, as OpenRouter has it."),
        works("reasoning.enabled", {"enabled": False}, "Variable enable_thinking of the chat template."),
        works("reasoning.exclude", {"exclude": True}, "Leaves the reasoning out."),
        ignored("reasoning.max_tokens", {"max_tokens": 5}, "Send thinking_token_budget."),
        works("thinking.type", {"type": "disabled"}, "Variable enable_thinking of the chat template."),
        ignored("thinking.budget_tokens", {"type": "enabled", "budget_tokens": 5}, "Send thinking_token_budget."),
        works(
            "messages[].reasoning_content",
            [USER, {"role": "assistant", "content": "a", "reasoning_content": "r"}],
            "Past reasoning reaches the chat template.",
        ),
        works(
            "messages[].reasoning",
            [USER, {"role": "assistant", "content": "a", "reasoning": "r"}],
            "Past reasoning reaches the chat template.",
        ),
    ),
)

COMPLETIONS = ForeignApi(
    "vLLM completions",
    "/v1/completions",
    {"prompt": "ab"},
    (
        *_COMMON,
        works("logprob_token_ids", [5], "Tokens whose log probabilities are returned.", logprobs=1),
        works("return_tokens_as_token_ids", True, "Writes tokens of logprobs as token_id:5.", logprobs=1),
        works("add_special_tokens", False, "Encodes prompts without the special tokens."),
        works("response_format", {"type": "json_object"}, "Constrains the output."),
        refused("prompt_embeds", "AAAA", "Only if engines accept embeddings (--enable-prompt-embeds)."),
        works("use_beam_search", True, "Searches the likeliest outputs; not in streams."),
        works("length_penalty", 2.0, "Exponent of the length by which scores are divided.", use_beam_search=True),
    ),
)
