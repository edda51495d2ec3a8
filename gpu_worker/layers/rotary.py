"""Computes rotary position embeddings: the frequencies of each rope type, and the rotation of query and key heads."""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..checkpoint.rope_config import (
    DynamicScaling,
    Llama3Scaling,
    LongRopeScaling,
    QueryScaling,
    RopeConfig,
    YarnScaling,
)


def inverse_frequencies(config: RopeConfig) -> Tensor:
    """Return the angle per position of each pair of dimensions: [head_size / 2], float32, on the CPU."""
    exponents = torch.arange(0, config.head_size, 2, dtype=torch.float32) / config.head_size
    frequencies = 1.0 / config.theta**exponents
    match config.scaling:
        case Llama3Scaling() as scaling:
            return _llama3(frequencies, scaling)
        case YarnScaling() as scaling:
            return _yarn(config, scaling)
        case DynamicScaling() as scaling:
            return 1.0 / _dynamic_base(config, scaling) ** exponents
        case LongRopeScaling() as scaling:
            factors = torch.tensor(scaling.long_factors if scaling.is_long else scaling.short_factors)
            return 1.0 / (factors * config.theta**exponents)
        case QueryScaling():
            return torch.zeros_like(frequencies)
        case factor:
            return frequencies / factor


def _dynamic_base(config: RopeConfig, scaling: DynamicScaling) -> float:
    """Return the base for a sequence of ``scaling.length`` tokens: up to the original context it is ``theta``."""
    length = max(scaling.length, scaling.original_max_position)
    growth = scaling.factor * length / scaling.original_max_position - (scaling.factor - 1)
    return float(config.theta * growth ** (config.head_size / (config.head_size - 2)))


def _llama3(frequencies: Tensor, scaling: Llama3Scaling) -> Tensor:
    wavelengths = 2 * math.pi / frequencies
    longest_kept = scaling.original_max_position / scaling.high_freq_factor
    shortest_scaled = scaling.original_max_position / scaling.low_freq_factor
    blend = scaling.original_max_position / wavelengths - scaling.low_freq_factor
    blend = blend / (scaling.high_freq_factor - scaling.low_freq_factor)
    blended = (1 - blend) * frequencies / scaling.factor + blend * frequencies
    scaled = torch.where(wavelengths > shortest_scaled, frequencies / scaling.factor, blended)
    return torch.where(wavelengths < longest_kept, frequencies, scaled)


def _yarn(config: RopeConfig, scaling: YarnScaling) -> Tensor:
    dims = config.head_size
    powers = config.theta ** (torch.arange(0, dims, 2, dtype=torch.float32) / dims)

    def dimension_of(rotations: float) -> float:
        """Return the dimension that rotates this many times within the original context."""
        turns = scaling.original_max_position / (rotations * 2 * math.pi)
        return dims * math.log(turns) / (2 * math.log(config.theta))

    low, high = dimension_of(scaling.beta_fast), dimension_of(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dims - 1)
    if low == high:
        high += 0.001  # a ramp of no width would divide by zero
    keep = 1 - ((torch.arange(dims // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return 1.0 / (scaling.factor * powers) * (1 - keep) + 1.0 / powers * keep


ComputeRotation = Callable[[Tensor, Tensor, float], tuple[Tensor, Tensor]]
"""Computes cosines and sines; see :meth:`~..ops.ops.Ops.rotation`."""


class RotaryEmbedding:
    """Computes the cosines and sines of a step once, for all its layers."""

    def __init__(
        self,
        config: RopeConfig,
        device: torch.device,
        compute: ComputeRotation,
        log1p: Callable[[Tensor], Tensor] = torch.log1p,
        axes: Sequence[int] = (),
    ) -> None:
        """``compute``: that of the model's operations; ``log1p``: as they compute that. ``axes`` [head_size / 2]: which
        of a token's three positions turns each pair of dimensions; empty: the first turns all."""
        self._frequencies = inverse_frequencies(config).to(device)
        self._attention_factor = config.attention_factor
        self._compute, self._log1p = compute, log1p
        self._query = config.scaling if isinstance(config.scaling, QueryScaling) else None
        self._columns = [
            torch.tensor([column for column, each in enumerate(axes) if each == axis], device=device) for axis in (1, 2)
        ]
        """Of the pairs that the second position turns, and of those that the third one does."""

    def __call__(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Turn positions [T], or [3, T] by frame, line and column, into (cos, sin), each [T, 1, head_size / 2] float32.
        Where queries are scaled and nothing rotates, the first has the factors."""
        if positions.ndim > 1:
            return self._turn(positions)
        if self._query is not None:
            periods = torch.floor((positions.float() + 1.0) / self._query.period)
            grown = self._log1p(periods) * self._query.factor + 1.0
            factors = grown[:, None, None].expand(-1, 1, len(self._frequencies))
            return factors, torch.zeros_like(factors)
        return self._compute(positions, self._frequencies, self._attention_factor)

    def _turn(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        # Each axis by the same operation, so that a token of text has the bits that it has in a step without images.
        cos, sin = self(positions[0])
        for axis, columns in enumerate(self._columns, 1):
            if len(columns):
                found = self(positions[axis])
                cos[..., columns], sin[..., columns] = found[0][..., columns], found[1][..., columns]
        return cos, sin


def rotation(positions: Tensor, frequencies: Tensor, factor: float) -> tuple[Tensor, Tensor]:
    """Turn [T] positions into (cos, sin), each [T, 1, head_size / 2] float32, with PyTorch."""
    angles = (positions[:, None].float() * frequencies)[:, None]
    if factor == 1.0:
        return angles.cos(), angles.sin()
    return angles.cos() * factor, angles.sin() * factor


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate [T, heads, head_size], in its dtype.

    Dimension i pairs with i + head_size / 2 (the Hugging Face convention). With fewer than head_size / 2 angles only
    the first dimensions are rotated, as a head of their own.
    """
    cos, sin, rotated = cos.to(heads.dtype), sin.to(heads.dtype), 2 * cos.shape[-1]
    if rotated < heads.shape[-1]:
        return torch.cat((rotate(heads[..., :rotated], cos, sin), heads[..., rotated:]), dim=-1)
    first, second = heads.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def halves(heads: Tensor) -> Tensor:
    """Return [..., head_size] with the even dimensions in the first half and the odd ones in the second, so that
    :func:`rotate` turns dimensions 2i and 2i + 1 of ``heads`` together."""
    return torch.cat((heads[..., 0::2], heads[..., 1::2]), dim=-1)
