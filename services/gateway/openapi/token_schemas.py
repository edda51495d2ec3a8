"""Defines the bodies of rendering, of its reverse, and of generation that takes and gives tokens, with vLLM's names (of
version 0.32)."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from .request_schemas import CommonFields, StreamOptions
from .response_schemas import MIXED_NUMERICS, WEIGHTS_VERSION

TokenIds = Annotated[
    Any,
    Meta(extra_json_schema={"type": "array", "items": {"type": "integer", "minimum": 0, "exclusiveMaximum": 2**32}}),
]
_MaybeIds = Annotated[
    Any,
    Meta(
        extra_json_schema={
            "anyOf": [
                {"type": "array", "items": {"type": "integer", "minimum": 0, "exclusiveMaximum": 2**32}},
                {"type": "null"},
            ]
        }
    ),
]
_Null = Annotated[Any, Meta(extra_json_schema={"type": "null"})]
_NoItems = dict[str, list[Any]] | None
Model = Annotated[str | None, Meta(description="Name of the served model; null: that model.")]


class TokenSampling(CommonFields, frozen=True, kw_only=True):
    """What ``sampling_params`` may hold beside the table of sampling parameters."""

    logprobs: Any = None
    output_kind: Any = None
    flat_logprobs: bool | None = None
    skip_clone: bool | None = None


class PlaceholderRange(msgspec.Struct, frozen=True, kw_only=True):
    """Where an image or a sound stands in a prompt."""

    offset: Annotated[Annotated[int, Meta(ge=0, lt=2**32)], Meta(description="Its first token.")]
    length: Annotated[
        Annotated[int, Meta(ge=1, lt=2**32)], Meta(description="Tokens up to its last one, those between its rows too.")
    ]


class PromptFeatures(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Names the images (`image`) or sounds (`audio`) of a prompt by their files, as render does."""

    mm_hashes: Annotated[
        dict[str, list[str]], Meta(description="SHA-256 of each file, of this key's earlier requests, in hexadecimal.")
    ]
    mm_placeholders: Annotated[dict[str, list[PlaceholderRange]], Meta(description="As many places for each kind.")]
    kwargs_data: Annotated[
        _NoItems, Meta(description="Null, also for each item: no tensors of another server's processor.")
    ] = None
    mm_metadata: Annotated[_NoItems, Meta(description="As kwargs_data.")] = None


