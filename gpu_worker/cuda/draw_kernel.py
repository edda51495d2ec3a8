"""Draws one token for each row of logits with the Triton kernel, without waiting for the device."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..kernels.triton.launch import launch, power_of_2
from ..kernels.triton.sample import sample

_WIDTH = 4096
"""Logits that a program reads at a time: eight for each of its threads."""
_WARPS = 16


def draw(logits: Tensor, columns: Sequence[Tensor], width: int = _WIDTH) -> Tensor:
    """Return [rows] int64: a token for each row of float32 logits [rows, vocab]; -1 if no logit of it is finite.

    ``columns``: the arrays of ``DrawArrays.in_order``, on the device.
    """
    num_rows, vocab = logits.shape
    temperatures, top_ps, min_ps, numbers, top_ks = columns
    out = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    launch(
        sample,
        (num_rows,),
        logits,
        temperatures,
        top_ks,
        top_ps,
        min_ps,
        numbers,
        out,
        vocab,
        logits.stride(0),
        WIDTH=width,
        PARTS=power_of_2(-(-vocab // width)),
        num_warps=_WARPS,
    )
    return out
