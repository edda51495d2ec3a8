"""Describes how a model rotates its heads, and reads that from a configuration."""

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from .files.config_reader import MOST, ConfigReader

RopeType = Literal["default", "linear", "dynamic", "llama3", "yarn"]


_LONG_ROPE = ("longrope", "su")
"""Both names of long rope."""


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Divides low frequencies by ``factor``, keeps high ones and blends those between (Llama 3.1)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """Interpolates slow dimensions by ``factor``, fast ones not at all, and those between on a linear ramp (YaRN)."""

    factor: float
    original_max_position: int
    beta_fast: float
    beta_slow: float
    attention_factor: float
    """The factor on cosine and sine."""
    truncate: bool
    """Whether the ends of the ramp are rounded to whole dimensions."""
    score_factor: float = 1.0
    """What DeepSeek's classes multiply attention scores by; others do not read it."""


@dataclass(frozen=True, slots=True)
class DynamicScaling:
    """Raises the base of the frequencies with the length of a sequence, once it passes the original context (dynamic
    NTK)."""

    factor: float
    original_max_position: int
    length: int = 0
    """The tokens of the sequence that all requests of an engine are rotated for, as :class:`LongRopeScaling` says; up
    to the original context nothing is scaled."""


@dataclass(frozen=True, slots=True)
class LongRopeScaling:
    """Divides each frequency by a factor of its own: a short one up to the original context, a long one beyond it
    (LongRoPE)."""

    short_factors: tuple[float, ...]
    """[head_size / 2], as are the long ones."""
    long_factors: tuple[float, ...]
    original_max_position: int
    attention_factor: float
    """The factor on cosine and sine."""
    is_long: bool
    """Whether the long factors are used. One set serves all tokens of an engine: keys that were rotated with the other
    one would be wrong as soon as a request passes the original context."""


@dataclass(frozen=True, slots=True)
class QueryScaling:
    """Rotates nothing, and multiplies the query at position p by 1 + factor * log(1 + floor((p + 1) / period)), so
    that long contexts do not flatten the softmax (Llama 4)."""

    factor: float
    period: float


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Describes how a model rotates its heads."""

    head_size: int
    """How many dimensions of a head rotate, from the first one on: all, or a part of them."""
    theta: float = 10_000.0
    scaling: float | Llama3Scaling | YarnScaling | DynamicScaling | LongRopeScaling | QueryScaling = field(default=1.0)
    """A number divides every frequency (rope type ``linear``; 1 is ``default``; infinity: nothing rotates)."""

    @property
    def rotates(self) -> bool:
        """Return whether heads depend on positions by rotation."""
        return self.scaling != math.inf and not isinstance(self.scaling, QueryScaling)

    @property
    def is_stretched(self) -> bool:
        """Return whether heads are rotated for a context that the engine's options chose, beyond the original one."""
        match self.scaling:
            case LongRopeScaling() as scaling:
                return scaling.is_long
            case DynamicScaling() as scaling:
                return scaling.length > scaling.original_max_position
        return False

    def context(self, max_position: int) -> int:
        """Return how many tokens a sequence may have, in a model that was trained with ``max_position``."""
        match self.scaling:
            case LongRopeScaling() | DynamicScaling() as scaling if not self.is_stretched:
                return scaling.original_max_position
            case DynamicScaling() | YarnScaling() as scaling:
                return max(max_position, _stretched(scaling.original_max_position, scaling.factor))
            case float() as factor if math.isfinite(factor):  # linear
                return max(max_position, _stretched(max_position, factor))
        return max_position

    @property
    def attention_factor(self) -> float:
        return self.scaling.attention_factor if isinstance(self.scaling, YarnScaling | LongRopeScaling) else 1.0

    @property
    def score_factor(self) -> float:
        return self.scaling.score_factor if isinstance(self.scaling, YarnScaling) else 1.0


def _stretched(length: int, factor: float) -> int:
    """Return a context, stretched by a factor that in a damaged file may be any number."""
    return int(min(length * factor, MOST))


def no_rotation(head_size: int) -> RopeConfig:
    """Return the configuration of a layer without positions: frequencies of zero leave its heads as they are."""
    return RopeConfig(head_size, scaling=math.inf)


def read_rope(
    config: ConfigReader,
    head_size: int,
    max_position: int,
    default_theta: float = 10_000.0,
    default_share: float | None = None,
) -> RopeConfig:
    """Read the rope entries of a configuration, in the spelling of transformers 4 or 5. Long rope uses its short
    factors, and dynamic rope scales nothing, until :func:`with_context` chooses. ``default_share``: of a head that
    rotates, if the entries may say so; None: they may not.

    Raises ``ValueError`` naming a rope type or parameter that is not supported.
    """
    scaling, parameters = config.take_object("rope_scaling"), config.take_object("rope_parameters")
    outer_theta = config.take_float("rope_theta", default_theta)
    outer_original = config.take("original_max_position_embeddings")
    rope = scaling or parameters
    if default_share is None and config.take("partial_rotary_factor", 1.0) not in (None, 1.0):
        raise _partial(config)
    if default_share is not None:
        outer = config.take_float("partial_rotary_factor", default_share)
        head_size = int(head_size * (outer if rope is None else rope.take_float("partial_rotary_factor", outer)))
    if rope is None:
        return RopeConfig(head_size, outer_theta)
    if default_share is None and rope.take("partial_rotary_factor", 1.0) not in (None, 1.0):
        raise _partial(rope)
    return _read_parameters(config, rope, RopeConfig(head_size, outer_theta), max_position, outer_original)


