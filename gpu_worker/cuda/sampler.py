"""Draws the tokens of a step on the device, so that only their ids come to the host."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tokenloom.engine_core.wire.core_sampling_params import SamplingParams

from .draw_arrays import DrawArrays
from .packed_copy import copy_packed

Draw = Callable[[Tensor, Sequence[Tensor]], Tensor]
"""Draws from logits [rows, vocab] with the columns of :class:`DrawArrays`; see ``draw_kernel.draw``."""


class DeviceSampler:
    """Draws one token for each row, on the device of the logits, by the rule and with the numbers of the host's."""

    def __init__(self, draw: Draw) -> None:
        self._draw = draw

    @torch.inference_mode()
    def start(
        self, logits: Tensor, params: Sequence[SamplingParams], output_indices: npt.NDArray[np.int64]
    ) -> "PendingTokens":
        """Let the device draw for float32 logits [rows, vocab]. It does not wait: there is one copy to the device, and
        one back. ``output_indices`` [rows] are the output indices of the tokens to draw."""
        columns = copy_packed(DrawArrays.of(params, output_indices).in_order(), logits.device)
        return PendingTokens.copy(self._draw(logits, columns))

    def sample(
        self, logits: Tensor, params: Sequence[SamplingParams], output_indices: npt.NDArray[np.int64]
    ) -> list[int]:
        """Do what :meth:`start` does and wait for the token ids. A greedy row takes the largest logit, among equals the
        lowest id; ``NO_TOKEN`` if no logit is finite."""
        return self.start(logits, params, output_indices).wait()


@dataclass(frozen=True, slots=True)
class PendingTokens:
    """Holds token ids that are on their way to the host."""

    on_host: Tensor
    """[rows] int64, pinned, and without content until the event."""
    event: torch.cuda.Event | None
    """None: the ids are there."""

    @classmethod
    def copy(cls, token_ids: Tensor) -> "PendingTokens":
        """Begin to copy ``token_ids`` [rows]."""
        if token_ids.device.type != "cuda":
            return cls(token_ids, None)
        on_host = torch.empty(token_ids.shape, dtype=token_ids.dtype, pin_memory=True)
        on_host.copy_(token_ids, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        return cls(on_host, event)

    def wait(self) -> list[int]:
        """Return the token ids, once they are there. Nothing else of the device is waited for."""
        if self.event is not None:
            self.event.synchronize()
        token_ids: list[int] = self.on_host.tolist()
        return token_ids
