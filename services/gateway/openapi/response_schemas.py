"""Defines the response bodies of the HTTP API for its OpenAPI document."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

FinishReason = Literal["stop", "length", "tool_calls", "abort", "error", "repetition"]
WEIGHTS_VERSION = (
    "The weights that computed the output, as 16 hexadecimal digits. Several are joined by +, in order: an operator "
    "let the request go on over a change of weights. Absent if the engine has no weights."
)
MIXED_NUMERICS = "True: an engine was lost, and one that computes in another way went on. Otherwise absent."


class ErrorObject(msgspec.Struct):
    """What went wrong."""

    message: Annotated[str, Meta(description="What was wrong, where, and what would be right.")]
    type: Annotated[str, Meta(description="Kind of error: invalid_request_error, server_error, …")]
    param: Annotated[str | None, Meta(description="The field that is wrong.")]
    code: Annotated[str, Meta(description="Machine-readable code of the error.")]
    limit: Annotated[str | None, Meta(description="The limit of the tenant that was reached; only with 429.")] = None


class ErrorResponse(msgspec.Struct):
    """An error in OpenAI's form."""

    error: Annotated[ErrorObject, Meta(description="What went wrong.")]


class MessageErrorObject(msgspec.Struct):
    """What went wrong, in Anthropic's form."""

    type: Annotated[str, Meta(description="Kind of error: invalid_request_error, overloaded_error, …")]
    message: Annotated[str, Meta(description="What was wrong, where, and what would be right.")]


class MessageErrorResponse(msgspec.Struct):
    """An error in Anthropic's form."""

    type: Annotated[Literal["error"], Meta(description="The kind of this object.")]
    error: Annotated[MessageErrorObject, Meta(description="What went wrong.")]


class CacheMiss(msgspec.Struct):
    """Why a turn of a conversation did not find in the cache what an earlier turn had left there."""

    cause: Annotated[str, Meta(description="The cause, such as message_changed, reasoning_dropped or evicted.")]
    token: Annotated[int, Meta(description="Position of the first token that differs or is in no cache any more.")]
    missed_tokens: Annotated[int, Meta(description="Tokens that the earlier turn would have spared.")]


class PromptTokensDetails(msgspec.Struct, omit_defaults=True):
    """Counts of prompt tokens."""

    cached_tokens: Annotated[int, Meta(description="Prompt tokens found in a prefix cache.")]
    cache_miss: Annotated[CacheMiss | None, Meta(description="Only if an earlier turn was missed.")] = None
    cache_write_tokens: Annotated[
        int, Meta(description="Prompt tokens that the cache has got, where the client asks to keep them.")
    ] = 0
    audio_tokens: Annotated[int, Meta(description="Prompt tokens that stand for sounds.")] = 0


class CompletionTokensDetails(msgspec.Struct):
    """Counts of output tokens."""

    reasoning_tokens: Annotated[int, Meta(description="Output tokens that are reasoning, without the marks around it.")]


class UsageInfo(msgspec.Struct, omit_defaults=True):
    """Counts of tokens in all prompts and outputs."""

    prompt_tokens: Annotated[int, Meta(description="Tokens of the prompts.")]
    completion_tokens: Annotated[int, Meta(description="Tokens of the outputs.")]
    total_tokens: Annotated[int, Meta(description="Sum of both.")]
    prompt_tokens_details: Annotated[PromptTokensDetails, Meta(description="Details of the prompt tokens.")]
    completion_tokens_details: Annotated[
        CompletionTokensDetails | None, Meta(description="Details of the output tokens, if the model reasons.")
    ] = None
    cpu_ms: Annotated[
        float, Meta(description="Processor time of all parts so far, in milliseconds; only with --bill.")
    ] = 0.0


class FunctionCall(msgspec.Struct):
    """A function that the model calls."""

    name: Annotated[str, Meta(description="Name of the function.")]
    arguments: Annotated[str, Meta(description="JSON as the model wrote it.")]


class FunctionToolCall(msgspec.Struct):
    """One call of a tool."""

    id: Annotated[str, Meta(description="Repeat it as tool_call_id in the tool's answer.")]
    type: Annotated[Literal["function"], Meta(description="Always function.")]
    function: Annotated[FunctionCall, Meta(description="Function and arguments.")]


class AssistantMessage(msgspec.Struct, omit_defaults=True):
    """The model's turn of the conversation."""

    role: Annotated[Literal["assistant"], Meta(description="Always assistant.")]
    content: Annotated[str | None, Meta(description="The text; null if there are only tool calls.")]
    reasoning: Annotated[str | None, Meta(description="Reasoning before the answer.")] = None
    reasoning_content: Annotated[str | None, Meta(description="Older name of reasoning.")] = None
    tool_calls: Annotated[list[FunctionToolCall] | None, Meta(description="Calls that the model makes.")] = None


