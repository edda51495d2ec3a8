"""Answers as the API's description tells them."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

FinishReason = Literal["stop", "length", "tool_calls", "abort", "error", "repetition"]


class ErrorObject(msgspec.Struct):
    """What went wrong."""

    message: Annotated[str, Meta(description="What was wrong, where, and what would be right.")]
    type: Annotated[str, Meta(description="Whose fault: invalid_request_error, server_error, …")]
    param: Annotated[str | None, Meta(description="The field that is wrong.")]
    code: Annotated[str, Meta(description="Which error, for programs.")]


class ErrorResponse(msgspec.Struct):
    """Any failure, in OpenAI's form."""

    error: Annotated[ErrorObject, Meta(description="What went wrong.")]


class PromptTokensDetails(msgspec.Struct):
    """Of the prompt's tokens."""

    cached_tokens: Annotated[int, Meta(description="Found in a prefix cache.")]


class Usage(msgspec.Struct):
    """Tokens of all prompts and outputs."""

    prompt_tokens: Annotated[int, Meta(description="Of the prompts.")]
    completion_tokens: Annotated[int, Meta(description="Of the outputs.")]
    total_tokens: Annotated[int, Meta(description="Of both.")]
    prompt_tokens_details: Annotated[PromptTokensDetails, Meta(description="Of the prompts.")]


class FunctionCall(msgspec.Struct):
    """What the model calls."""

    name: Annotated[str, Meta(description="The function.")]
    arguments: Annotated[str, Meta(description="JSON, as the model wrote it.")]


class ToolCall(msgspec.Struct):
    """A call of a tool."""

    id: Annotated[str, Meta(description="To be named by the tool's answer.")]
    type: Annotated[Literal["function"], Meta(description="Always function.")]
    function: Annotated[FunctionCall, Meta(description="The call.")]


class AssistantMessage(msgspec.Struct, omit_defaults=True):
    """The model's turn."""

    role: Annotated[Literal["assistant"], Meta(description="Always assistant.")]
    content: Annotated[str | None, Meta(description="The text; null beside tool calls without any.")]
    reasoning: Annotated[str | None, Meta(description="What came before the answer.")] = None
    reasoning_content: Annotated[str | None, Meta(description="The same under its older name.")] = None
    tool_calls: Annotated[list[ToolCall] | None, Meta(description="What the model calls.")] = None


class ChatChoice(msgspec.Struct):
    """One sample."""

    index: Annotated[int, Meta(description="Which sample.")]
    message: Annotated[AssistantMessage, Meta(description="The model's turn.")]
    logprobs: Annotated[dict[str, Any] | None, Meta(description="Log probabilities, when asked for.")]
    finish_reason: Annotated[FinishReason, Meta(description="Why it ended.")]
    stop_reason: Annotated[str | int | None, Meta(description="The stop string or token id that was met.")]
    token_ids: Annotated[list[int] | None, Meta(description="Of the output, when asked for.")] = None


class ChatCompletion(msgspec.Struct):
    """A whole answer."""

    id: Annotated[str, Meta(description="Of the response.")]
    object: Annotated[Literal["chat.completion"], Meta(description="What this is.")]
    created: Annotated[int, Meta(description="Unix time, seconds.")]
    model: Annotated[str, Meta(description="The served model.")]
    choices: Annotated[list[ChatChoice], Meta(description="One for each sample.")]
    usage: Annotated[Usage, Meta(description="Tokens.")]


class TextChoice(msgspec.Struct):
    """One sample of one prompt."""

    index: Annotated[int, Meta(description="Sample `index % n` of prompt `index / n`.")]
    text: Annotated[str, Meta(description="The continuation.")]
    logprobs: Annotated[dict[str, Any] | None, Meta(description="Log probabilities, when asked for.")]
    finish_reason: Annotated[FinishReason, Meta(description="Why it ended.")]
    stop_reason: Annotated[str | int | None, Meta(description="The stop string or token id that was met.")]


