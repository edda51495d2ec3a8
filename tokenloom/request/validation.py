"""The one validator: every entrance (HTTP, public gRPC, the engine's own stream, the offline API) checks requests here.

Values are checked after narrowing to the wire's types, so that what is checked is what runs. Errors name the field in
the public API's spelling.
"""

import math
from collections.abc import Callable, Collection, Sequence

from tokenloom.v1 import output_processor_pb2, types_pb2

from .errors import InvalidArgument
from .narrowing import ALL_LOGPROBS, MIN_TEMPERATURE
from .narrowing import narrow_int as narrow_int
from .narrowing import narrow_sampling as narrow_sampling
from .narrowing import narrow_token_ids as narrow_token_ids
from .output_constraints import check_structured_outputs

MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 1024
MAX_STOP_TOKEN_IDS = 1024
MAX_BAD_WORDS = 1024
MAX_BAD_WORD_TOKENS = 128
MAX_REPETITION = 1024
"""Of each number in repetition_detection: what it costs each token grows with them."""
MAX_SAMPLES = 128
"""Of one prompt."""
MAX_OUTPUTS = 1024
"""Of one request: samples of all its prompts."""
DEFAULT_MAX_LOGPROBS = 20
"""Alternatives at a position, as in vLLM, of engines that name no other limit."""
DEFAULT_MAX_TOKENS = 16
"""Of completions and the offline API, as in vLLM and OpenAI."""

_FLOATS = {
    # lowest, highest, whether the lowest itself is allowed; all defaults are within
    "temperature": (0.0, math.inf, True),
    "top_p": (0.0, 1.0, False),
    "min_p": (0.0, 1.0, True),
    "presence_penalty": (-2.0, 2.0, True),
    "frequency_penalty": (-2.0, 2.0, True),
    "repetition_penalty": (0.0, math.inf, False),
}


def check_generate(
    token_ids: Sequence[int],
    params: types_pb2.SamplingParams,
    limits: types_pb2.ModelLimits,
    *,
    stop: Sequence[str] = (),
    accepted_token_ids: Sequence[int] = (),
    num_samples: int = 1,
) -> None:
    """Checks a whole request for text: prompt, sampling parameters, stop strings, tokens of earlier attempts."""
    check_sampling(params, limits, num_samples)
    check_stop(stop)
    check_prompt(token_ids, params, limits)
    if accepted_token_ids:
        check_accepted(accepted_token_ids, len(token_ids), limits)


def check_priority(priority: int, limits: types_pb2.ModelLimits) -> None:
    """Refuses what an engine would have to ignore."""
    if priority and not limits.priorities:
        raise InvalidArgument(
            f"priority is {priority}, but requests are served first come, first served "
            "(engines take priorities with --scheduling-policy priority)",
            "priority",
        )


def check_accepted(accepted_token_ids: Sequence[int], num_before: int, limits: types_pb2.ModelLimits) -> None:
    """Checks tokens of earlier attempts, at least one, that follow ``num_before`` others."""
    field = "accepted_token_ids"
    if not accepted_token_ids:
        raise InvalidArgument(f"{field} is empty", field)
    _check_token_ids(accepted_token_ids, limits, field)
    num_tokens = num_before + len(accepted_token_ids)
    if num_tokens > limits.max_model_len:
        raise InvalidArgument(
            f"prompt and accepted tokens have {num_tokens} tokens, the model's context {limits.max_model_len}", field
        )


def check_prompt(
    token_ids: Sequence[int], params: types_pb2.SamplingParams, limits: types_pb2.ModelLimits, *, field: str = "prompt"
) -> None:
    """Checks that the prompt has tokens, all of them the model's, and that prompt and output fit the context."""
    if not token_ids:
        raise InvalidArgument(f"{field} is empty; at least one token is needed", field)
    length = len(token_ids)
    if length >= limits.max_model_len:
        raise InvalidArgument(
            f"{field} has {length} tokens; at most {limits.max_model_len - 1} leave room for an answer "
            f"in the model's context of {limits.max_model_len}",
            field,
        )
    _check_token_ids(token_ids, limits, field)
    if params.min_tokens:  # once more: max_tokens may have been filled in since
        _check_min_tokens(params, limits, "min_tokens")
    if params.HasField("max_tokens") and length + params.max_tokens > limits.max_model_len:
        raise InvalidArgument(
            f"max_tokens is {params.max_tokens}, but {field} has {length} tokens and the model's context is "
            f"{limits.max_model_len}: at most {limits.max_model_len - length}",
            "max_tokens",
        )