class ChatChoice(msgspec.Struct):
    """One sample."""

    index: Annotated[int, Meta(description="Number of the sample.")]
    message: Annotated[AssistantMessage, Meta(description="The model's turn.")]
    logprobs: Annotated[dict[str, Any] | None, Meta(description="Log probabilities, if requested.")]
    finish_reason: Annotated[FinishReason, Meta(description="Why the output ended.")]
    stop_reason: Annotated[str | int | None, Meta(description="The stop string or token id that ended the output.")]
    token_ids: Annotated[list[int] | None, Meta(description="Token ids of the output, if requested.")] = None
    weights_version: Annotated[str | None, Meta(description=WEIGHTS_VERSION)] = None
    mixed_numerics: Annotated[bool | None, Meta(description=MIXED_NUMERICS)] = None


class ChatCompletion(msgspec.Struct):
    """A complete answer."""

    id: Annotated[str, Meta(description="Id of the response.")]
    object: Annotated[Literal["chat.completion"], Meta(description="Kind of this object.")]
    created: Annotated[int, Meta(description="Unix time, seconds.")]
    model: Annotated[str, Meta(description="The served model.")]
    choices: Annotated[list[ChatChoice], Meta(description="One choice for each sample.")]
    usage: Annotated[UsageInfo, Meta(description="Token counts.")]


class TextChoice(msgspec.Struct):
    """One sample of one prompt."""

    index: Annotated[int, Meta(description="Sample `index % n` of prompt `index / n`.")]
    text: Annotated[str, Meta(description="The continuation.")]
    logprobs: Annotated[dict[str, Any] | None, Meta(description="Log probabilities, if requested.")]
    finish_reason: Annotated[FinishReason, Meta(description="Why the output ended.")]
    stop_reason: Annotated[str | int | None, Meta(description="The stop string or token id that ended the output.")]
    weights_version: Annotated[str | None, Meta(description=WEIGHTS_VERSION)] = None
    mixed_numerics: Annotated[bool | None, Meta(description=MIXED_NUMERICS)] = None


class Completion(msgspec.Struct):
    """The continuations of all prompts."""

    id: Annotated[str, Meta(description="Id of the response.")]
    object: Annotated[Literal["text_completion"], Meta(description="Kind of this object.")]
    created: Annotated[int, Meta(description="Unix time, seconds.")]
    model: Annotated[str, Meta(description="The served model.")]
    choices: Annotated[list[TextChoice], Meta(description="One choice for each sample of each prompt.")]
    usage: Annotated[UsageInfo, Meta(description="Token counts.")]


class Response(msgspec.Struct):
    """A response of OpenAI's Responses API; it repeats the request's members too."""

    id: Annotated[str, Meta(description="Id of the response.")]
    object: Annotated[str, Meta(description="response")]
    created_at: Annotated[int, Meta(description="When it was asked for, in seconds since 1970.")]
    status: Annotated[str, Meta(description="queued, in_progress, completed, incomplete, failed or cancelled.")]
    model: Annotated[str, Meta(description="Name of the model.")]
    output: Annotated[list[dict[str, Any]], Meta(description="Items: reasoning, message, function_call.")]
    error: Annotated[dict[str, Any] | None, Meta(description="Why it failed.")]
    incomplete_details: Annotated[dict[str, Any] | None, Meta(description="Why the output was cut.")]
    usage: Annotated[dict[str, Any] | None, Meta(description="Token counts, once it has ended.")]


class Compaction(msgspec.Struct):
    """A conversation in short, which later requests send as their input."""

    id: Annotated[str, Meta(description="Its id.")]
    object: Annotated[str, Meta(description="response.compaction")]
    created_at: Annotated[int, Meta(description="When it was asked for, in seconds since 1970.")]
    output: Annotated[
        list[dict[str, Any]], Meta(description="The user's messages, and an item compaction with the summary.")
    ]
    usage: Annotated[dict[str, Any], Meta(description="Token counts.")]


class ConversationObject(msgspec.Struct):
    """A conversation to which responses add."""

    id: Annotated[str, Meta(description="Its id.")]
    object: Annotated[str, Meta(description="conversation")]
    created_at: Annotated[int, Meta(description="When it was begun, in seconds since 1970.")]
    metadata: Annotated[dict[str, Any], Meta(description="As the client gave it.")]


