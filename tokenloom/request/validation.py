"""Checks requests at the trust boundaries: the public edge (gateway, offline API) and the engine's own entrance.

Values are checked as messages of the wire's types, so that what is checked is what runs. Ranges come from the table of
sampling parameters (:mod:`.sampling_params`). Errors are ``InvalidArgument`` and name the field as the public API
spells it.
"""

import math
import sys
from collections.abc import Callable, Collection, Sequence

from msgspec import inspect

from tokenloom.process.argument_schemas import MAX_ARGUMENT_BYTES, problem_of
from tokenloom.v1 import output_processor_pb2, types_pb2
from tokenloom.v1.types_pb2 import ModelLimits as Limits
from tokenloom.v1.types_pb2 import SamplingParams as Params

from . import packed_ids
from .errors import ContextLengthExceeded, InvalidArgument
from .narrowing import ALL_LOGPROBS, MIN_TEMPERATURE, check_bias_count, rows
from .output_constraints import MAX_BAD_WORDS, check_structured_outputs
from .sampling_params import DEFAULT_MAX_LOGPROBS, MAX_REPETITION, MAX_SAMPLES, SamplingFields

MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 1024
MAX_BAD_WORD_TOKENS = 128
MAX_OUTPUTS = 1024
"""Samples of all prompts of one request."""
DEFAULT_MAX_TOKENS = 16
"""For completions and the offline API, as in vLLM and OpenAI."""
_U32 = 2**32 - 1
ANY_MODEL = Limits(max_model_len=_U32, vocab_size=_U32, max_logprobs=_U32, reasoning=types_pb2.REASONING_MODE_FREE)
"""Limits for parameters that are checked before a model is known."""


def check_generate(
    token_ids: Sequence[int],
    params: Params,
    limits: Limits,
    *,
    stop: Sequence[str] = (),
    accepted_token_ids: Sequence[int] = (),
    num_samples: int = 1,
) -> None:
    """Check a whole request for text: prompt, sampling parameters, stop strings, tokens of earlier attempts."""
    check_sampling(params, limits, num_samples)
    if stop:
        check_stop(stop)
    check_prompt(token_ids, params, limits)
    if accepted_token_ids:
        check_accepted(accepted_token_ids, len(token_ids), limits)


def check_priority(priority: int, limits: Limits) -> None:
    """Refuse a priority that an engine would have to ignore."""
    if priority and not limits.priorities:
        raise InvalidArgument(
            f"priority is {priority}, but requests are served first come, first served "
            "(engines take priorities with --scheduling-policy priority)",
            "priority",
        )


def check_accepted(accepted_token_ids: Sequence[int], num_before: int, limits: Limits) -> None:
    """Check tokens of earlier attempts, at least one, that follow ``num_before`` others."""
    field = "accepted_token_ids"
    if not accepted_token_ids:
        raise InvalidArgument(f"{field} is empty", field)
    _check_token_ids(accepted_token_ids, limits, field)
    num_tokens = num_before + len(accepted_token_ids)
    if num_tokens > limits.max_model_len:
        raise ContextLengthExceeded.of(
            num_tokens, limits.max_model_len, f"prompt and accepted tokens have {num_tokens}", field
        )


def check_prompt(token_ids: Sequence[int], params: Params, limits: Limits, *, field: str = "prompt") -> None:
    """Check that the prompt has tokens, that all are in the vocabulary, and that prompt and output fit the context."""
    if not token_ids:
        raise InvalidArgument(f"{field} is empty; at least one token is needed", field)
    length, most = len(token_ids), limits.max_model_len
    if length >= most:
        reason = f"{field} has {length}; at most {most - 1} leave room for an answer"
        raise ContextLengthExceeded.of(length + (length == most), most, reason, field)
    _check_token_ids(token_ids, limits, field)
    if params.min_tokens:  # again, because max_tokens may have been filled in since
        _check_min_tokens(params, limits, "min_tokens")
    if params.HasField("max_tokens") and length + params.max_tokens > most:
        reason = f"{field} has {length} and max_tokens is {params.max_tokens}: at most {most - length}"
        raise ContextLengthExceeded.of(length + params.max_tokens, most, reason, "max_tokens")