def read_rope_by_kind(
    config: ConfigReader, head_size: int, max_position: int, thetas: dict[str, float]
) -> dict[str, RopeConfig]:
    """Read the rope entries of a configuration (Gemma 3) whose layers rotate as their kind does.

    ``thetas`` holds the default of each kind. Raises ``ValueError`` as :func:`read_rope`.
    """
    parameters = config.take("rope_parameters")
    if not isinstance(parameters, dict) or not parameters.keys() <= thetas.keys():
        local = RopeConfig(head_size, config.take_float("rope_local_base_freq", thetas["sliding_attention"]))
        full = read_rope(config, head_size, max_position, thetas["full_attention"])
        return {"full_attention": full, "sliding_attention": local}
    reader, found = ConfigReader(parameters, f"{config.where}: rope_parameters"), {}
    for kind, theta in thetas.items():
        rope, plain = reader.take_object(kind), RopeConfig(head_size, theta)
        if rope is not None and rope.take("partial_rotary_factor", 1.0) not in (None, 1.0):
            raise _partial(rope)
        found[kind] = plain if rope is None else _read_parameters(config, rope, plain, max_position, None)
    return found


def _read_parameters(
    config: ConfigReader, rope: ConfigReader, plain: RopeConfig, max_position: int, outer_original: Any
) -> RopeConfig:
    """Read one object of rope entries; ``plain`` holds the head size and the default frequency."""
    old_name = rope.take("type", "default")
    rope_type = rope.take("rope_type", old_name)
    if rope_type not in (*get_args(RopeType), *_LONG_ROPE):
        raise rope.unsupported(
            "rope_type" if rope.take("rope_type") else "type", f"must be one of {(*get_args(RopeType), *_LONG_ROPE)}"
        )
    theta = rope.take_float("rope_theta", plain.theta)
    original = rope.take_int("original_max_position_embeddings", max_position)
    if outer_original is not None:  # the entry outside the rope object overrides the one inside
        original = config.take_int("original_max_position_embeddings")
    if rope_type in _LONG_ROPE:
        result = RopeConfig(plain.head_size, theta, _read_long_rope(rope, plain.head_size, original, max_position))
    elif rope_type == "dynamic":
        # Its context is max_position_embeddings: transformers reads no original one for it.
        result = RopeConfig(plain.head_size, theta, DynamicScaling(rope.take_float("factor"), max_position))
    else:
        result = RopeConfig(plain.head_size, theta, _read_scaling(rope, rope_type, original))
    rope.refuse_rest()
    return result


def _partial(config: ConfigReader) -> ValueError:
    text = "must be 1: partly rotated heads are not supported"
    return config.unsupported("partial_rotary_factor", text, is_known=False)


