"""Launches the Triton kernels that change logits, draw from them and find log probabilities, without waiting."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ...kernels.triton.launch import launch, power_of_2
from ...kernels.triton.logits import add_listed, change_rows, count_drawn, logprobs
from ...kernels.triton.sample import sample
from .sampling_arrays import FoundLogprobs

_WIDTH = 4096
"""Logits that a program reads at a time: eight for each thread of the draw. A program holds as many candidates."""
_WARPS = 16
_LISTED = 256
"""Listed tokens that a program reads at a time."""


class TritonSamplerKernels:
    """Fulfils :class:`~.device_sampler.SamplerKernels`."""

    def __init__(self, width: int = _WIDTH) -> None:
        """``width``: logits that a program reads at a time."""
        self._width = width

    def draw(self, logits: Tensor, columns: Sequence[Tensor]) -> Tensor:
        return draw(logits, columns, self._width)

    def change(self, logits: Tensor, edits: Sequence[Tensor], seen: Tensor) -> None:
        rows, starts, token_ids, values, mask_of, masks, slot_of, *penalties, forced = edits
        if len(token_ids):
            launch(
                add_listed,
                (len(rows),),
                logits,
                rows,
                starts,
                token_ids,
                values,
                logits.stride(0),
                WIDTH=_LISTED,
                num_warps=4,
            )
        vocab = logits.shape[1]
        launch(
            change_rows,
            (len(rows), -(-vocab // self._width)),
            logits,
            rows,
            mask_of,
            masks,
            slot_of,
            seen,
            *penalties,
            forced,
            vocab,
            logits.stride(0),
            masks.shape[1],
            seen.shape[1],
            WIDTH=self._width,
            num_warps=8,
            enable_fp_fusion=False,
        )

    def count(self, seen: Tensor, edits: Sequence[Tensor], drawn: Tensor) -> None:
        rows, slot_of = edits[0], edits[6]
        grid = (-(-len(rows) // _LISTED),)
        launch(count_drawn, grid, seen, rows, slot_of, drawn, len(rows), seen.shape[1], WIDTH=_LISTED, num_warps=4)

    def find_logprobs(
        self, logits: Tensor, wanted: Sequence[Tensor], token_ids: Tensor, most_listed: int
    ) -> FoundLogprobs:
        num_tops, also_starts, also_ids = wanted
        count, device = len(logits), logits.device
        # Zeros: places that a row does not use are copied to the host, too.
        found = FoundLogprobs(
            torch.zeros(count, 1 + most_listed, dtype=torch.int32, device=device),
            torch.zeros(count, 1 + most_listed, dtype=torch.float32, device=device),
            torch.empty(count, dtype=torch.int32, device=device),
            torch.empty(count, dtype=torch.float64, device=device),
        )
        launch(
            logprobs,
            (count,),
            logits,
            token_ids,
            num_tops,
            also_starts,
            also_ids,
            torch.empty(count, self._width, dtype=torch.int32, device=device),
            *found,
            logits.shape[1],
            logits.stride(0),
            1 + most_listed,
            WIDTH=self._width,
            LISTED=_LISTED,
            num_warps=_WARPS,
        )
        return found


def draw(logits: Tensor, columns: Sequence[Tensor], width: int = _WIDTH) -> Tensor:
    """Return [rows] int64: a token for each row of float32 logits [rows, vocab]; -1 if no logit of it is finite.

    ``columns``: the arrays of ``SamplingArrays``, on the device.
    """
    num_rows, vocab = logits.shape
    temperatures, top_ps, min_ps, numbers, top_ks, asking = columns
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
        asking,
        torch.empty(num_rows, width, dtype=torch.int32, device=logits.device),
        out,
        vocab,
        logits.stride(0),
        WIDTH=width,
        PARTS=power_of_2(-(-vocab // width)),
        num_warps=_WARPS,
        enable_fp_fusion=False,
    )
    return out