def check_pooling_prompt(token_ids: Sequence[int], limits: Limits, *, field: str) -> None:
    """Check that a prompt from which nothing is generated has tokens of the vocabulary and fits the context."""
    if not token_ids:
        raise InvalidArgument(f"{field} is empty; at least one token is needed", field)
    if len(token_ids) > limits.max_model_len:
        reason = f"{field} has {len(token_ids)}; send a shorter one, or set truncate_prompt_tokens"
        raise ContextLengthExceeded.of(len(token_ids), limits.max_model_len, reason, field)
    _check_token_ids(token_ids, limits, field)


def check_sampling(params: Params, limits: Limits, num_samples: int = 1) -> None:
    """Check every sampling parameter that is set; defaults need no check."""
    for descriptor, value in params.ListFields():
        name = descriptor.name
        if (check := _OWN_RULES.get(name)) is not None:
            check(params, limits, name)
        if (bounds := _BOUNDS.get(name)) is not None:
            if not bounds[0] <= value <= bounds[1]:  # NaN fails every comparison
                raise InvalidArgument(f"{name} must be {bounds[2]}, not {value:g}", name)
        elif name in _LENGTHS:
            _check_token_ids(value, limits, name, _LENGTHS[name] or limits.vocab_size)
    if num_samples > 1 and params.HasField("temperature") and params.temperature == 0:
        raise InvalidArgument("n must be 1 with temperature 0: all samples would be the same", "n")


def check_samples(n: int, num_prompts: int = 1) -> None:
    """Check how many samples of how many prompts one request may ask for, before anything is made for them."""
    if not 1 <= n <= MAX_SAMPLES:
        raise InvalidArgument(f"n must be from 1 to {MAX_SAMPLES}, not {n}", "n")
    if n > 1 and n * num_prompts > MAX_OUTPUTS:
        raise InvalidArgument(f"n is {n} for {num_prompts} prompts: at most {MAX_OUTPUTS} outputs a request", "n")


def check_text(text: output_processor_pb2.TextOptions) -> None:
    """Check the stop strings, and that there is a text to find them in."""
    if text.stop:
        check_stop(text.stop)
        if text.HasField("detokenize") and not text.detokenize:
            raise InvalidArgument("stop needs detokenize: stop strings are found in the text", "stop")


def check_stop_count(num_strings: int) -> None:
    """Check the number of stop strings, before they are looked at."""
    if num_strings > MAX_STOP_STRINGS:
        raise InvalidArgument(f"stop may hold at most {MAX_STOP_STRINGS} strings, not {num_strings}", "stop")


def check_stop(strings: Sequence[str]) -> None:
    """Check stop strings."""
    check_stop_count(len(strings))
    for string in strings:
        if not string:
            raise InvalidArgument("stop must not hold an empty string", "stop")
        if len(string) > MAX_STOP_STRING_CHARS:
            raise InvalidArgument(f"a stop string may have at most {MAX_STOP_STRING_CHARS} characters", "stop")


def fill_max_tokens(
    params: Params, prompt_len: int, limits: Limits, *, chat: bool, default: int = 0, most: int = _U32
) -> None:
    """Set ``max_tokens`` if the client did not, to at most ``most`` and what is left of the context: to ``default``
    (the model's own; 0: it has none), otherwise to all that is left for a chat and to 16 for a completion."""
    if not params.HasField("max_tokens"):
        rest = max(min(limits.max_model_len - prompt_len, most), 1)
        params.max_tokens = min(default or (rest if chat else DEFAULT_MAX_TOKENS), rest)


def max_logprobs(limits: Limits) -> int:
    """Return how many alternatives a position may ask for; the vocabulary's size or more means no limit."""
    return limits.max_logprobs if limits.HasField("max_logprobs") else DEFAULT_MAX_LOGPROBS


