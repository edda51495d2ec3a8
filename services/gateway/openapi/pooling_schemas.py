"""Defines the bodies of embeddings, classes and scores, for reading and for the OpenAPI document alike."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from .constraints import INTEGER, PROMPT
from .request_schemas import Turns

_INPUT = {"anyOf": [rule for rule in PROMPT["anyOf"] if rule != {"type": "null"}]}
_TEXTS = {
    "anyOf": [
        {"type": "string", "minLength": 1},
        {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1},
        {"type": "null"},
    ]
}


class PoolingFields(msgspec.Struct, frozen=True, kw_only=True):
    """Fields that all of these endpoints share."""

    model: Annotated[str | None, Meta(description="Name of the served model; null: that model.")] = None
    truncate_prompt_tokens: Annotated[
        Any,
        Meta(
            description="Keep so many tokens of each input, special tokens included; -1: the model's context. Null: an "
            "input that exceeds the context is refused.",
            extra_json_schema=INTEGER,
        ),
    ] = None
    truncation_side: Annotated[
        Literal["left", "right"] | None, Meta(description="right: keep the first tokens instead of the last ones.")
    ] = None
    add_special_tokens: Annotated[bool | None, Meta(description="False: encode texts without special tokens.")] = None
    priority: Annotated[
        Annotated[int, Meta(ge=-(2**31), lt=2**31)] | None,
        Meta(description="Lower runs first, if engines schedule by priority."),
    ] = None
    cache_salt: Annotated[
        Annotated[str, Meta(min_length=1, max_length=256)] | None,
        Meta(description="Share cached prefixes only with the same tenant's requests that have this salt too."),
    ] = None
    use_activation: Annotated[
        bool | None,
        Meta(description="False: vectors as they are, not of length 1, and logits instead of probabilities."),
    ] = None


class InputFields(PoolingFields, frozen=True, kw_only=True):
    """Fields of endpoints with one input or several, or a conversation as the only one."""

    input: Annotated[
        Any, Meta(description="One input or several, at most 2048, as text or token ids.", extra_json_schema=_INPUT)
    ] = None
    messages: Annotated[Turns | None, Meta(description="Instead of input: a conversation.")] = None
    add_generation_prompt: Annotated[bool | None, Meta(description="True: open the assistant's turn.")] = None
    continue_final_message: Annotated[bool | None, Meta(description="Leave the last message open.")] = None
    chat_template_kwargs: Annotated[dict[str, Any] | None, Meta(description="Variables of the chat template.")] = None


class ClassifyRequest(InputFields, frozen=True, kw_only=True):
    """Asks for the probabilities of the classes of the model's head."""


class EmbeddingRequest(InputFields, frozen=True, kw_only=True):
    """Asks for one vector for each input."""

    dimensions: Annotated[
        Any, Meta(description="Return only the first numbers of each vector.", extra_json_schema=INTEGER)
    ] = None
    encoding_format: Annotated[
        Literal["float", "base64"] | None, Meta(description="base64: float32 numbers, little-endian.")
    ] = None
    normalize: Annotated[bool | None, Meta(description="Older name of use_activation.")] = None
    prompt_name: Annotated[
        str | None,
        Meta(
            description="Put this prompt of the checkpoint's files before each text. Null: its default prompt, if any."
        ),
    ] = None


class PoolingRequest(EmbeddingRequest, frozen=True, kw_only=True):
    """Asks for what a task computes from each input."""

    task: Annotated[
        Literal["embed", "classify", "score", "token_embed", "token_classify"] | None,
        Meta(description="Null: vectors or classes of all tokens, if the model serves that, otherwise its own task."),
    ] = None


class ScoreRequest(PoolingFields, frozen=True, kw_only=True):
    """Asks for the relevance of texts to texts: one to each, or one to all."""

    text_1: Annotated[Any, Meta(description="The query, or one for each document.", extra_json_schema=_TEXTS)] = None
    text_2: Annotated[Any, Meta(description="The documents.", extra_json_schema=_TEXTS)] = None
    queries: Annotated[Any, Meta(description="Another name of text_1.", extra_json_schema=_TEXTS)] = None
    documents: Annotated[Any, Meta(description="Another name of text_2.", extra_json_schema=_TEXTS)] = None