def _read_long_rope(rope: ConfigReader, head_size: int, original: int, max_position: int) -> LongRopeScaling:
    if original == 1:
        raise ValueError(f"{rope.where}: original_max_position_embeddings must be above 1, for its logarithm divides")
    factor = rope.take_float("factor", max_position / original)
    stretched = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    short, long = (_read_factors(rope, name, head_size // 2) for name in ("short_factor", "long_factor"))
    return LongRopeScaling(short, long, original, rope.take_float("attention_factor", stretched), is_long=False)


def _read_factors(rope: ConfigReader, name: str, count: int) -> tuple[float, ...]:
    values = rope.take(name)
    is_list = isinstance(values, list) and len(values) == count
    if not is_list or not all(type(value) in (int, float) and value > 0 for value in values):
        raise rope.error(name, f"must be a list of head_dim / 2 = {count} positive numbers")
    return tuple(map(float, values))


def with_context(rope: RopeConfig, max_model_len: int) -> RopeConfig:
    """Return the rotation of an engine whose requests have at most ``max_model_len`` tokens."""
    # transformers chooses by the longest sequence of a batch and computes a sequence anew when it passes the original
    # context; in a paged cache, keys of several kinds would meet. So one choice serves all requests: that of a sequence
    # of the longest length. vLLM chooses as here; dynamic rope it always stretches by the whole factor, also where
    # requests are shorter. The engine's numerics name the choice.
    match rope.scaling:
        case LongRopeScaling() as scaling:
            return replace(rope, scaling=replace(scaling, is_long=max_model_len > scaling.original_max_position))
        case DynamicScaling() as scaling:
            longest = _stretched(scaling.original_max_position, scaling.factor)
            return replace(rope, scaling=replace(scaling, length=min(max_model_len, longest)))
    return rope


def _read_scaling(rope: ConfigReader, rope_type: str, original: int) -> float | Llama3Scaling | YarnScaling:
    match rope_type:
        case "linear":
            return rope.take_float("factor")
        case "llama3":
            return Llama3Scaling(
                factor=rope.take_float("factor"),
                low_freq_factor=rope.take_float("low_freq_factor"),
                high_freq_factor=rope.take_float("high_freq_factor"),
                original_max_position=original,
            )
        case "yarn":
            factor = rope.take_float("factor")
            return YarnScaling(
                factor=factor,
                original_max_position=original,
                beta_fast=rope.take_float("beta_fast", 32.0),
                beta_slow=rope.take_float("beta_slow", 1.0),
                attention_factor=_yarn_attention_factor(rope, factor),
                truncate=rope.take_bool("truncate", True),
                score_factor=_yarn_magnitude(factor, _take_scale(rope, "mscale_all_dim")) ** 2,
            )
    return 1.0


def _yarn_attention_factor(rope: ConfigReader, factor: float) -> float:
    mscale, mscale_all = _take_scale(rope, "mscale"), _take_scale(rope, "mscale_all_dim")
    if rope.take("attention_factor") is not None:
        return rope.take_float("attention_factor")
    if mscale and mscale_all:
        return _yarn_magnitude(factor, mscale) / _yarn_magnitude(factor, mscale_all)
    return _yarn_magnitude(factor, 1.0)


_MOST_SCALE = 1e6
"""Of YaRN's magnitudes, whose squares must be finite; published ones are about 1."""


def _take_scale(rope: ConfigReader, name: str) -> float:
    """Return a number that may be absent, null or 0, which all mean that nothing is scaled."""
    value = 0.0 if rope.take(name) in (None, 0) else rope.take_float(name)
    if value > _MOST_SCALE:
        raise rope.error(name, f"must be at most {_MOST_SCALE:g}")
    return value


def _yarn_magnitude(factor: float, scale: float) -> float:
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0


LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "seq_length", "n_ctx")
ROPES = ("rope_parameters", "rope_scaling")
CONTEXT_ENTRIES = (*LENGTHS, *ROPES, "original_max_position_embeddings", "model_type")
"""The entries by which :func:`longest_context` decides."""
GROWING = ("dynamic", "longrope", "su")
"""Kinds of rotary embedding whose frequencies depend on the longest sequence of a batch."""


def longest_context(entries: Mapping[str, Any], default: int, wanted: int | None) -> int:
    """Return how many tokens prompt and output may have together in a model that transformers' modules compute.

    Where the frequencies of rotary positions change beyond a length, that length is the limit unless more is wanted:
    requests of one batch would otherwise change each other's tokens.

    Args:
        entries: Those of the text model in ``config.json``.
        default: The length if they state none.
        wanted: What the engine's options allow; None: they state nothing.
    """
    lengths = [entries.get(name) for name in LENGTHS]
    trained = length = next((_count(each) for each in lengths if type(each) is int and each > 0), default)
    ropes = entries.get("rope_parameters") or entries.get("rope_scaling")
    ropes = ropes if isinstance(ropes, dict) else {}
    for rope in (ropes, *(each for each in ropes.values() if isinstance(each, dict))):
        kind, factor = rope.get("rope_type", rope.get("type")), _number(rope.get("factor")) or 1.0
        outer = _count(entries.get(_ORIGINAL)) or trained
        original = _count(rope.get(_ORIGINAL)) or outer
        if kind in GROWING and (wanted or 0) <= original:
            length = min(length, original)
        elif kind in ("dynamic", "linear") and "gemma3" not in str(entries.get("model_type")):
            length = max(length, _stretched(trained, factor))  # Gemma 3 states the stretched context
        elif kind == "yarn":
            length = max(length, _stretched(original, factor))
    return length


def check_context(wanted: int | None, length: int) -> None:
    """Raise ``ValueError`` unless a model whose context has ``length`` tokens can serve ``wanted``, an engine's option;
    None: it is not given."""
    if wanted is not None and not 2 <= wanted <= length:
        raise ValueError(
            f"max_model_len {wanted}: the model's context has {length} tokens: give at most that and at least 2 (one "
            "token of prompt, one of output), or leave out the option"
        )


_ORIGINAL = "original_max_position_embeddings"


def _number(value: object) -> float:
    """Return a finite positive number; 0 for anything else, which transformers' class refuses or does without."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= sys.float_info.max:
        return 0.0
    return float(value)


def _count(value: object) -> int:
    """Return a whole positive number, at most `MOST`; 0 for anything else."""
    return int(min(_number(value), MOST))
