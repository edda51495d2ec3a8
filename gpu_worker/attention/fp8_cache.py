"""Keeps keys and values as floats of 8 bits (e4m3): half the memory of bfloat16, without scales.

As in vLLM, where a checkpoint brings no scales: what is larger than the format's largest number becomes that number.
Keys and values are far below it; each is rounded by at most 1 / 16 of itself.
"""

import torch
from torch import Tensor

from ..checkpoint.model_config import FP8_KV

_LARGEST = torch.finfo(FP8_KV).max


def to_fp8(heads: Tensor) -> Tensor:
    """Return the elements as 8-bit floats, rounded to nearest. The format has no infinity: NaN takes its place, as
    that of NaN."""
    exact = heads.float()
    return torch.where(exact.isfinite(), exact.clamp(-_LARGEST, _LARGEST), torch.nan).to(FP8_KV)


def as_bytes(cache: Tensor) -> Tensor:
    """Return a view of the bytes of 8-bit floats: PyTorch indexes those on every device."""
    return cache.view(torch.uint8)
