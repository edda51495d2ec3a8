"""Draws the tokens of a step on the device, so that only their ids come to the host."""

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tokenloom.engine_core.wire.core_sampling_params import SamplingParams

from .device_link import DeviceLink, link_of
from .draw_arrays import DrawArrays
from .packed_copy import copy_packed
from .pending_tokens import PendingTokens

Draw = Callable[[Tensor, Sequence[Tensor]], Tensor]
"""Draws from logits [rows, vocab] with the columns of :class:`DrawArrays`; see ``draw_kernel.draw``."""


class DeviceSampler:
    """Draws one token for each row, on the device of the logits, by the rule and with the numbers of the host's."""

    def __init__(self, draw: Draw, link: DeviceLink | None = None) -> None:
        """``link`` brings the tokens to the host; None: as the device of the logits does."""
        self._draw = draw
        self._link = link

    @torch.inference_mode()
    def draw(self, logits: Tensor, columns: Sequence[Tensor]) -> Tensor:
        """Let the device draw for float32 logits [rows, vocab] with columns that it has. Returns [rows] int64, on the
        device; -1 stands for no token."""
        return self._draw(logits, columns)

    def fetch(self, token_ids: Tensor) -> PendingTokens:
        """Begin to bring drawn tokens [rows] to the host."""
        return PendingTokens.fetch(token_ids, self._link or link_of(token_ids.device))

    @torch.inference_mode()
    def start(
        self, logits: Tensor, params: Sequence[SamplingParams], output_indices: npt.NDArray[np.int64]
    ) -> PendingTokens:
        """Let the device draw for float32 logits [rows, vocab]. It does not wait: there is one copy to the device, and
        one back. ``output_indices`` [rows] are the output indices of the tokens to draw."""
        columns = copy_packed(DrawArrays.of(params, output_indices).in_order(), logits.device)
        return self.fetch(self.draw(logits, columns))

    def sample(
        self, logits: Tensor, params: Sequence[SamplingParams], output_indices: npt.NDArray[np.int64]
    ) -> list[int]:
        """Do what :meth:`start` does and wait for the token ids. A greedy row takes the largest logit, among equals the
        lowest id; ``NO_TOKEN`` if no logit is finite."""
        return self.start(logits, params, output_indices).wait()