class ConversationItems(msgspec.Struct):
    """Items of a conversation."""

    object: Annotated[str, Meta(description="list")]
    data: Annotated[list[dict[str, Any]], Meta(description="The items.")]
    first_id: Annotated[str | None, Meta(description="Id of the first item.")]
    last_id: Annotated[str | None, Meta(description="Id of the last item.")]
    has_more: Annotated[bool, Meta(description="Whether there are more.")]


class ConversationItem(msgspec.Struct):
    """An item of a conversation; further members are those of its type."""

    id: Annotated[str, Meta(description="Its id.")]
    type: Annotated[str, Meta(description="message, reasoning, function_call, function_call_output, …")]


class DeletedResponse(msgspec.Struct):
    """Confirms that a response or a conversation was forgotten."""

    id: Annotated[str, Meta(description="Its id.")]
    object: Annotated[str, Meta(description="response, conversation.deleted")]
    deleted: Annotated[bool, Meta(description="True.")]


class MessageUsage(msgspec.Struct):
    """Counts of tokens, in Anthropic's form."""

    input_tokens: Annotated[int, Meta(description="Tokens of the prompt that were not cached.")]
    cache_creation_input_tokens: Annotated[int, Meta(description="Tokens that cache_control has let be cached.")]
    cache_read_input_tokens: Annotated[int, Meta(description="Tokens of the prompt that were cached.")]
    output_tokens: Annotated[int, Meta(description="Tokens of the output.")]


class AnthropicMessage(msgspec.Struct):
    """The assistant's turn, in Anthropic's form."""

    id: Annotated[str, Meta(description="Id of the answer.")]
    type: Annotated[str, Meta(description="message")]
    role: Annotated[str, Meta(description="assistant")]
    model: Annotated[str, Meta(description="Name of the model.")]
    content: Annotated[list[dict[str, Any]], Meta(description="Blocks: text, thinking and tool_use.")]
    stop_reason: Annotated[str, Meta(description="end_turn, max_tokens, stop_sequence or tool_use.")]
    stop_sequence: Annotated[str | None, Meta(description="The stop sequence that ended the output.")]
    usage: Annotated[MessageUsage, Meta(description="Token counts.")]
    weights_version: Annotated[str | None, Meta(description=WEIGHTS_VERSION)] = None
    mixed_numerics: Annotated[bool | None, Meta(description=MIXED_NUMERICS)] = None


class TokenCount(msgspec.Struct):
    """Length of a conversation."""

    input_tokens: Annotated[int, Meta(description="Tokens of the prompt.")]


class ModelCard(msgspec.Struct):
    """A served model."""

    id: Annotated[str, Meta(description="Its name in requests.")]
    object: Annotated[Literal["model"], Meta(description="Kind of this object.")]
    created: Annotated[int, Meta(description="Unix time at which the gateway started.")]
    owned_by: Annotated[str, Meta(description="Owner of the model.")]
    max_model_len: Annotated[int | None, Meta(description="Limit of prompt and output tokens; null without engines.")]


class ModelList(msgspec.Struct):
    """The served models."""

    object: Annotated[Literal["list"], Meta(description="Kind of this object.")]
    data: Annotated[list[ModelCard], Meta(description="The one served model.")]


class TokenizeResponse(msgspec.Struct):
    """The encoded prompt."""

    count: Annotated[int, Meta(description="Token counts.")]
    max_model_len: Annotated[int | None, Meta(description="Limit of prompt and output tokens.")]
    tokens: Annotated[list[int], Meta(description="Token ids.")]
    token_strs: Annotated[list[str] | None, Meta(description="The tokens in the vocabulary's spelling, if requested.")]
    plain_text_tokens: Annotated[
        list[str],
        Meta(description="Special tokens that the conversation's texts spell out, which are plain text to the model."),
    ]


class DetokenizeResponse(msgspec.Struct):
    """The decoded text."""

    prompt: Annotated[str, Meta(description="The text.")]


class PartStatus(msgspec.Struct):
    """Describes the replicas of one service, as this gateway sees them."""

    state: Annotated[
        Literal["ok", "degraded", "missing"],
        Meta(description="degraded: only some replicas answer; missing: none."),
    ]
    serving: Annotated[int, Meta(description="Number of replicas that answer.")]
    known: Annotated[int, Meta(description="Number of replicas that should answer.")]


