"""Draws one token for each row of logits with the Triton kernel, without waiting for the device."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tokenloom.engine_core.wire.core_sampling_params import SamplingParams

from ..kernels.triton.launch import launch, power_of_2
from ..kernels.triton.sample import sample
from ..sampler.philox import Purpose, uniform

_WIDTH = 4096
"""Logits that a program reads at a time: eight for each of its threads."""
_WARPS = 16


@dataclass(frozen=True, slots=True)
class DrawArrays:
    """Holds what the rows of a step ask for, one number a row each; see ``kernels.triton.sample``."""

    temperatures: npt.NDArray[np.float64]
    top_ps: npt.NDArray[np.float64]
    min_ps: npt.NDArray[np.float64]
    numbers: npt.NDArray[np.float64]
    top_ks: npt.NDArray[np.int32]

    @classmethod
    def of(cls, params: Sequence[SamplingParams], output_indices: npt.NDArray[np.int64]) -> "DrawArrays":
        """Read the parameters of rows, and compute the uniform numbers of their next draws as the host's rule does."""
        seeds = np.array([each.seed for each in params], dtype=np.uint64)
        return cls(
            temperatures=np.array([each.temperature for each in params], dtype=np.float64),
            top_ps=np.array([each.top_p for each in params], dtype=np.float64),
            min_ps=np.array([each.min_p for each in params], dtype=np.float64),
            numbers=uniform(seeds, output_indices.astype(np.uint64), Purpose.SAMPLE),
            top_ks=np.array([max(0, each.top_k) for each in params], dtype=np.int32),
        )

    def in_order(self) -> tuple[npt.NDArray[np.float64] | npt.NDArray[np.int32], ...]:
        """Return the arrays in the order of :func:`draw`'s ``columns``."""
        return self.temperatures, self.top_ps, self.min_ps, self.numbers, self.top_ks


def draw(logits: Tensor, columns: Sequence[Tensor], width: int = _WIDTH) -> Tensor:
    """Return [rows] int64: a token for each row of float32 logits [rows, vocab]; -1 if no logit of it is finite.

    ``columns``: the arrays of :meth:`DrawArrays.in_order`, on the device.
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
