"""The table of sampling parameters: each row gives a name, a type with its bounds, a default and a description.

To add a parameter, write a row of :class:`SamplingFields` here, add a field of the same name to ``SamplingParams`` in
``protos/tokenloom/v1/types.proto`` (``optional`` unless its default is zero), and write the code that uses it: sampler
and scheduler read it as an attribute of the engine core's parameters. One that changes logits is a class of
``gpu_worker/sampler/host/logits_processors.py``; one that changes how a token is drawn from them stands in the three
samplers that ``gpu_worker/sampler/host/sampler.py`` names. Everything in between derives from the row when
modules are imported: the conversion of JSON and Python values, the range checks, ``SamplingParams`` of the offline API,
the keyword arguments of the client, the request bodies of the HTTP API and its OpenAPI document, and the parameters of
the engine core. ``request/validation.py`` needs an entry only for rules that a row cannot express, such as a limit that
depends on the model.

Every row is ``Annotated[type, …, Meta(description=…)]``, so that the last annotation describes it. The engine core
imports this module: it holds plain data only.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, get_args

from msgspec import Meta, Struct
from msgspec.structs import fields

DEFAULT_MAX_LOGPROBS = 20
"""Alternatives per position when the engine sets no limit, as in vLLM."""
MAX_SAMPLES = 128
"""Limits the samples of one prompt."""
MAX_REPETITION = 1024
"""Limits the sizes and the count of repetition_detection, because the cost of each token grows with them."""
MAX_LOGIT_BIASES = 4096
"""Limits the tokens of logit_bias: each takes a microsecond or more to check, and is copied for each prompt."""
MAX_TOKEN_IDS = 1 << 20
"""Limits lists of token ids that have no limit of their own; no vocabulary has as many tokens."""
TokenId = Annotated[int, Meta(ge=0, le=2**32 - 1)]
Bias = Annotated[float, Meta(ge=-100, le=100)]
PatternSize = Annotated[int, Meta(ge=0, le=MAX_REPETITION)]
NumLogprobs = Annotated[int, Meta(ge=-1)]


def _of_checkpoint(description: str) -> Meta:
    """Describe a row whose default a checkpoint's ``generation_config.json`` may replace."""
    return Meta(description=description, extra={"of_checkpoint": True})


class RepetitionDetectionParams(Struct, kw_only=True, forbid_unknown_fields=True):
    """Ends an output that repeats one pattern of tokens, with finish reason `repetition`."""

    max_pattern_size: Annotated[PatternSize, Meta(description="Tokens in the longest pattern; 0 turns it off.")] = 0
    min_pattern_size: Annotated[PatternSize, Meta(description="Tokens in the shortest pattern; 0 means 1.")] = 0
    min_count: Annotated[PatternSize, Meta(description="Repetitions that end the output, at least 2.")] = 0


class StructuredOutputsParams(Struct, kw_only=True):
    """Constrains the output; exactly one constraint must be set, whose blanks the last two fields choose."""

    json: Annotated[str | Mapping[str, Any] | None, Meta(description="A JSON schema, or its source.")] = None
    regex: Annotated[str | None, Meta(description="A regular expression that the whole text matches.")] = None
    choice: Annotated[Sequence[str] | None, Meta(description="The texts to choose from.")] = None
    grammar: Annotated[str | None, Meta(description="A context-free grammar in EBNF.")] = None
    json_object: Annotated[bool | None, Meta(description="True: any JSON object.")] = None
    structural_tag: Annotated[
        str | Mapping[str, Any] | None,
        Meta(description="A structural tag, or its JSON source: constraints on parts of the text, such as calls."),
    ] = None
    whitespace_pattern: Annotated[
        str | None, Meta(description="With json or json_object: a regular expression for blanks between two tokens.")
    ] = None
    disable_any_whitespace: Annotated[
        bool | None, Meta(description="With json or json_object: true allows no blanks between tokens.")
    ] = None