class Status(msgspec.Struct, omit_defaults=True):
    """Reports whether the gateway can answer requests."""

    status: Annotated[
        Literal["ok", "degraded", "unavailable"],
        Meta(description="unavailable: requests are not answered now; degraded: they are, but a replica is missing."),
    ]
    parts: Annotated[dict[str, PartStatus], Meta(description="State of each service, by name.")]
    missing: Annotated[list[str] | None, Meta(description="Services without which requests are not answered now.")] = (
        None
    )
    degraded: Annotated[
        list[str] | None, Meta(description="Services with missing replicas, without which requests are answered.")
    ] = None
    models: Annotated[
        dict[str, "Status"] | None, Meta(description="State of each model, if the gateway serves several.")
    ] = None


class Version(msgspec.Struct):
    """The version of the gateway."""

    version: Annotated[str, Meta(description="Version of the tokenloom package.")]


class ServerLoad(msgspec.Struct):
    """The load of this gateway."""

    server_load: Annotated[int, Meta(description="Number of outputs in progress.")]


class EngineInfo(msgspec.Struct):
    """The last report of an engine."""

    engine_id: Annotated[str, Meta(description="Name of the engine.")]
    role: Annotated[str, Meta(description="both, prefill or decode.")]
    state: Annotated[str, Meta(description="starting, serving, draining, paused or dead.")]
    running: Annotated[int, Meta(description="Requests in its batch.")]
    waiting: Annotated[int, Meta(description="Requests not yet running.")]
    kv_cache_usage: Annotated[float, Meta(description="Share of KV blocks in use.")]
    num_kv_blocks: Annotated[int, Meta(description="KV blocks in all.")]
    plugins: Annotated[list[str], Meta(description="Packages whose plugins it may load, with versions.")]


class ServerInfo(msgspec.Struct):
    """The mesh behind this gateway."""

    version: Annotated[str, Meta(description="Version of the tokenloom package.")]
    model: Annotated[str, Meta(description="The served model.")]
    max_model_len: Annotated[int | None, Meta(description="Limit of prompt and output tokens.")]
    vocab_size: Annotated[int | None, Meta(description="Token ids are below this number.")]
    server_load: Annotated[int, Meta(description="Number of outputs in progress.")]
    plugins: Annotated[list[str], Meta(description="Packages whose plugins the gateway may load, with versions.")]
    engines: Annotated[list[EngineInfo], Meta(description="Engines that the coordinator knows.")]


class ServedModelInfo(msgspec.Struct):
    """The model in the form in which SGLang's servers report it to routers."""

    model_path: Annotated[str, Meta(description="The served model.")]
    tokenizer_path: Annotated[str, Meta(description="The served model.")]
    is_generation: Annotated[bool, Meta(description="Always true.")]


class EnginesDone(msgspec.Struct):
    """Every engine has done what was requested."""

    status: Annotated[str, Meta(description="State of the engines now.")]
    engines: Annotated[list[str], Meta(description="Names of the engines.")]


class RequestsMoved(msgspec.Struct):
    """What has become of requests that were to go on at other engines, sample by sample."""

    moved: Annotated[int, Meta(description="Left: another engine goes on, with their KV.")]
    ended: Annotated[int, Meta(description="Ended where they were, meanwhile.")]
    stayed: Annotated[int, Meta(description="Go on where they are.")]
    reasons: Annotated[list[str], Meta(description="Why some stay, after the name of their engine.")]


class EncodersDone(msgspec.Struct):
    """The encoders, and all engines where rows are forgotten, have done what was requested."""

    status: Annotated[str, Meta(description="State of the caches now.")]
    engines: Annotated[list[str], Meta(description="Names of the engines.")]
    encoders: Annotated[list[str], Meta(description="Names of the encoders.")]


class EnginesChanged(msgspec.Struct, omit_defaults=True):
    """What has become of a state that all engines shall be in. The call may be repeated."""

    status: Annotated[str, Meta(description="State that all engines shall be in, those that join later too.")]
    state: Annotated[
        Literal["done", "converging"],
        Meta(description="converging, with status 202: some are not in it, get no requests and go on trying."),
    ]
    engines: Annotated[list[str], Meta(description="Names of the engines that are in it.")]
    converging: Annotated[dict[str, str], Meta(description="Why the others are not, by name of the engine.")] = {}


class EnginesPaused(msgspec.Struct):
    """Reports whether engines are paused."""

    is_paused: Annotated[bool, Meta(description="True if all of them are.")]
    engines: Annotated[dict[str, bool], Meta(description="State by name of the engine.")]


class EnginesSleeping(msgspec.Struct):
    """Reports whether engines sleep."""

    is_sleeping: Annotated[bool, Meta(description="True if all of them are.")]
    engines: Annotated[dict[str, bool], Meta(description="State by name of the engine.")]