def _check_temperature(params: Params, limits: Limits, field: str) -> None:
    if 0 < params.temperature < MIN_TEMPERATURE:
        raise InvalidArgument(f"{field} must be 0 (greedy) or at least {MIN_TEMPERATURE:g}", field)


def _check_max_tokens(params: Params, limits: Limits, field: str) -> None:
    if not params.max_tokens:
        raise InvalidArgument(f"{field} must be at least 1, not 0", field)
    if params.max_tokens > limits.max_model_len:
        reason = f"{field} is {params.max_tokens}"
        raise ContextLengthExceeded.of(params.max_tokens, limits.max_model_len, reason, field)


def _check_min_tokens(params: Params, limits: Limits, field: str) -> None:
    if params.HasField("max_tokens") and params.min_tokens > params.max_tokens:
        raise InvalidArgument(
            f"{field} is {params.min_tokens}, more than max_tokens, which is {params.max_tokens}", field
        )


def _check_logprobs(params: Params, limits: Limits, field: str) -> None:
    most = max_logprobs(limits)
    asked = getattr(params, field)
    if most < limits.vocab_size and asked > most:
        raise InvalidArgument(f"{field} must be from 0 to {most}, not {-1 if asked == ALL_LOGPROBS else asked}", field)


def _check_logprob_token_ids(params: Params, limits: Limits, field: str) -> None:
    if not params.HasField("logprobs"):
        raise InvalidArgument(f"{field} needs logprobs, which is not set", field)
    most = max_logprobs(limits)
    if len(getattr(params, field)) > most:
        raise InvalidArgument(f"{field} may hold at most {most} ids", field)


def _check_logit_bias(params: Params, limits: Limits, field: str) -> None:
    check_bias_count(len(params.logit_bias), field)
    _check_token_ids(params.logit_bias.keys(), limits, field)
    low, high, words = _BIAS_BOUNDS
    for bias in params.logit_bias.values():
        if not low <= bias <= high:
            raise InvalidArgument(f"{field} must be {words}, not {bias:g}", field)


def _check_bad_words(params: Params, limits: Limits, field: str) -> None:
    words = getattr(params, field)
    if len(words) > MAX_BAD_WORDS:
        raise InvalidArgument(f"{field} may hold at most {MAX_BAD_WORDS} token sequences", field)
    for word in words:
        if not 1 <= len(word.ids) <= MAX_BAD_WORD_TOKENS:
            raise InvalidArgument(f"{field} may hold sequences of 1 to {MAX_BAD_WORD_TOKENS} tokens", field)
        _check_token_ids(word.ids, limits, field)


def _check_repetition_detection(params: Params, limits: Limits, field: str) -> None:
    detection = params.repetition_detection
    if not 1 <= detection.min_pattern_size <= detection.max_pattern_size <= MAX_REPETITION:
        raise InvalidArgument(
            f"{field}: sizes go from min_pattern_size, at least 1, to max_pattern_size, at most {MAX_REPETITION}", field
        )
    if not 2 <= detection.min_count <= MAX_REPETITION:
        raise InvalidArgument(f"{field}: min_count must be from 2 to {MAX_REPETITION}", field)


def _check_transcript(params: Params, limits: Limits, field: str) -> None:
    if not limits.cross_media_rows:
        raise InvalidArgument(f"{field} is only for models that transcribe sound", field)
    rules = params.transcript
    for token_ids in (rules.suppressed_token_ids, rules.begin_suppressed_token_ids):
        if token_ids:
            _check_token_ids(token_ids, limits, field, limits.vocab_size)
    if rules.HasField("timestamps"):
        times = rules.timestamps
        ids = (times.first_token_id, times.no_timestamps_token_id, times.num_text_ids)
        _check_token_ids(ids, limits, field)


def _check_thinking_token_budget(params: Params, limits: Limits, field: str) -> None:
    if limits.reasoning == types_pb2.REASONING_MODE_UNSPECIFIED:
        raise InvalidArgument(
            f"{field} is not available: the marks around this model's reasoning are not known "
            "(engines take them from --reasoning-parser)",
            field,
        )
    if limits.reasoning == types_pb2.REASONING_MODE_CONSTRAINED and params.HasField("structured_outputs"):
        raise InvalidArgument(
            f"{field} and structured_outputs cannot be combined: this engine constrains the reasoning too "
            "(--enable-in-reasoning), so its end cannot be forced",
            field,
        )