def check_sampling(params: types_pb2.SamplingParams, limits: types_pb2.ModelLimits, num_samples: int = 1) -> None:
    """Checks every sampling parameter; those of a later version are refused unless they are at their default."""
    check_numbers(params)
    if num_samples > 1 and params.HasField("temperature") and params.temperature == 0:
        raise InvalidArgument("n must be 1 with temperature 0: all samples would be the same", "n")
    if params.HasField("max_tokens") and not 1 <= params.max_tokens <= limits.max_model_len:
        raise InvalidArgument(
            f"max_tokens must be from 1 to the model's context of {limits.max_model_len}, not {params.max_tokens}",
            "max_tokens",
        )
    for descriptor, _ in params.ListFields():
        if (check := _CHECKS.get(descriptor.name)) is not None:
            check(params, limits, descriptor.name)


def check_numbers(params: types_pb2.SamplingParams) -> None:
    """The part of :func:`check_sampling` that needs no model: what a checkpoint gives as defaults is checked by it."""
    for descriptor, value in params.ListFields():  # those that are set: defaults need no look
        if (bounds := _FLOATS.get(descriptor.name)) is not None:
            _check_float(descriptor.name, value, *bounds)
    if 0 < params.temperature < MIN_TEMPERATURE:
        raise InvalidArgument(f"temperature must be 0 (greedy) or at least {MIN_TEMPERATURE:g}", "temperature")


def check_samples(n: int, num_prompts: int = 1) -> None:
    """Checks how many samples of how many prompts one request may ask for, before anything is made for them."""
    if not 1 <= n <= MAX_SAMPLES:
        raise InvalidArgument(f"n must be from 1 to {MAX_SAMPLES}, not {n}", "n")
    if n > 1 and n * num_prompts > MAX_OUTPUTS:
        raise InvalidArgument(f"n is {n} for {num_prompts} prompts: at most {MAX_OUTPUTS} outputs a request", "n")


def check_text(text: output_processor_pb2.TextOptions) -> None:
    """Checks how text is to be made."""
    check_stop(text.stop)
    if text.stop and text.HasField("detokenize") and not text.detokenize:
        raise InvalidArgument("stop needs detokenize: stop strings are found in the text", "stop")


def check_stop(strings: Sequence[str]) -> None:
    """Checks stop strings."""
    if len(strings) > MAX_STOP_STRINGS:
        raise InvalidArgument(f"stop may hold at most {MAX_STOP_STRINGS} strings, not {len(strings)}", "stop")
    for string in strings:
        if not string:
            raise InvalidArgument("stop must not hold an empty string", "stop")
        if len(string) > MAX_STOP_STRING_CHARS:
            raise InvalidArgument(f"a stop string may have at most {MAX_STOP_STRING_CHARS} characters", "stop")


def fill_max_tokens(
    params: types_pb2.SamplingParams, prompt_len: int, limits: types_pb2.ModelLimits, *, chat: bool, default: int = 0
) -> None:
    """Sets ``max_tokens`` where the client did not, to no more than is left of the context: to ``default`` (the
    model's own; 0: it has none), else all of it for chat, else 16."""
    if not params.HasField("max_tokens"):
        rest = max(limits.max_model_len - prompt_len, 1)
        params.max_tokens = min(default or (rest if chat else DEFAULT_MAX_TOKENS), rest)


def max_logprobs(limits: types_pb2.ModelLimits) -> int:
    """Alternatives that a position may ask for; at least the vocabulary's size: as many as one likes."""
    return limits.max_logprobs if limits.HasField("max_logprobs") else DEFAULT_MAX_LOGPROBS