class MeshPart(msgspec.Struct):
    """A replica of a part that is no engine."""

    kind: Annotated[str, Meta(description="gateway, coordinator, tokenizer, output_processor or encoder.")]
    name: Annotated[str, Meta(description="Kind and number; of an encoder its name.")]
    state: Annotated[str, Meta(description="serving, draining or lost.")]


class KvLinkState(msgspec.Struct):
    """What one engine has sent to another."""

    source: Annotated[str, Meta(description="Name of the engine that sent.")]
    target: Annotated[str, Meta(description="Name of the engine that received.")]
    prompts: Annotated[int, Meta(description="Prompts of which KV blocks moved.")]
    tokens: Annotated[int, Meta(description="Tokens of these blocks.")]
    wait_ms: Annotated[float, Meta(description="Milliseconds that requests waited for them.")]


class MeshState(msgspec.Struct):
    """The mesh as this gateway sees it now, without addresses."""

    models: Annotated[list[str], Meta(description="Every served model.")]
    version: Annotated[str, Meta(description="Version of the tokenloom package.")]
    model: Annotated[str, Meta(description="The model that is described.")]
    max_model_len: Annotated[int | None, Meta(description="Limit of prompt and output tokens.")]
    max_logprobs: Annotated[int | None, Meta(description="Limit of log probabilities per token.")]
    reads_images: Annotated[bool, Meta(description="Whether the model and an encoder read images.")]
    reads_sounds: Annotated[bool, Meta(description="Whether the model and an encoder read sounds in chats.")]
    missing: Annotated[list[str], Meta(description="Services without which requests are not answered now.")]
    live: Annotated[int, Meta(description="Outputs in progress at this gateway.")]
    placement: Annotated[str | None, Meta(description="Rule by which engines are chosen.")]
    parts: Annotated[list[MeshPart], Meta(description="The parts other than engines.")]
    engines: Annotated[list[dict[str, Any]], Meta(description="Engines by name, with state, load and KV usage.")]
    kv_links: Annotated[list[KvLinkState], Meta(description="Which engine sent KV blocks to which.")]
    kill_engine: Annotated[
        dict[str, str] | None,
        Meta(description="In a demo the path and the token by which the page kills an engine; null otherwise."),
    ] = None


class TrafficColumns(msgspec.Struct):
    """Ten minutes of this gateway's traffic: a list for each value, with one entry per interval, the oldest first."""

    interval_seconds: Annotated[float, Meta(description="Length of an interval.")]
    ended_at: Annotated[float, Meta(description="Unix time at which the last interval ended.")]
    ttft_p50_ms: Annotated[list[float | None], Meta(description="Median milliseconds to the first token.")]
    ttft_p95_ms: Annotated[list[float | None], Meta(description="95th percentile of these.")]
    itl_p50_ms: Annotated[list[float | None], Meta(description="Median milliseconds between tokens.")]
    itl_p95_ms: Annotated[list[float | None], Meta(description="95th percentile of these.")]
    output_tokens_per_second: Annotated[list[float], Meta(description="Output tokens per second.")]
    prompt_tokens_per_second: Annotated[list[float], Meta(description="Prompt tokens per second.")]
    hit_share: Annotated[list[float | None], Meta(description="Share of prompt tokens that were cached.")]
    refused: Annotated[list[dict[str, int]], Meta(description="Requests that ended in an error, by reason.")]
    running: Annotated[list[int], Meta(description="Requests in the batches of all engines.")]
    waiting: Annotated[list[int], Meta(description="Requests that wait at all engines.")]
    kv_usage: Annotated[list[float], Meta(description="Share of KV blocks in use, 0 to 1.")]


class EngineAdapter(msgspec.Struct):
    """What an engine has of an adapter."""

    in_slot: Annotated[bool, Meta(description="Whether it is on the device.")]
    requests: Annotated[int, Meta(description="Requests that wait or run with it.")]
    rank: Annotated[int, Meta(description="Rank of its matrices.")]


class LoadedAdapter(msgspec.Struct):
    """An adapter that requests can name."""

    id: Annotated[str, Meta(description="Its name for requests: model:adapter.")]
    lora_name: Annotated[str, Meta(description="Its own name.")]
    pinned: Annotated[bool, Meta(description="Whether it stays on the device without requests.")]
    digest: Annotated[str, Meta(description="SHA-256 over its files.")]
    engines: Annotated[dict[str, EngineAdapter], Meta(description="The engines that have it, by name.")]


class LoadedAdapters(msgspec.Struct):
    """The adapters of all models."""

    adapters: list[LoadedAdapter]
