"""What the rows of a step ask of the draw of their next tokens, in columns."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tokenloom.engine_core.data.core_sampling_params import SamplingParams

from ..host.philox import Purpose, uniform


@dataclass(frozen=True, slots=True)
class SamplingArrays:
    """Holds what the rows of a step ask for, one number a row each; see ``kernels.triton.sample``."""

    temperatures: npt.NDArray[np.float64]
    top_ps: npt.NDArray[np.float64]
    min_ps: npt.NDArray[np.float64]
    numbers: npt.NDArray[np.float64]
    top_ks: npt.NDArray[np.int32]

    @classmethod
    def of(cls, params: Sequence[SamplingParams], output_indices: npt.NDArray[np.int64]) -> "SamplingArrays":
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
        """Return the arrays in the order of ``sampler_kernels.draw``'s columns."""
        return self.temperatures, self.top_ps, self.min_ps, self.numbers, self.top_ks


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """Holds on the device what the rows that draw in a step ask for; see ``kernels.triton.sample``."""

    columns: tuple[Tensor, ...]
    """[S] each, in the order of ``SamplingArrays.in_order``."""
    rows: Tensor
    """[S] int64."""
    last_tokens: Tensor
    """[all rows] int64"""

    @torch.inference_mode()
    def keep(self, token_ids: Tensor) -> None:
        """Make ``token_ids`` [S], of which -1 stands for none, the tokens that the rows drew last."""
        self.last_tokens.index_copy_(0, self.rows, token_ids.clamp(min=0))