def _check_stop_token_ids(params: types_pb2.SamplingParams, limits: types_pb2.ModelLimits, field: str) -> None:
    if len(params.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        raise InvalidArgument(f"{field} may hold at most {MAX_STOP_TOKEN_IDS} ids", field)
    _check_token_ids(params.stop_token_ids, limits, field)


def _check_min_tokens(params: types_pb2.SamplingParams, limits: types_pb2.ModelLimits, field: str) -> None:
    if params.HasField("max_tokens") and params.min_tokens > params.max_tokens:
        raise InvalidArgument(
            f"{field} is {params.min_tokens}, more than max_tokens, which is {params.max_tokens}", field
        )


def _check_logprobs(params: types_pb2.SamplingParams, limits: types_pb2.ModelLimits, field: str) -> None:
    most = max_logprobs(limits)
    asked = getattr(params, field)
    if most < limits.vocab_size and asked > most:
        told = -1 if asked == ALL_LOGPROBS else asked
        raise InvalidArgument(f"{field} must be from 0 to {most}, not {told}", field)


def _check_logprob_token_ids(params: types_pb2.SamplingParams, limits: types_pb2.ModelLimits, field: str) -> None:
    if not params.HasField("logprobs"):
        raise InvalidArgument(f"{field} needs logprobs, which is not set", field)
    most = max_logprobs(limits)
    if len(params.logprob_token_ids) > most:
        raise InvalidArgument(f"{field} may hold at most {most} ids", field)
    _check_token_ids(params.logprob_token_ids, limits, field)


def _check_logit_bias(params: types_pb2.SamplingParams, limits: types_pb2.ModelLimits, field: str) -> None:
    _check_token_ids(params.logit_bias.keys(), limits, field)
    for bias in params.logit_bias.values():
        _check_float(field, bias, -100.0, 100.0, low_allowed=True)


def _check_allowed_token_ids(params: types_pb2.SamplingParams, limits: types_pb2.ModelLimits, field: str) -> None:
    if len(params.allowed_token_ids) > limits.vocab_size:
        raise InvalidArgument(f"{field} holds more ids than the vocabulary has", field)
    _check_token_ids(params.allowed_token_ids, limits, field)


def _check_bad_words(params: types_pb2.SamplingParams, limits: types_pb2.ModelLimits, field: str) -> None:
    if len(params.bad_words) > MAX_BAD_WORDS:
        raise InvalidArgument(f"{field} may hold at most {MAX_BAD_WORDS} token sequences", field)
    for word in params.bad_words:
        if not 1 <= len(word.ids) <= MAX_BAD_WORD_TOKENS:
            raise InvalidArgument(f"{field} may hold sequences of 1 to {MAX_BAD_WORD_TOKENS} tokens", field)
        _check_token_ids(word.ids, limits, field)


def _check_repetition_detection(params: types_pb2.SamplingParams, limits: types_pb2.ModelLimits, field: str) -> None:
    detection = params.repetition_detection
    if not 1 <= detection.min_pattern_size <= detection.max_pattern_size <= MAX_REPETITION:
        raise InvalidArgument(
            f"{field}: sizes go from min_pattern_size, at least 1, to max_pattern_size, at most {MAX_REPETITION}",
            field,
        )
    if not 2 <= detection.min_count <= MAX_REPETITION:
        raise InvalidArgument(f"{field}: min_count must be from 2 to {MAX_REPETITION}", field)


def _check_float(name: str, value: float, low: float, high: float, low_allowed: bool) -> None:
    above = value >= low if low_allowed else value > low
    if not (math.isfinite(value) and above and value <= high):  # NaN fails every comparison
        start = f"of at least {low:g}" if low_allowed else f"above {low:g}"
        end = "" if high == math.inf else f" and at most {high:g}"
        raise InvalidArgument(f"{name} must be a number {start}{end}, not {value:g}", name)


def _check_token_ids(token_ids: Collection[int], limits: types_pb2.ModelLimits, field: str) -> None:
    largest = max(token_ids)
    if largest >= limits.vocab_size:
        raise InvalidArgument(f"{field} holds token id {largest}; ids go from 0 to {limits.vocab_size - 1}", field)
    if min(token_ids) < 0:
        raise InvalidArgument(f"{field} holds a negative token id; ids go from 0 to {limits.vocab_size - 1}", field)


def _check_structured_outputs(params: types_pb2.SamplingParams, limits: types_pb2.ModelLimits, field: str) -> None:
    check_structured_outputs(params.structured_outputs, field)


# Of fields that are set only; those of no entry are checked with the numbers, or may be anything that the wire carries.
_CHECKS: dict[str, Callable[[types_pb2.SamplingParams, types_pb2.ModelLimits, str], None]] = {
    "stop_token_ids": _check_stop_token_ids,
    "min_tokens": _check_min_tokens,
    "logprobs": _check_logprobs,
    "prompt_logprobs": _check_logprobs,
    "logprob_token_ids": _check_logprob_token_ids,
    "logit_bias": _check_logit_bias,
    "allowed_token_ids": _check_allowed_token_ids,
    "bad_words": _check_bad_words,
    "repetition_detection": _check_repetition_detection,
    "structured_outputs": _check_structured_outputs,
}
