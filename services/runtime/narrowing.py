"""Plain values, as JSON or Python gives them, into ``SamplingParams``: once, for the gateway and the offline API.

None is "unset". A wrong type, a bool where a number is meant, a number that the wire cannot carry: ``InvalidArgument``
naming the field. What the numbers may be is :mod:`.validation`'s business.
"""

import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tokenloom.v1 import types_pb2

from .errors import InvalidArgument
from .structured_outputs import narrow_structured_outputs

(MIN_TEMPERATURE,) = struct.unpack("<f", struct.pack("<f", 1e-5))
"""Below it, dividing logits by the temperature overflows float32; 0 is greedy. As the wire's float32 holds it."""
_U32 = 2**32 - 1


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
    for item in value:
        if type(item) is not int or not 0 <= item <= _U32:
            raise InvalidArgument(f"{name} must hold token ids, integers from 0 to {_U32}", name)
    return list(value)


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


def _set_stop_token_ids(params: types_pb2.SamplingParams, name: str, value: object) -> None:
    params.stop_token_ids.extend(narrow_token_ids(name, value))


def _refuse(params: types_pb2.SamplingParams, name: str, value: object) -> None:
    """Parameters of a later version: only what asks for nothing is understood."""
    if any(value == nothing and type(value) is type(nothing) for nothing in _ASKS_NOTHING[name]):
        return
    raise InvalidArgument(f"{name} is not supported yet", name)


def _set_structured_outputs(params: types_pb2.SamplingParams, name: str, value: object) -> None:
    params.structured_outputs.CopyFrom(narrow_structured_outputs(value, name))


def _kind(value: object) -> str:
    return {bool: "a boolean", str: "a string", list: "a list", dict: "an object"}.get(
        type(value), type(value).__name__
    )


_ASKS_NOTHING: dict[str, tuple[object, ...]] = {
    "min_tokens": (0,),
    "logprobs": (False,),  # 0 is one: of the sampled token
    "prompt_logprobs": (False,),
    "logit_bias": ({},),
    "allowed_token_ids": ([], ()),
    "bad_words": ([], ()),
}

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
    "stop_token_ids": _set_stop_token_ids,
    "min_tokens": _refuse,
    "logprobs": _refuse,
    "prompt_logprobs": _refuse,
    "logit_bias": _refuse,
    "allowed_token_ids": _refuse,
    "bad_words": _refuse,
    "structured_outputs": _set_structured_outputs,
}