def _check_routed_experts(params: Params, limits: Limits, field: str) -> None:
    if params.return_routed_experts and not limits.experts_per_token:
        raise InvalidArgument(f"{field} is not available: this model has no experts", field)


def _check_extra_args(params: Params, limits: Limits, field: str) -> None:
    if limits is ANY_MODEL:
        return  # which plugins there are is not known yet
    if not limits.argument_schemas:
        raise InvalidArgument(
            f"{field} is not available: no plugin of the engines reads arguments (--plugins names them)", field
        )
    if len(params.extra_args) > MAX_ARGUMENT_BYTES:
        raise InvalidArgument(f"{field} may have at most {MAX_ARGUMENT_BYTES} bytes", field)
    if problem := problem_of(params.extra_args, limits.argument_schemas):
        raise InvalidArgument(f"{field}: {problem}", field)


def _check_token_ids(token_ids: Collection[int], limits: Limits, field: str, most: int | None = None) -> None:
    if most is not None and len(token_ids) > most:
        raise InvalidArgument(f"{field} may hold at most {most} ids, not {len(token_ids)}", field)
    # max and min in C instead of a loop: a prompt may have as many ids as the context has tokens.
    largest = packed_ids.largest(token_ids) if isinstance(token_ids, memoryview) else max(token_ids)
    if largest >= limits.vocab_size:
        raise InvalidArgument(f"{field} holds token id {largest}; ids go from 0 to {limits.vocab_size - 1}", field)
    if not isinstance(token_ids, memoryview) and min(token_ids) < 0:
        raise InvalidArgument(f"{field} holds a negative token id; ids go from 0 to {limits.vocab_size - 1}", field)


def _bounds(row: inspect.FloatType | inspect.IntType) -> tuple[float, float, str]:
    """Return the lowest and the highest value of a row, and both in words; infinities are never allowed."""
    if isinstance(row, inspect.IntType):
        first, last = row.ge or 0, _U32 if row.le is None else row.le
        return first, last, f"an integer from {first} to {last}"
    low = math.nextafter(row.gt, math.inf) if row.gt is not None else -sys.float_info.max if row.ge is None else row.ge
    start = f"of at least {low:g}" if row.gt is None else f"above {row.gt:g}"
    end = "" if row.le is None else f" and at most {row.le:g}"
    return low, sys.float_info.max if row.le is None else row.le, f"a number {start}{end}"


# For each row, what its type says; rows with a rule of their own are checked by both.
_ROWS = dict(rows(SamplingFields))
_BOUNDS = {name: _bounds(row) for name, row in _ROWS.items() if isinstance(row, (inspect.FloatType, inspect.IntType))}
del _BOUNDS["seed"]  # any 64 bits
_BIAS_BOUNDS = _bounds(_ROWS["logit_bias"].value_type)  # type: ignore[attr-defined]  # it is a mapping
_LENGTHS = {name: row.max_length for name, row in _ROWS.items() if isinstance(row, inspect.ListType)}
_OWN_RULES: dict[str, Callable[[Params, Limits, str], None]] = {
    "temperature": _check_temperature,
    "max_tokens": _check_max_tokens,
    "min_tokens": _check_min_tokens,
    "logprobs": _check_logprobs,
    "prompt_logprobs": _check_logprobs,
    "logprob_token_ids": _check_logprob_token_ids,
    "logit_bias": _check_logit_bias,
    "bad_words": _check_bad_words,
    "repetition_detection": _check_repetition_detection,
    "thinking_token_budget": _check_thinking_token_budget,
    "return_routed_experts": _check_routed_experts,
    "transcript": _check_transcript,
    "extra_args": _check_extra_args,
    "structured_outputs": lambda params, limits, field: check_structured_outputs(params.structured_outputs, field),
}