class SamplingFields(Struct, kw_only=True):
    """Sampling parameters that the engine receives as the client sets them, with vLLM's names and defaults."""

    max_tokens: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(
            description="Maximum number of tokens to generate; 0 only with echo.",
            extra_json_schema={"anyOf": [{"type": "integer", "minimum": 0}, {"type": "null"}]},
        ),
    ] = 16
    min_tokens: Annotated[int, Meta(ge=0), Meta(description="Tokens before which no stop token may come.")] = 0
    temperature: Annotated[float, Meta(ge=0), _of_checkpoint("0 is greedy.")] = 1.0
    top_p: Annotated[
        float, Meta(gt=0, le=1), _of_checkpoint("Draw from the likeliest tokens with this total probability.")
    ] = 1.0
    top_k: Annotated[int, Meta(ge=-1), _of_checkpoint("Draw from so many of the likeliest tokens; 0 or -1: all.")] = 0
    min_p: Annotated[
        float, Meta(ge=0, le=1), _of_checkpoint("Lowest probability, relative to that of the likeliest token.")
    ] = 0.0
    seed: Annotated[int | None, Meta(description="64 bits. Equal seeds draw equal tokens.")] = None
    presence_penalty: Annotated[
        float, Meta(ge=-2, le=2), Meta(description="Subtracted once from the logits of generated tokens.")
    ] = 0.0
    frequency_penalty: Annotated[
        float, Meta(ge=-2, le=2), Meta(description="Subtracted for each time that a token was generated.")
    ] = 0.0
    repetition_penalty: Annotated[
        float, Meta(gt=0), _of_checkpoint("Divides the logits of tokens in the prompt or the output.")
    ] = 1.0
    stop_token_ids: Annotated[
        Annotated[Sequence[TokenId], Meta(max_length=1024)] | None,
        Meta(description="Tokens that end the output, in addition to the model's own."),
    ] = None
    logprobs: Annotated[
        NumLogprobs | None, Meta(description="Number of likeliest tokens to return for each token; -1: all.")
    ] = None
    prompt_logprobs: Annotated[
        NumLogprobs | None,
        Meta(
            description="Number of likeliest tokens to return for each prompt token; -1: all. Not in streams.",
            extra_json_schema={"anyOf": [{"type": "integer"}, {"const": False}, {"type": "null"}]},
        ),
    ] = None
    logprob_token_ids: Annotated[
        Sequence[TokenId] | None, Meta(description="With logprobs: tokens to return whatever their rank.")
    ] = None
    logit_bias: Annotated[
        Mapping[TokenId, Bias] | None,
        Meta(description="At most 4,096 token ids, each with what is added to its logit, from -100 to 100."),
    ] = None
    allowed_token_ids: Annotated[
        Annotated[Sequence[TokenId], Meta(min_length=1)] | None, Meta(description="The only tokens that may be drawn.")
    ] = None
    repetition_detection: Annotated[
        RepetitionDetectionParams | None, Meta(description="Ends outputs that repeat themselves.")
    ] = None
    skip_reading_prefix_cache: Annotated[
        bool | None, Meta(description="True: compute the whole prompt, even if parts of it are cached.")
    ] = None
    thinking_token_budget: Annotated[
        Annotated[int, Meta(ge=0)] | None,
        Meta(description="Reasoning tokens after which the answer must begin; the mark between both is not counted."),
    ] = None
    return_routed_experts: Annotated[
        bool, Meta(description="Whether to return which experts computed each token; only for models with experts.")
    ] = False
    routed_experts_prompt_start: Annotated[
        int,
        Meta(ge=0, le=2**32 - 1),
        Meta(
            description="With return_routed_experts: the position from which on experts are returned. Only tokens "
            "before it may come from a prefix cache."
        ),
    ] = 0
    extra_args: Annotated[
        Mapping[str, Any] | None,
        Meta(description="Arguments for logits processors of plugins, by the names that these declare."),
    ] = None


class GenerationFields(SamplingFields, kw_only=True):
    """All parameters of a generation in the form in which Python callers give them."""

    structured_outputs: Annotated[
        StructuredOutputsParams | None, Meta(description="A constraint on the output, such as a JSON schema.")
    ] = None
    n: Annotated[int, Meta(ge=1, le=MAX_SAMPLES), Meta(description="Samples of each prompt.")] = 1
    stop: Annotated[str | Sequence[str] | None, Meta(description="Texts that end the output, at most 16.")] = None
    bad_words: Annotated[Sequence[str] | None, Meta(description="Texts that must not appear in the output.")] = None
    ignore_eos: Annotated[bool, Meta(description="Continue after an end-of-sequence token.")] = False
    include_stop_str_in_output: Annotated[bool, Meta(description="Keep the stop string in the text.")] = False
    skip_special_tokens: Annotated[bool, Meta(description="Leave special tokens out of the text.")] = True
    spaces_between_special_tokens: Annotated[bool, Meta(description="Put spaces around special tokens.")] = True
    detokenize: Annotated[bool, Meta(description="False: return token ids and no text.")] = True
    stream_interval: Annotated[
        int, Meta(ge=1, le=2**32 - 1), Meta(description="Tokens between two outputs of a stream.")
    ] = 1


CHECKPOINT_NAMES = tuple(
    field.name for field in fields(SamplingFields) if (get_args(field.type)[-1].extra or {}).get("of_checkpoint")
)
"""Parameters whose defaults ``generation_config.json`` may replace."""


_MASK = 2**64 - 1
_STEP = 0x9E3779B97F4A7C15  # 2^64 / golden ratio


def sample_seed(seed: int, index: int) -> int:
    """Return the seed of sample ``index`` of a request with ``seed``; seeds are unsigned 64-bit integers.

    Sample 0 draws the same tokens as a request for one sample. The others get SplitMix64's output function (Steele,
    Lea and Flood, "Fast splittable pseudorandom number generators", 2014), a bijection, so their seeds all differ.
    """
    if index == 0:
        return seed
    mixed = (seed + index * _STEP) & _MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
    return mixed ^ (mixed >> 31)