class Completion(msgspec.Struct):
    """All continuations."""

    id: Annotated[str, Meta(description="Of the response.")]
    object: Annotated[Literal["text_completion"], Meta(description="What this is.")]
    created: Annotated[int, Meta(description="Unix time, seconds.")]
    model: Annotated[str, Meta(description="The served model.")]
    choices: Annotated[list[TextChoice], Meta(description="One for each sample of each prompt.")]
    usage: Annotated[Usage, Meta(description="Tokens.")]


class Model(msgspec.Struct):
    """A served model."""

    id: Annotated[str, Meta(description="Its name in requests.")]
    object: Annotated[Literal["model"], Meta(description="What this is.")]
    created: Annotated[int, Meta(description="Unix time at which the gateway came up.")]
    owned_by: Annotated[str, Meta(description="Who serves it.")]
    max_model_len: Annotated[int | None, Meta(description="Tokens of prompt and output; null: no engine yet.")]


class ModelList(msgspec.Struct):
    """The served models."""

    object: Annotated[Literal["list"], Meta(description="What this is.")]
    data: Annotated[list[Model], Meta(description="One.")]


class TokenizeResponse(msgspec.Struct):
    """Encoded."""

    count: Annotated[int, Meta(description="Tokens.")]
    max_model_len: Annotated[int | None, Meta(description="What the model takes.")]
    tokens: Annotated[list[int], Meta(description="Token ids.")]
    token_strs: Annotated[list[str] | None, Meta(description="As the vocabulary spells them, when asked for.")]


class DetokenizeResponse(msgspec.Struct):
    """Decoded."""

    prompt: Annotated[str, Meta(description="The text.")]


class Status(msgspec.Struct, omit_defaults=True):
    """Whether a request would be answered."""

    status: Annotated[Literal["ok", "unavailable"], Meta(description="Whether it would.")]
    missing: Annotated[list[str] | None, Meta(description="Parts of the mesh that are missing.")] = None


class Version(msgspec.Struct):
    """Of the gateway."""

    version: Annotated[str, Meta(description="Of the tokenloom package.")]


class Load(msgspec.Struct):
    """Of this gateway."""

    server_load: Annotated[int, Meta(description="Outputs that clients wait for.")]


class EngineInfo(msgspec.Struct):
    """An engine's last report."""

    engine_id: Annotated[str, Meta(description="Its name.")]
    role: Annotated[str, Meta(description="both, prefill or decode.")]
    state: Annotated[str, Meta(description="starting, serving, draining, paused or dead.")]
    running: Annotated[int, Meta(description="Requests in its batch.")]
    waiting: Annotated[int, Meta(description="Requests not yet running.")]
    kv_cache_usage: Annotated[float, Meta(description="Share of KV blocks in use.")]
    num_kv_blocks: Annotated[int, Meta(description="KV blocks in all.")]


class ServerInfo(msgspec.Struct):
    """The mesh behind this gateway."""

    version: Annotated[str, Meta(description="Of the tokenloom package.")]
    model: Annotated[str, Meta(description="The served model.")]
    max_model_len: Annotated[int | None, Meta(description="Tokens of prompt and output.")]
    vocab_size: Annotated[int | None, Meta(description="Token ids are below it.")]
    server_load: Annotated[int, Meta(description="Outputs that clients wait for.")]
    engines: Annotated[list[EngineInfo], Meta(description="As the coordinator tells.")]


class ModelInfo(msgspec.Struct):
    """As SGLang's servers tell routers."""

    model_path: Annotated[str, Meta(description="The served model.")]
    tokenizer_path: Annotated[str, Meta(description="The same.")]
    is_generation: Annotated[bool, Meta(description="Always true.")]


class EnginesDone(msgspec.Struct):
    """What was asked of every engine is done."""

    status: Annotated[str, Meta(description="What they are now.")]
    engines: Annotated[list[str], Meta(description="Their names.")]


class EnginesPaused(msgspec.Struct):
    """Whether engines are paused."""

    is_paused: Annotated[bool, Meta(description="All of them.")]
    engines: Annotated[dict[str, bool], Meta(description="By name.")]


class EnginesSleeping(msgspec.Struct):
    """Whether engines sleep."""

    is_sleeping: Annotated[bool, Meta(description="All of them.")]
    engines: Annotated[dict[str, bool], Meta(description="By name.")]