class ContentPart(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An image, a video or a sound of a prompt."""

    type: Annotated[Literal["image_url", "audio_url", "video_url"], Meta(description="What it is.")]
    url: Annotated[str | None, Meta(description="A data: URL, or an address that an encoder fetches.")] = None
    uuid: Annotated[str | None, Meta(description="Its name in later requests, or of an earlier one without url.")] = (
        None
    )


class TokenGenerationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Continues token ids, as a call that renders returns them."""

    token_ids: Annotated[TokenIds, Meta(description="The prompt.")]
    sampling_params: Annotated[
        dict[str, Any],
        Meta(description="Sampling parameters with vLLM's names. Default of max_tokens: what the prompt leaves."),
    ]
    request_id: Annotated[str | None, Meta(description="Returned with a prefix; by default one is drawn.")] = None
    model: Model = None
    output_mode: Annotated[
        Literal["tokens", "text"], Meta(description="text: return the text too, and tokens in logprobs as text.")
    ] = "tokens"
    stream: Annotated[bool | None, Meta(description="Answer with server-sent events.")] = None
    stream_options: Annotated[StreamOptions | None, Meta(description="Only with stream.")] = None
    return_token_ids: Annotated[bool | None, Meta(description="Return the prompt's token ids too.")] = None
    cache_salt: Annotated[
        Annotated[str, Meta(min_length=1, max_length=256)] | None,
        Meta(description="Share cached prefixes only with the same tenant's requests that have this salt too."),
    ] = None
    priority: Annotated[
        Annotated[int, Meta(ge=-(2**31), lt=2**31)] | None,
        Meta(description="Lower runs first, if engines schedule by priority."),
    ] = None
    reasoning_ended: Annotated[
        bool | None,
        Meta(
            description="Whether the prompt has closed the reasoning (true) or opened it (false); null: see its tokens."
        ),
    ] = None
    reasoning_parser_kwargs: Annotated[
        dict[str, Any] | None, Meta(description="Of no effect: reasoning_ended and the tokens say it.")
    ] = None
    token_offsets: Annotated[Any, Meta(description="Of no effect.", extra_json_schema={})] = None
    features: Annotated[
        PromptFeatures | None, Meta(description="The images and sounds of the prompt, by files that were sent before.")
    ] = None
    content_parts: Annotated[
        list[ContentPart] | None,
        Meta(description="The images and sounds of the prompt, in its order; excludes features."),
    ] = None
    mm_processor_kwargs: Annotated[
        dict[str, Any] | None, Meta(description="Options of their processor, as in the chat that was rendered.")
    ] = None
    kv_transfer_params: Annotated[
        dict[str, Any] | None,
        Meta(
            description="Only from peers, over --internal-listen: do_remote_decode with max_tokens 1 leaves the KV of "
            "the prompt under a lease, and what the answer returns lets another request continue from it."
        ),
    ] = None
    ec_transfer_params: Annotated[_Null, Meta(description="Only null: encoders are the mesh's own.")] = None


class RenderedRequest(TokenGenerationRequest, frozen=True, kw_only=True):
    """What a conversation or a prompt became: a body of ``/inference/v1/generate``."""


class GenerateLogProb(msgspec.Struct, frozen=True, kw_only=True):
    """A token and its log probability."""

    token_id: Annotated[Annotated[int, Meta(ge=0, lt=2**32)], Meta(description="The token.")]
    logprob: Annotated[float, Meta(description="Its log probability; -9999 stands for minus infinity.")]
    rank: Annotated[int | None, Meta(description="1: the likeliest; null: unknown.")] = None


class GenerateLogProbsContent(GenerateLogProb, frozen=True, kw_only=True):
    """A token of the output with the likeliest ones at its position."""

    top_logprobs: Annotated[list[GenerateLogProb], Meta(description="The output's own token first.")] = []


class GenerateLogProbs(msgspec.Struct, frozen=True, kw_only=True):
    """Log probabilities of an output."""

    content: Annotated[list[GenerateLogProbsContent] | None, Meta(description="One entry for each token.")] = None


class GeneratedChoice(msgspec.Struct, frozen=True, kw_only=True):
    """An output in tokens."""

    index: Annotated[Annotated[int, Meta(ge=0, lt=2**31)], Meta(description="Number of the output.")]
    token_ids: Annotated[_MaybeIds, Meta(description="Its tokens; in a stream the new ones.")] = None
    logprobs: Annotated[GenerateLogProbs | None, Meta(description="If requested.")] = None
    finish_reason: Annotated[str | None, Meta(description="Why it ended; null: it goes on.")] = None
    stop_reason: Annotated[str | int | None, Meta(description="The stop string or token id that ended it.")] = None
    text: Annotated[str | None, Meta(description="With output_mode text.")] = None
    weights_version: Annotated[str | None, Meta(description=WEIGHTS_VERSION)] = None
    mixed_numerics: Annotated[bool | None, Meta(description=MIXED_NUMERICS)] = None


class GeneratedTokens(msgspec.Struct, frozen=True, kw_only=True):
    """An answer in tokens, or a chunk of one."""

    choices: Annotated[list[GeneratedChoice], Meta(description="The outputs; in a stream at most one of them.")]
    request_id: Annotated[str, Meta(description="Id of the request.")] = ""
    output_mode: Annotated[Literal["tokens", "text"], Meta(description="What it holds.")] = "tokens"
    model: Annotated[str | None, Meta(description="The served model.")] = None
    created: Annotated[int | None, Meta(description="Unix time, seconds.")] = None
    usage: Annotated[dict[str, Any] | None, Meta(description="Counts of tokens.")] = None
    prompt_logprobs: Annotated[Any, Meta(description="If requested; not in a stream.", extra_json_schema={})] = None
    prompt_token_ids: Annotated[_MaybeIds, Meta(description="If requested; in a stream in the first chunk.")] = None
    kv_transfer_params: Annotated[
        dict[str, Any] | None,
        Meta(description="Where the KV of a prefill is, for a peer that asked; of no effect in what is derendered."),
    ] = None


class DerenderState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the next chunk of a stream depends on: send it back with that chunk."""

    prev_token_ids: Annotated[
        Annotated[list[Annotated[int, Meta(ge=0, lt=2**32)]], Meta(max_length=512)],
        Meta(description="The last tokens."),
    ] = []
    held_text: Annotated[
        Annotated[str, Meta(max_length=1 << 14)], Meta(description="Text that may begin a stop string.")
    ] = ""
    stop_string: Annotated[str | None, Meta(description="The stop string at which the text has ended.")] = None
    role_sent: Annotated[bool, Meta(description="Whether a chunk had the role.")] = False
    num_tokens: Annotated[Annotated[int, Meta(ge=0, lt=2**31)], Meta(description="Tokens of the output so far.")] = 0
    text_offset: Annotated[Annotated[int, Meta(ge=0, lt=2**53)], Meta(description="Characters, for logprobs.")] = 0
    session: Annotated[
        Annotated[str, Meta(max_length=64)],
        Meta(description="Where the gateway keeps a parsed chat; empty: the state is all there is."),
    ] = ""
    output_token_ids: Annotated[
        _MaybeIds,
        Meta(
            description="Set it to all tokens before this chunk when the answer is 404 request_lost, because the "
            "gateway that kept the session has ended: any gateway then goes on from there."
        ),
    ] = None


class DerenderRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What both ways back have in common: a whole answer in tokens or, with stream, one chunk of it."""

    model: Model = None
    stream: Annotated[bool | None, Meta(description="True: one chunk in generate_chunk.")] = None
    generate_chunk: Annotated[GeneratedTokens | None, Meta(description="With stream: an event of the generation.")] = (
        None
    )
    stream_state: Annotated[
        DerenderState | None, Meta(description="With stream: of the answer before; null: none.")
    ] = None


class DerenderChatRequest(DerenderRequest, frozen=True, kw_only=True):
    """Makes a chat's answer of tokens."""

    generate_response: Annotated[GeneratedTokens | None, Meta(description="Without stream: the answer.")] = None
    chat_request: Annotated[
        dict[str, Any] | None,
        Meta(
            description="The body that was rendered: its tools, reasoning and stop strings count. null: a plain chat."
        ),
    ] = None
    prompt_tokens: Annotated[int | None, Meta(description="For the usage.")] = None
    prompt_token_ids: Annotated[_MaybeIds, Meta(description="The rendered prompt; its end is enough for the text.")] = (
        None
    )


class DerenderCompletionRequest(DerenderRequest, frozen=True, kw_only=True):
    """Makes a completion's answer of tokens."""

    generate_responses: Annotated[
        list[GeneratedTokens] | None, Meta(description="Without stream: an answer for each prompt.")
    ] = None
    completion_request: Annotated[
        dict[str, Any] | None, Meta(description="The body that was rendered; null: one with defaults.")
    ] = None
    prompt_tokens: Annotated[
        Any, Meta(description="For the usage: a number with stream, otherwise a list of them.", extra_json_schema={})
    ] = None
    prompt_token_ids: Annotated[
        Any,
        Meta(description="With stream the prompt's ids, otherwise a list of prompts or nulls.", extra_json_schema={}),
    ] = None


class Derendered(msgspec.Struct, omit_defaults=True):
    """An answer in text as the plain endpoint gives it or, with stream, a chunk of one."""

    id: Annotated[str | None, Meta(description="Id of the request.")] = None
    object: Annotated[str | None, Meta(description="As of the plain endpoint.")] = None
    created: Annotated[int | None, Meta(description="Unix time, seconds.")] = None
    model: Annotated[str | None, Meta(description="The served model.")] = None
    choices: Annotated[list[dict[str, Any]] | None, Meta(description="As of the plain endpoint.")] = None
    usage: Annotated[dict[str, Any] | None, Meta(description="Token counts.")] = None
    chunk: Annotated[dict[str, Any] | None, Meta(description="With stream: as an event of the plain endpoint.")] = None
    stream_state: Annotated[DerenderState | None, Meta(description="With stream: for the next chunk.")] = None
