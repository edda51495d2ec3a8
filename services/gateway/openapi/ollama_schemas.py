"""Defines the bodies and answers of Ollama's API."""

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from .response_schemas import MIXED_NUMERICS, WEIGHTS_VERSION

_NAME = "Name of the served model or of an adapter; `:latest` may follow."
_NANOSECONDS = "Nanoseconds of the whole request."


class OllamaRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Continues a conversation (``messages``), or answers one prompt. Without either nothing is generated."""

    model: Annotated[str, Meta(description=_NAME)]
    messages: Annotated[list[dict[str, Any]] | None, Meta(description="The turns, for /api/chat.")] = None
    tools: Annotated[list[dict[str, Any]] | None, Meta(description="Functions, as in OpenAI's API.")] = None
    prompt: Annotated[str, Meta(description="The question, for /api/generate.")] = ""
    images: Annotated[list[str] | None, Meta(description="Images as base64, before the prompt, for /api/generate.")] = (
        None
    )
    system: Annotated[str | None, Meta(description="The system turn before prompt.")] = None
    stream: Annotated[bool | None, Meta(description="Answer with lines of JSON (default).")] = None
    format: Annotated[str | dict[str, Any] | None, Meta(description='"json", or a JSON schema.')] = None
    options: Annotated[
        dict[str, Any] | None,
        Meta(description="Sampling parameters under Ollama's names, such as num_predict and repeat_penalty."),
    ] = None
    think: Annotated[bool | str | None, Meta(description="Whether to reason, or how much.")] = None
    raw: Annotated[bool | None, Meta(description="Continue prompt without the chat template.")] = None
    keep_alive: Annotated[Any, Meta(description="Without a prompt, 0 means unload; the engines stay.")] = None


class OllamaEmbedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Asks for one vector for each input (``input``), or for one prompt."""

    model: Annotated[str, Meta(description=_NAME)]
    input: Annotated[Any, Meta(description="A text or several, for /api/embed.")] = None
    prompt: Annotated[str | None, Meta(description="The text, for /api/embeddings.")] = None
    truncate: Annotated[bool | None, Meta(description="false: refuse inputs that are too long.")] = None
    dimensions: Annotated[Any, Meta(description="Length of the vectors.")] = None


class OllamaModelRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Names a model."""

    model: Annotated[Any, Meta(description=f"{_NAME} Null: the first one.")] = None
    name: Annotated[Any, Meta(description="Older name of model.")] = None
    stream: Annotated[Any, Meta(description="false: answer with one object instead of lines.")] = None


class OllamaResponse(msgspec.Struct, omit_defaults=True):
    """An answer, or a part of it in a stream; the last one has the counts."""

    model: Annotated[str, Meta(description="Name of the model.")]
    created_at: Annotated[str, Meta(description="When this part was made (RFC 3339).")]
    done: Annotated[bool, Meta(description="Whether it is the last part.")]
    message: Annotated[dict[str, Any] | None, Meta(description="role, content, thinking, tool_calls (chat).")] = None
    response: Annotated[str | None, Meta(description="The text (generate).")] = None
    thinking: Annotated[str | None, Meta(description="The reasoning (generate).")] = None
    done_reason: Annotated[str | None, Meta(description="stop, length, abort, repetition, load or unload.")] = None
    total_duration: Annotated[int | None, Meta(description=_NANOSECONDS)] = None
    load_duration: Annotated[int | None, Meta(description="Nanoseconds until the prompt ran.")] = None
    prompt_eval_count: Annotated[int | None, Meta(description="Tokens of the prompt.")] = None
    prompt_eval_duration: Annotated[int | None, Meta(description="Nanoseconds of the prompt.")] = None
    eval_count: Annotated[int | None, Meta(description="Tokens of the output.")] = None
    eval_duration: Annotated[int | None, Meta(description="Nanoseconds after the prompt.")] = None
    weights_version: Annotated[str | None, Meta(description=WEIGHTS_VERSION)] = None
    mixed_numerics: Annotated[bool | None, Meta(description=MIXED_NUMERICS)] = None


class OllamaVectors(msgspec.Struct):
    """One vector for each input."""

    model: Annotated[str, Meta(description="Name of the model.")]
    embeddings: Annotated[list[list[float]], Meta(description="The vectors, in the order of the inputs.")]
    total_duration: Annotated[int, Meta(description=_NANOSECONDS)]
    load_duration: Annotated[int, Meta(description="0.")]
    prompt_eval_count: Annotated[int, Meta(description="Tokens of all inputs.")]
    weights_version: Annotated[str | None, Meta(description=WEIGHTS_VERSION)] = None


class OllamaVector(msgspec.Struct):
    """The vector of one text."""

    embedding: Annotated[list[float], Meta(description="The vector.")]
    weights_version: Annotated[str | None, Meta(description=WEIGHTS_VERSION)] = None


class OllamaModelEntry(msgspec.Struct, omit_defaults=True):
    """A served model, as lists have it."""

    name: Annotated[str, Meta(description="Its name in requests.")]
    model: Annotated[str, Meta(description="The same.")]
    size: Annotated[int, Meta(description="Bytes of its weights.")]
    digest: Annotated[str, Meta(description="Digest of its weights.")]
    details: Annotated[dict[str, Any], Meta(description="Its form: format, family, quantization_level.")]
    modified_at: Annotated[str | None, Meta(description="When the gateway started (tags).")] = None
    expires_at: Annotated[str | None, Meta(description="Never: the engines stay (ps).")] = None
    size_vram: Annotated[int | None, Meta(description="Bytes of its weights on a GPU (ps).")] = None
    context_length: Annotated[int | None, Meta(description="Limit of prompt and output tokens (ps).")] = None


class OllamaModelList(msgspec.Struct):
    """The served models."""

    models: Annotated[list[OllamaModelEntry], Meta(description="The models and their adapters.")]


class OllamaModelDescription(msgspec.Struct):
    """A served model."""

    modelfile: Annotated[str, Meta(description="FROM and its name.")]
    parameters: Annotated[str, Meta(description="Empty.")]
    template: Annotated[str, Meta(description="What the chat template takes, not the template.")]
    details: Annotated[dict[str, Any], Meta(description="Its form: format, family, quantization_level.")]
    model_info: Annotated[dict[str, Any], Meta(description="Limits of the model.")]
    capabilities: Annotated[list[str], Meta(description="completion, embedding, vision, tools, thinking.")]
    modified_at: Annotated[str, Meta(description="When the gateway started.")]


class OllamaPulled(msgspec.Struct):
    """The model is there."""

    status: Annotated[str, Meta(description="success")]


class OllamaVersion(msgspec.Struct):
    """The version of Ollama whose API is spoken."""

    version: Annotated[str, Meta(description="Version of Ollama.")]


class OllamaErrorResponse(msgspec.Struct):
    """Describes an error in Ollama's form."""

    error: Annotated[str, Meta(description="What was wrong.")]
