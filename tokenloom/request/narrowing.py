"""Plain values, as JSON or Python gives them, into ``SamplingParams``: once, for the gateway and the offline API.

None is "unset". A wrong type, a bool where a number is meant, a number that the wire cannot carry: ``InvalidArgument``
naming the field. What the numbers may be is :mod:`.validation`'s business.
"""

import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tokenloom.v1 import types_pb2

from .errors import InvalidArgument
from .output_constraints import narrow_structured_outputs

(MIN_TEMPERATURE,) = struct.unpack("<f", struct.pack("<f", 1e-5))
"""Below it, dividing logits by the temperature overflows float32; 0 is greedy. As the wire's float32 holds it."""
_U32 = 2**32 - 1
ALL_LOGPROBS = _U32
"""-1 as the wire tells it: more than any vocabulary holds."""


def narrow_sampling(values: Mapping[str, object]) -> types_pb2.SamplingParams:
    """The sampling parameters in ``values`` (keys are the proto's field names)."""
    params = types_pb2.SamplingParams()
    for name, value in values.items():
        narrow = _NARROW.get(name)
        if narrow is None:
            raise InvalidArgument(f"{name} is not a sampling parameter", name)
        if value is not None:
            narrow(params, name, value)
    return params


def narrow_int(name: str, value: object, low: int, high: int) -> int:
    """``value`` as an int within [low, high]; a float with no fraction is one."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidArgument(f"{name} must be an integer, not {_kind(value)}", name)
    if not low <= value <= high:
        raise InvalidArgument(f"{name} must be from {low} to {high}", name)
    return value


def narrow_float(name: str, value: object) -> float:
    """``value`` as a float, of any size; NaN and infinities pass, for the validator to refuse."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InvalidArgument(f"{name} must be a number, not {_kind(value)}", name)
    try:
        return float(value)
    except OverflowError:
        raise InvalidArgument(f"{name} is too large", name) from None


def narrow_token_ids(name: str, value: object) -> list[int]:
    """``value`` as token ids of the wire's type; whether they are the model's is checked later."""
    if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
        raise InvalidArgument(f"{name} must be a list of token ids, not {_kind(value)}", name)
    return [item if type(item) is int and 0 <= item <= _U32 else _token_id(name, item) for item in value]


def _token_id(name: str, value: object) -> int:
    """Of a float, for JSON knows only numbers."""
    if isinstance(value, float) and value.is_integer() and 0 <= value <= _U32:
        return int(value)
    raise InvalidArgument(f"{name} must hold token ids, integers from 0 to {_U32}", name)


def _set_float(params: types_pb2.SamplingParams, name: str, value: object) -> None:
    setattr(params, name, narrow_float(name, value))


def _set_temperature(params: types_pb2.SamplingParams, name: str, value: object) -> None:
    temperature = narrow_float(name, value)
    params.temperature = 0.0 if 0 < temperature < MIN_TEMPERATURE else temperature  # greedy in effect


def _set_u32(params: types_pb2.SamplingParams, name: str, value: object) -> None:
    setattr(params, name, narrow_int(name, value, 0, _U32))


def _set_max_tokens(params: types_pb2.SamplingParams, name: str, value: object) -> None:
    params.max_tokens = narrow_int(name, value, 1, _U32)


def _set_top_k(params: types_pb2.SamplingParams, name: str, value: object) -> None:
    params.top_k = max(narrow_int(name, value, -1, _U32), 0)  # both -1 and 0 are off


def _set_seed(params: types_pb2.SamplingParams, name: str, value: object) -> None:
    params.seed = narrow_int(name, value, -(2**63), 2**64 - 1) % 2**64


def _set_token_ids(params: types_pb2.SamplingParams, name: str, value: object) -> None:
    getattr(params, name).extend(narrow_token_ids(name, value))


def _set_allowed_token_ids(params: types_pb2.SamplingParams, name: str, value: object) -> None:
    params.allowed_token_ids.extend(narrow_token_ids(name, value))
    if not params.allowed_token_ids:
        raise InvalidArgument(f"{name} is empty: nothing could be generated; leave it out to allow everything", name)