class RerankRequest(PoolingFields, frozen=True, kw_only=True):
    """Asks for the documents in the order of their relevance to a query."""

    query: Annotated[str, Meta(min_length=1, description="The query.")]
    documents: Annotated[
        list[str | dict[str, Any]], Meta(min_length=1, description='Texts, or objects {"text": …}; at most 2048.')
    ]
    top_n: Annotated[
        Annotated[int, Meta(ge=0)] | None, Meta(description="Return only the best; null or 0: all documents.")
    ] = None
    return_documents: Annotated[bool | None, Meta(description="False: return no texts.")] = None


class PoolingUsage(msgspec.Struct):
    """Counts of tokens in all inputs."""

    prompt_tokens: Annotated[int, Meta(description="Tokens of the inputs.")]
    total_tokens: Annotated[int, Meta(description="The same.")]


class PooledAnswer(msgspec.Struct, kw_only=True):
    """Fields that the answers of all of these endpoints share."""

    id: Annotated[str, Meta(description="Of the call.")]
    model: Annotated[str, Meta(description="Name of the model.")]
    usage: Annotated[PoolingUsage, Meta(description="Tokens of all inputs.")]
    weights_version: Annotated[
        str | None, Meta(description="The weights that computed all results, as 16 hexadecimal digits.")
    ] = None


class PooledList(PooledAnswer, kw_only=True):
    """Fields of an answer that lists a result for each input."""

    object: Annotated[Literal["list"], Meta(description="The kind of this object.")]
    created: Annotated[int, Meta(description="Unix time.")]


class Embedding(msgspec.Struct):
    """The vector of one input."""

    object: Annotated[Literal["embedding"], Meta(description="The kind of this object.")]
    index: Annotated[int, Meta(description="Number of the input.")]
    embedding: Annotated[list[float] | str, Meta(description="Numbers, or base64 of float32 numbers.")]


class EmbeddingList(PooledList, kw_only=True):
    """The vectors of all inputs, in order."""

    data: Annotated[list[Embedding], Meta(description="One for each input, in order.")]


class Classification(msgspec.Struct):
    """The classes of one input."""

    index: Annotated[int, Meta(description="Number of the input.")]
    label: Annotated[str, Meta(description="Name of the likeliest class.")]
    probs: Annotated[list[float], Meta(description="One number for each class.")]
    num_classes: Annotated[int, Meta(description="Classes of the model.")]


class ClassificationList(PooledList, kw_only=True):
    """The classes of all inputs, in order."""

    data: Annotated[list[Classification], Meta(description="One for each input, in order.")]


class PooledData(msgspec.Struct):
    """The result of one input."""

    object: Annotated[Literal["pooling"], Meta(description="The kind of this object.")]
    index: Annotated[int, Meta(description="Number of the input.")]
    data: Annotated[
        float | list[float | list[float]] | str,
        Meta(description="A number, numbers or rows of numbers, or base64 of float32 numbers."),
    ]


class PoolingList(PooledList, kw_only=True):
    """The results of all inputs, in order."""

    data: Annotated[list[PooledData], Meta(description="One for each input, in order.")]


class ScoreData(msgspec.Struct):
    """The relevance of one pair."""

    object: Annotated[Literal["score"], Meta(description="The kind of this object.")]
    index: Annotated[int, Meta(description="Number of the pair.")]
    score: Annotated[float, Meta(description="Larger is more relevant.")]


class ScoreList(PooledList, kw_only=True):
    """The relevance of all pairs, in order."""

    data: Annotated[list[ScoreData], Meta(description="One for each input, in order.")]


class RankedDocument(msgspec.Struct, omit_defaults=True):
    """A document and its relevance."""

    index: Annotated[int, Meta(description="Number of the document in the request.")]
    relevance_score: Annotated[float, Meta(description="Larger is more relevant.")]
    document: Annotated[dict[str, Any] | None, Meta(description='{"text": …}')] = None


class Ranking(PooledAnswer, kw_only=True):
    """The documents, the most relevant first."""

    results: Annotated[list[RankedDocument], Meta(description="The most relevant first.")]
