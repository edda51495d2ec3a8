"""Launches the Triton kernels that change logits, draw from them and find log probabilities, without waiting."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ...kernels.triton import launch, power_of_2
from ...kernels.triton.logits import add_listed, change_rows, count_drawn, logprobs
from ...kernels.triton.sample import sample
from ...kernels.triton.sample_parts import draw_listed, list_parts, scan_parts
from .sampling_arrays import FoundLogprobs

_WIDTH = 4096
"""Logits that a program reads at a time: eight for each thread of the draw. A program holds as many candidates."""
_WARPS = 16
_JOINING_WARPS = 8
"""Of the program that joins the parts of a row: with more its registers would not suffice, and it reads little."""
_GROUPS = 64
"""Into which a draw by parts divides each part: their largest logits bound the candidates."""
_MULTIPROCESSORS = 132
"""Of an H100."""
_LISTED = 256
"""Listed tokens that a program reads at a time."""


class TritonSamplerKernels:
    """Fulfils :class:`~.device_sampler.SamplerKernels`."""

    def __init__(self, width: int = _WIDTH, multiprocessors: int = _MULTIPROCESSORS) -> None:
        """``width``: logits that a program reads at a time. ``multiprocessors``: of the device."""
        self._width = width
        self._multiprocessors = multiprocessors
        self._has_drawn = False

    def draw(self, logits: Tensor, columns: Sequence[Tensor]) -> Tensor:
        num_rows, vocab = logits.shape
        divides = divides_rows(num_rows, vocab, self._width, self._multiprocessors)
        if not self._has_drawn:
            # The other way, too: a later step may have more rows or fewer, and would wait for the compiler.
            self._has_drawn = True
            if vocab > self._width:
                draw(logits, columns, self._width, divides=not divides)
        return draw(logits, columns, self._width, divides=divides)

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


def divides_rows(num_rows: int, vocab: int, width: int, multiprocessors: int) -> bool:
    """Return whether each part of a row gets a program of its own: where one for each row would leave half of the
    multiprocessors idle."""
    return vocab > width and 2 * num_rows <= multiprocessors


def draw(logits: Tensor, columns: Sequence[Tensor], width: int = _WIDTH, *, divides: bool = False) -> Tensor:
    """Return [rows] int64: a token for each row of float32 logits [rows, vocab]; -1 if no logit of it is finite.

    ``columns``: the arrays of ``SamplingArrays``, on the device. ``divides``: whether each part of a row has a program
    of its own, and not each row: the tokens are the same.
    """
    num_rows, vocab = logits.shape
    if divides:
        return _draw_by_parts(logits, columns, width)
    out = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    launch(
        sample,
        (num_rows,),
        logits,
        *columns,
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


def _draw_by_parts(logits: Tensor, columns: Sequence[Tensor], width: int) -> Tensor:
    """Do what :func:`draw` does with a program for each ``width`` logits of a row: two kernels, and one that joins."""
    (num_rows, vocab), device = logits.shape, logits.device
    parts, groups, room = -(-vocab // width), min(_GROUPS, width // 2), width // 4
    out = torch.empty(num_rows, dtype=torch.int64, device=device)
    masses = torch.empty(num_rows, parts, dtype=torch.int64, device=device)
    stride = parts * (groups + 4) + max(parts * room, width)
    memory = torch.empty(num_rows, stride, dtype=torch.int32, device=device)
    grid, sizes = (num_rows, parts), (vocab, logits.stride(0), stride)
    launch(scan_parts, grid, logits, memory, *sizes, WIDTH=width, GROUPS=groups, num_warps=_WARPS)
    launch(
        list_parts,
        grid,
        logits,
        *columns[:3],
        *columns[4:],  # all but the numbers
        memory,
        masses,
        *sizes,
        WIDTH=width,
        GROUPS=groups,
        ROOM=room,
        LANES=power_of_2(parts * groups),
        num_warps=_WARPS,
        enable_fp_fusion=False,
    )
    launch(
        draw_listed,
        (num_rows,),
        logits,
        *columns,
        memory,
        masses,
        out,
        *sizes,
        WIDTH=width,
        PARTS=power_of_2(parts),
        GROUPS=groups,
        ROOM=room,
        num_warps=_JOINING_WARPS,
        enable_fp_fusion=False,
    )
    return out
