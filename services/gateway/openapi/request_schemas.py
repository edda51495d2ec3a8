"""Request bodies as the API's description tells them; what is read and refused is decided where bodies are read.

A test holds both to the same fields.
"""

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from .constraints import INTEGER_OR_FALSE, PROMPT, TOOL, TURN

Turn = Annotated[dict[str, Any], Meta(extra_json_schema=dict(TURN))]
Tool = Annotated[dict[str, Any], Meta(extra_json_schema=dict(TOOL))]


class StreamOptions(msgspec.Struct, kw_only=True):
    """What a stream tells besides text."""

    include_usage: Annotated[bool | None, Meta(description="End with an event that carries the usage.")] = None
    continuous_usage_stats: Annotated[
        bool | None, Meta(description="With include_usage: carry the usage so far in every event.")
    ] = None


class RepetitionDetection(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Ends an output that repeats itself, with finish reason `repetition`."""

    max_pattern_size: Annotated[int, Meta(ge=0, le=1024, description="Longest pattern, tokens; 0: off.")] = 0
    min_pattern_size: Annotated[int, Meta(ge=0, description="Shortest pattern, tokens, at most the longest; 0: 1.")] = 0
    min_count: Annotated[int, Meta(ge=0, description="Times in a row, from 2 to 1024.")] = 0


class SamplingFields(msgspec.Struct, kw_only=True):
    """How tokens are drawn; vLLM's names beside OpenAI's. Null: the model's default."""

    max_tokens: Annotated[int | None, Meta(description="Most tokens to generate.")] = None
    min_tokens: Annotated[int | None, Meta(description="No end before so many tokens.")] = None
    temperature: Annotated[float | None, Meta(description="At least 0; 0 takes the likeliest token.")] = None
    top_p: Annotated[float | None, Meta(description="Above 0, at most 1: likeliest tokens of this probability.")] = None
    top_k: Annotated[int | None, Meta(description="Likeliest so many tokens; 0 or -1: all.")] = None
    min_p: Annotated[
        float | None, Meta(description="From 0 to 1: tokens at least this likely beside the likeliest.")
    ] = None
    seed: Annotated[int | None, Meta(description="64 bits. The same seed draws the same tokens.")] = None
    presence_penalty: Annotated[float | None, Meta(description="From -2 to 2: for tokens that were generated.")] = None
    frequency_penalty: Annotated[float | None, Meta(description="From -2 to 2: for each time they were.")] = None
    repetition_penalty: Annotated[
        float | None, Meta(description="Above 0: divides logits of tokens in the prompt or the output.")
    ] = None
    stop_token_ids: Annotated[list[int] | None, Meta(description="Tokens that end the output, at most 1024.")] = None
    prompt_logprobs: Annotated[
        Any,
        Meta(
            description="Alternatives to tell for each token of the prompt; not in a stream.",
            extra_json_schema=INTEGER_OR_FALSE,
        ),
    ] = None
    logprob_token_ids: Annotated[
        list[int] | None, Meta(description="With logprobs: tokens to tell at each position.")
    ] = None
    logit_bias: Annotated[
        dict[str, float] | None, Meta(description="Token id to what is added to its logit, from -100 to 100.")
    ] = None
    allowed_token_ids: Annotated[list[int] | None, Meta(description="The only tokens that may be drawn.")] = None
    repetition_detection: Annotated[RepetitionDetection | None, Meta(description="Ends repetitive outputs.")] = None
    skip_reading_prefix_cache: Annotated[bool | None, Meta(description="Compute the whole prompt anew.")] = None
    thinking_token_budget: Annotated[None, Meta(description="Not supported yet.")] = None
    extra_args: Annotated[dict[str, Any] | None, Meta(description="Not supported yet, but for an empty object.")] = None
    structured_outputs: Annotated[
        dict[str, Any] | None,
        Meta(description="What the output must be: exactly one of json, json_object, regex, choice, grammar."),
    ] = None


class CommonFields(SamplingFields, kw_only=True):
    """Fields of both endpoints that generate."""

    model: Annotated[str | None, Meta(description="The served model; null: that one.")] = None
    stream: Annotated[bool | None, Meta(description="Answer with server-sent events.")] = None
    stream_options: Annotated[StreamOptions | None, Meta(description="Only with stream.")] = None
    stop: Annotated[str | list[str] | None, Meta(description="Texts that end the output, at most 16.")] = None
    include_stop_str_in_output: Annotated[bool | None, Meta(description="Keep the stop string.")] = None
    skip_special_tokens: Annotated[bool | None, Meta(description="Leave special tokens out (default).")] = None
    ignore_eos: Annotated[bool | None, Meta(description="Go on after an end of sequence.")] = None
    return_token_ids: Annotated[bool | None, Meta(description="Tell token ids of prompt and output.")] = None
    return_timeline: Annotated[bool | None, Meta(description="Tell where the request's time went.")] = None
    n: Annotated[int | None, Meta(description="Samples of each prompt, from 1 to 128.")] = None
    bad_words: Annotated[list[str] | None, Meta(description="Texts that must not appear.")] = None
    truncate_prompt_tokens: Annotated[
        int | None, Meta(description="Only the prompt's last tokens, so many; -1: as many as leave room.")
    ] = None
    add_special_tokens: Annotated[
        bool | None, Meta(description="Encode prompts with a beginning of sequence (default); for chats only false.")
    ] = None
    detokenize: Annotated[bool | None, Meta(description="False: no text, token ids only.")] = None
    spaces_between_special_tokens: Annotated[bool | None, Meta(description="With special tokens in the text.")] = None
    stream_interval: Annotated[int | None, Meta(description="Tokens in an event, at least 1.")] = None
    return_tokens_as_token_ids: Annotated[bool | None, Meta(description="Logprobs tell tokens as token_id:….")] = None
    response_format: Annotated[
        dict[str, Any] | None,
        Meta(description='{"type": "text" | "json_object" | "json_schema", "json_schema": {"schema": …}}.'),
    ] = None
    priority: Annotated[int | None, Meta(description="Lower runs first, where engines take priorities.")] = None


class CompletionRequest(CommonFields, kw_only=True):
    """Continues prompts."""

    prompt: Annotated[
        Any,
        Meta(
            description="One prompt or several, as text or token ids.",
            extra_json_schema=dict(PROMPT),  # of which msgspec has no type: lists of several kinds
        ),
    ] = None
    prompt_embeds: Annotated[
        Any,
        Meta(description="Instead of a prompt: base64 of a safetensors file, or lists of such parts and token ids."),
    ] = None
    best_of: Annotated[int | None, Meta(description="Only equal to n.")] = None
    logprobs: Annotated[
        Any,
        Meta(description="Alternatives to tell at each position; false: none.", extra_json_schema=INTEGER_OR_FALSE),
    ] = None
    echo: Annotated[bool | None, Meta(description="The prompt before the output.")] = None


class ChatCompletionRequest(CommonFields, kw_only=True):
    """Answers in a conversation."""

    messages: Annotated[
        list[Turn],
        Meta(
            min_length=1,
            description="Turns: role (system, developer, user, assistant, tool), content (text or parts of text), "
            "tool_calls, tool_call_id, name, reasoning_content.",
        ),
    ]
    max_completion_tokens: Annotated[int | None, Meta(description="Newer name of max_tokens, and wins.")] = None
    add_generation_prompt: Annotated[bool | None, Meta(description="End with the assistant's opening (default).")] = (
        None
    )
    chat_template_kwargs: Annotated[
        dict[str, Any] | None, Meta(description="What the chat template documents, such as enable_thinking.")
    ] = None
    logprobs: Annotated[bool | None, Meta(description="Tell log probabilities of the output.")] = None
    top_logprobs: Annotated[int | None, Meta(description="With logprobs: alternatives at each position.")] = None
    tools: Annotated[list[Tool] | None, Meta(description="Functions that the model may call, at most 128.")] = None
    tool_choice: Annotated[
        str | dict[str, Any] | None,
        Meta(description='"none", "auto", "required" or {"type": "function", "function": {"name": …}}.'),
    ] = None
    parallel_tool_calls: Annotated[bool | None, Meta(description="False: one call at most.")] = None
    include_reasoning: Annotated[bool | None, Meta(description="False: leave the model's reasoning out.")] = None


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """A prompt or a conversation to encode; exactly one of them."""

    model: Annotated[str | None, Meta(description="The served model; null: that one.")] = None
    prompt: Annotated[str | None, Meta(description="A text.")] = None
    messages: Annotated[Annotated[list[Turn], Meta(min_length=1)] | None, Meta(description="A conversation.")] = None
    add_special_tokens: Annotated[bool | None, Meta(description="Of texts; for chats only false.")] = None
    return_token_strs: Annotated[bool | None, Meta(description="Tell the tokens' strings.")] = None
    add_generation_prompt: Annotated[bool | None, Meta(description="End with the assistant's opening.")] = None
    chat_template_kwargs: Annotated[dict[str, Any] | None, Meta(description="For the chat template.")] = None
    tools: Annotated[list[Tool] | None, Meta(description="Functions that the template writes.")] = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """Token ids to decode."""

    model: Annotated[str | None, Meta(description="The served model; null: that one.")] = None
    tokens: Annotated[list[Annotated[int, Meta(ge=0, lt=2**32)]], Meta(description="Token ids.")]
