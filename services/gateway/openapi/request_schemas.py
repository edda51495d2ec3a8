"""Defines the request bodies of the HTTP API, for reading and for the OpenAPI document alike.

Sampling parameters are not fields of the bodies: they are read, and described, by their table. Fields whose values are
checked by the code that uses them are typed ``Any`` and carry the schema of what is accepted.
"""

from collections.abc import Collection
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from tokenloom.request.beam_search import MAX_LENGTH_PENALTY
from tokenloom.request.limits import MAX_TTFT_DEADLINE
from tokenloom.request.sampling_params import GenerationFields, SamplingFields

from .constraints import INTEGER, INTEGER_OR_FALSE, PROMPT, TOOL, TOOL_CHOICE, TURN

Turns = Annotated[list[dict[str, Any]], Meta(extra_json_schema={"items": TURN, "minItems": 1})]
Tools = Annotated[Any, Meta(extra_json_schema={"anyOf": [{"type": "array", "items": TOOL}, {"type": "null"}]})]


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What a stream contains in addition to text."""

    include_usage: Annotated[bool | None, Meta(description="End with an event that carries the usage.")] = None
    continuous_usage_stats: Annotated[
        bool | None, Meta(description="With include_usage: carry the usage so far in every event.")
    ] = None


class CommonFields(msgspec.Struct, frozen=True, kw_only=True):
    """Fields that both endpoints share and the gateway itself reads."""

    model: Annotated[str | None, Meta(description="Name of the served model; null: that model.")] = None
    stream: Annotated[bool | None, Meta(description="Answer with server-sent events.")] = None
    stream_options: Annotated[StreamOptions | None, Meta(description="Only with stream.")] = None
    return_token_ids: Annotated[bool | None, Meta(description="Return the token ids of prompt and output.")] = None
    return_timeline: Annotated[bool | None, Meta(description="Return where the request spent its time.")] = None
    truncate_prompt_tokens: Annotated[
        Any,
        Meta(
            description="Keep only so many of the prompt's last tokens; -1: as many as leave room for the answer.",
            extra_json_schema=INTEGER,
        ),
    ] = None
    add_special_tokens: Annotated[
        bool | None, Meta(description="Begin prompts with the special tokens (default); for chats only false.")
    ] = None
    return_tokens_as_token_ids: Annotated[bool | None, Meta(description="Write tokens in logprobs as token_id:….")] = (
        None
    )
    response_format: Annotated[
        Any,
        Meta(
            description='{"type": "text" | "json_object" | "json_schema" | "structural_tag", "json_schema": '
            '{"schema": …}}; a structural_tag has a format, or structures and triggers.',
            extra_json_schema={"anyOf": [{"type": "object"}, {"type": "null"}]},
        ),
    ] = None
    priority: Annotated[
        Annotated[int, Meta(ge=-(2**31), lt=2**31)] | None,
        Meta(description="Lower runs first, if engines schedule by priority."),
    ] = None
    ttft_deadline: Annotated[
        Annotated[float, Meta(gt=0, le=MAX_TTFT_DEADLINE)] | None,
        Meta(
            description="Seconds in which the first token must come; refused at once, with 503 and Retry-After, unless "
            "that can be promised."
        ),
    ] = None
    use_beam_search: Annotated[
        bool | None, Meta(description="Search the n likeliest outputs instead of sampling; not in streams.")
    ] = None
    length_penalty: Annotated[
        Annotated[float, Meta(ge=-MAX_LENGTH_PENALTY, le=MAX_LENGTH_PENALTY)] | None,
        Meta(description="With use_beam_search: exponent of the length by which scores are divided; default 1."),
    ] = None
    cache_salt: Annotated[
        Annotated[str, Meta(min_length=1, max_length=256)] | None,
        Meta(description="Share cached prefixes only with the same tenant's requests that have this salt too."),
    ] = None
    prompt_cache_key: Annotated[
        str | None,
        Meta(description="Names the session: its next turn runs where its beginning is cached. Only a hint."),
    ] = None
    vllm_xargs: Annotated[dict[str, Any] | None, Meta(description="vLLM's name of extra_args.")] = None
    # Described in the table of sampling parameters:
    stop: str | list[str] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    detokenize: bool | None = None
    ignore_eos: bool | None = None
    n: Any = None
    stream_interval: Any = None
    bad_words: list[str] | None = None


class CompletionRequest(CommonFields, frozen=True, kw_only=True):
    """Continues prompts."""

    prompt: Annotated[
        Any, Meta(description="One prompt or several, as text or token ids.", extra_json_schema=dict(PROMPT))
    ] = None
    prompt_embeds: Annotated[
        Any,
        Meta(description="Instead of a prompt: base64 of a safetensors file, or lists of such parts and token ids."),
    ] = None
    best_of: Annotated[Any, Meta(description="Must equal n.", extra_json_schema=INTEGER)] = None
    logprobs: Annotated[
        Any,
        Meta(description="Number of alternatives at each position; false: none.", extra_json_schema=INTEGER_OR_FALSE),
    ] = None
    echo: Annotated[bool | None, Meta(description="Put the prompt before the output.")] = None


class ChatCompletionRequest(CommonFields, frozen=True, kw_only=True):
    """Answers in a conversation."""

    messages: Annotated[
        Turns,
        Meta(
            description="Turns: role (system, developer, user, assistant, tool), content (text, or parts: text and "
            "image_url or video_url, a data: URL or one that the mesh may fetch, or input_audio, base64 with its "
            "format), "
            "tool_calls, tool_call_id, name, reasoning_content."
        ),
    ]
    max_completion_tokens: Annotated[
        Any, Meta(description="Newer name of max_tokens; takes precedence.", extra_json_schema=INTEGER)
    ] = None
    prompt_cache_options: Annotated[
        dict[str, Any] | None,
        Meta(
            description='{"mode": "implicit" | "explicit", "ttl": "30m" | "12h"}: keep the prompt in the cache longer '
            "than others, while that time lasts."
        ),
    ] = None
    add_generation_prompt: Annotated[bool | None, Meta(description="Open the assistant's turn (default).")] = None
    chat_template_kwargs: Annotated[
        dict[str, Any] | None, Meta(description="Variables of the chat template, such as enable_thinking.")
    ] = None
    logprobs: Annotated[bool | None, Meta(description="Return log probabilities of the output.")] = None
    top_logprobs: Annotated[
        Any, Meta(description="With logprobs: number of alternatives at each position.", extra_json_schema=INTEGER)
    ] = None
    tools: Annotated[Tools, Meta(description="Functions that the model may call, at most 128.")] = None
    tool_choice: Annotated[
        Any,
        Meta(
            description='"none", "auto", "required" or {"type": "function", "function": {"name": …}}.',
            extra_json_schema=TOOL_CHOICE,
        ),
    ] = None
    parallel_tool_calls: Annotated[bool | None, Meta(description="False: one call at most.")] = None
    include_reasoning: Annotated[bool | None, Meta(description="False: leave the model's reasoning out.")] = None
    reasoning_effort: Annotated[
        str | None, Meta(description="Variable of the chat template; none also switches its thinking off.")
    ] = None
    reasoning: Annotated[
        dict[str, Any] | None, Meta(description='{"effort": …}, {"enabled": …}, {"exclude": …}: as OpenRouter has it.')
    ] = None
    thinking: Annotated[
        dict[str, Any] | None, Meta(description='{"type": "enabled" | "disabled"}: as enable_thinking of the template.')
    ] = None
    documents: Annotated[list[dict[str, Any]] | None, Meta(description="Documents for the chat template.")] = None
    continue_final_message: Annotated[
        bool | None, Meta(description="Continue the last message instead of answering it.")
    ] = None
    mm_processor_kwargs: Annotated[
        dict[str, Any] | None,
        Meta(
            description="Of the model's processor of images and videos, where it has them: min_pixels, max_pixels, "
            "max_soft_tokens, and of videos num_frames or fps."
        ),
    ] = None


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt or a conversation to encode; exactly one of them."""

    model: Annotated[
        Any,
        Meta(
            description="Name of the served model; null: that model.",
            extra_json_schema={"anyOf": [{"type": "string"}, {"type": "null"}]},
        ),
    ] = None
    prompt: Annotated[str | None, Meta(description="A text.")] = None
    messages: Annotated[Turns | None, Meta(description="A conversation.")] = None
    add_special_tokens: Annotated[bool | None, Meta(description="For texts; for chats only false.")] = None
    return_token_strs: Annotated[bool | None, Meta(description="Return the tokens' strings.")] = None
    add_generation_prompt: Annotated[bool | None, Meta(description="Open the assistant's turn.")] = None
    continue_final_message: Annotated[bool | None, Meta(description="End within the last message.")] = None
    chat_template_kwargs: Annotated[dict[str, Any] | None, Meta(description="Variables of the chat template.")] = None
    tools: Annotated[Tools, Meta(description="Functions for the chat template.")] = None


class DetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Token ids to decode."""

    model: Annotated[
        Any,
        Meta(
            description="Name of the served model; null: that model.",
            extra_json_schema={"anyOf": [{"type": "string"}, {"type": "null"}]},
        ),
    ] = None
    tokens: Annotated[
        Any,
        Meta(
            description="Token ids.",
            extra_json_schema={"type": "array", "items": {"type": "integer", "minimum": 0, "exclusiveMaximum": 2**32}},
        ),
    ] = None


def with_sampling(
    body: type[msgspec.Struct],
    params: type[SamplingFields] = GenerationFields,
    without: Collection[str] = ("logprobs",),  # each endpoint has its own
) -> type[msgspec.Struct]:
    """Return ``body`` with the sampling parameters as fields, each of which may be null, for the OpenAPI document."""
    rows = [(row.name, _nullable(row.type), None) for row in msgspec.structs.fields(params) if row.name not in without]
    return msgspec.defstruct(
        body.__name__, rows, bases=(body,), namespace={"__doc__": body.__doc__}, frozen=True, kw_only=True
    )


def _nullable(row: Any) -> Any:
    kind, (*bounds, text) = row.__origin__, row.__metadata__
    if "anyOf" in (text.extra_json_schema or {}):
        return Annotated[Any, text]
    return Annotated[(Annotated[kind, *bounds] if bounds else kind) | None, text]


class CountTokensRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Counts the tokens of a conversation."""

    messages: Annotated[
        list[dict[str, Any]],
        Meta(
            description="Turns of user and assistant. Content: text, or blocks: text, tool_use, tool_result, thinking, "
            "and documents of plain text."
        ),
    ]
    model: Annotated[str | None, Meta(description="Name of the served model; null: that model.")] = None
    system: Annotated[str | list[dict[str, Any]] | None, Meta(description="Instructions, before all turns.")] = None
    tools: Annotated[
        list[dict[str, Any]] | None, Meta(description="Custom tools: name, description and input_schema.")
    ] = None
    tool_choice: Annotated[
        dict[str, Any] | None,
        Meta(description='{"type": "auto" | "any" | "none"}, or {"type": "tool", "name": …}.'),
    ] = None
    thinking: Annotated[
        dict[str, Any] | None,
        Meta(description='{"type": "enabled", "budget_tokens": …}, adaptive or disabled; null: it is not returned.'),
    ] = None
    context_management: Annotated[
        dict[str, Any] | None,
        Meta(
            description='{"edits": […]}: clear_tool_uses_20250919 leaves old results of tools out of the prompt, and '
            "clear_thinking_20251015 old reasoning; the answer says what was cleared."
        ),
    ] = None