def _set_logprobs(params: types_pb2.SamplingParams, name: str, value: object) -> None:
    if value is False:
        return
    count = narrow_int(name, value, -1, _U32)
    setattr(params, name, ALL_LOGPROBS if count == -1 else count)


def _set_logit_bias(params: types_pb2.SamplingParams, name: str, value: object) -> None:
    if not isinstance(value, Mapping):
        raise InvalidArgument(f"{name} must be an object of token ids and numbers, not {_kind(value)}", name)
    for key, bias in value.items():
        # JSON has no keys but strings.
        digits = isinstance(key, str) and key.isascii() and key.isdecimal() and len(key) <= len(str(_U32))
        token_id = int(key) if digits else key
        if type(token_id) is not int or not 0 <= token_id <= _U32:
            raise InvalidArgument(f"{name} must have token ids as keys, not {key!r:.40}", name)
        params.logit_bias[token_id] = narrow_float(name, bias)


def _set_bad_words(params: types_pb2.SamplingParams, name: str, value: object) -> None:
    """Of token ids: who has texts encodes them first (:mod:`.bad_words`)."""
    if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
        raise InvalidArgument(f"{name} must be a list of lists of token ids, not {_kind(value)}", name)
    params.bad_words.extend(types_pb2.TokenIds(ids=narrow_token_ids(name, ids)) for ids in value)


def _set_repetition_detection(params: types_pb2.SamplingParams, name: str, value: object) -> None:
    """As in vLLM: a largest size of 0 is off, a smallest of 0 is 1."""
    sizes = ("max_pattern_size", "min_pattern_size", "min_count")
    if not isinstance(value, Mapping) or not set(value) <= set(sizes):
        raise InvalidArgument(f"{name} must be an object of {', '.join(sizes)}", name)
    longest, shortest, count = (narrow_int(name, value.get(size, 0), 0, _U32) for size in sizes)
    if longest:
        params.repetition_detection.max_pattern_size = longest
        params.repetition_detection.min_pattern_size = shortest or 1
        params.repetition_detection.min_count = count


def _set_bool(params: types_pb2.SamplingParams, name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise InvalidArgument(f"{name} must be true or false, not {_kind(value)}", name)
    setattr(params, name, value)


def _refuse(params: types_pb2.SamplingParams, name: str, value: object) -> None:
    """Parameters of a later version."""
    raise InvalidArgument(f"{name} is not supported yet", name)


def _refuse_all_but_empty(params: types_pb2.SamplingParams, name: str, value: object) -> None:
    if value != {}:  # which asks for nothing
        _refuse(params, name, value)


def _set_structured_outputs(params: types_pb2.SamplingParams, name: str, value: object) -> None:
    params.structured_outputs.CopyFrom(narrow_structured_outputs(value, name))


def _kind(value: object) -> str:
    return {bool: "a boolean", str: "a string", list: "a list", dict: "an object"}.get(
        type(value), type(value).__name__
    )


_NARROW: dict[str, Callable[[types_pb2.SamplingParams, str, Any], None]] = {
    "max_tokens": _set_max_tokens,
    "temperature": _set_temperature,
    "top_p": _set_float,
    "top_k": _set_top_k,
    "min_p": _set_float,
    "seed": _set_seed,
    "presence_penalty": _set_float,
    "frequency_penalty": _set_float,
    "repetition_penalty": _set_float,
    "stop_token_ids": _set_token_ids,
    "min_tokens": _set_u32,
    "logprobs": _set_logprobs,
    "prompt_logprobs": _set_logprobs,
    "logprob_token_ids": _set_token_ids,
    "logit_bias": _set_logit_bias,
    "allowed_token_ids": _set_allowed_token_ids,
    "bad_words": _set_bad_words,
    "repetition_detection": _set_repetition_detection,
    "skip_reading_prefix_cache": _set_bool,
    "thinking_token_budget": _refuse,
    "extra_args": _refuse_all_but_empty,
    "structured_outputs": _set_structured_outputs,
}