class MessagesRequest(CountTokensRequest, frozen=True, kw_only=True):
    """Answers in a conversation, in Anthropic's form."""

    stream: Annotated[bool | None, Meta(description="Answer with server-sent events.")] = None
    stop_sequences: Annotated[list[str] | None, Meta(description="Texts that end the answer; up to 16.")] = None
    output_config: Annotated[
        dict[str, Any] | None,
        Meta(description='{"format": {"type": "json_schema", "schema": …}}; effort: a variable of the chat template.'),
    ] = None
    output_format: Annotated[dict[str, Any] | None, Meta(description="Older name of output_config.format.")] = None
    diagnostics: Annotated[
        dict[str, Any] | None,
        Meta(
            description='{"previous_message_id": …}: the answer says why the cache did not reuse that turn\'s prompt.'
        ),
    ] = None
    cache_control: Annotated[
        dict[str, Any] | None,
        Meta(
            description='{"type": "ephemeral", "ttl": "5m" | "1h"}: keep the prompt in the cache longer than others, '
            "while that time lasts; blocks and tools may have it too."
        ),
    ] = None
    metadata: Annotated[
        dict[str, Any] | None,
        Meta(description="user_id names the session: its next turn runs where its beginning is cached. Only a hint."),
    ] = None


_ITEMS = Meta(description="Up to 20 items, as a response may have as input.")
_ConversationMetadata = Annotated[dict[str, Any] | None, Meta(description="Returned as it is.")]


class ConversationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Begins a conversation."""

    items: Annotated[list[dict[str, Any]] | None, _ITEMS] = None
    metadata: _ConversationMetadata = None


class ConversationUpdate(msgspec.Struct, frozen=True, kw_only=True):
    """Changes what a client notes of a conversation."""

    metadata: _ConversationMetadata = None


class ConversationAddition(msgspec.Struct, frozen=True, kw_only=True):
    """Adds to a conversation."""

    items: Annotated[list[dict[str, Any]], _ITEMS]


class ResponsesRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Answers in a conversation, which the gateway may keep for the next request."""

    input: Annotated[
        str | list[dict[str, Any]],
        Meta(
            description="A text, or items: message, reasoning, function_call, function_call_output, mcp_list_tools, "
            "mcp_call, mcp_approval_request, mcp_approval_response."
        ),
    ]
    model: Annotated[str | None, Meta(description="Name of the served model; null: that model.")] = None
    instructions: Annotated[str | None, Meta(description="A system turn before all others.")] = None
    previous_response_id: Annotated[
        str | None, Meta(description="Continue the conversation of this stored response of the same gateway.")
    ] = None
    store: Annotated[bool | None, Meta(description="Keep the response for a later request (default).")] = None
    background: Annotated[bool | None, Meta(description="Answer at once; the client asks for the response later.")] = (
        None
    )
    stream: Annotated[bool | None, Meta(description="Answer with server-sent events.")] = None
    max_output_tokens: Annotated[int | None, Meta(description="Limit of the output, reasoning included.")] = None
    tools: Annotated[
        list[dict[str, Any]] | None,
        Meta(description="Functions that the model may call, and MCP servers that the operator names."),
    ] = None
    tool_choice: Annotated[
        str | dict[str, Any] | None,
        Meta(description='"none", "auto", "required", or an object of type function, mcp or allowed_tools.'),
    ] = None
    parallel_tool_calls: Annotated[bool | None, Meta(description="Whether several calls may be made (default).")] = None
    reasoning: Annotated[dict[str, Any] | None, Meta(description='{"effort": …}, for the chat template.')] = None
    text: Annotated[
        dict[str, Any] | None, Meta(description='{"format": {"type": "text" | "json_object" | "json_schema", …}}.')
    ] = None
    metadata: Annotated[dict[str, Any] | None, Meta(description="Returned as it is.")] = None
    prompt_cache_key: Annotated[
        str | None,
        Meta(description="Names the session: its next turn runs where its beginning is cached. Only a hint."),
    ] = None
    prompt_cache_options: Annotated[
        dict[str, Any] | None,
        Meta(
            description='{"mode": "implicit" | "explicit", "ttl": "30m" | "12h"}: keep the prompt in the cache longer '
            "than others, while that time lasts; comparison_response_id asks why it was not found there."
        ),
    ] = None
    include: Annotated[list[str] | None, Meta(description="Further parts of the response; they have no effect.")] = None
    truncation: Annotated[str | None, Meta(description="auto, disabled; a longer input is refused.")] = None
    top_logprobs: Annotated[int | None, Meta(description="Only 0.")] = None
    max_tool_calls: Annotated[int | None, Meta(description="Limits the calls of tools of MCP servers.")] = None
    stream_options: Annotated[dict[str, Any] | None, Meta(description="Have no effect.")] = None
    conversation: Annotated[
        Any, Meta(description="Id of a conversation of the same gateway, which gets the input and the output.")
    ] = None
    prompt: Annotated[Any, Meta(description="Only null: templates of prompts are not stored.")] = None


class AdapterBody(msgspec.Struct):
    """Names an adapter."""

    lora_name: Annotated[str, Meta(description="The adapter's own name, without the model's.")]
    base_model_name: Annotated[
        str | None, Meta(description="The model that it adapts; needed if the gateway serves several models.")
    ] = None


class LoadAdapter(AdapterBody, kw_only=True):
    """Names an adapter to load on every engine."""

    lora_path: Annotated[str, Meta(description="Directory on the engines' hosts, in the layout of the peft library.")]
    load_inplace: Annotated[bool, Meta(description="Replace another adapter of this name.")] = False


class PinAdapter(AdapterBody):
    """Names an adapter to keep on every engine's device."""

    pinned: Annotated[bool, Meta(description="False ends the pinning.")] = True
