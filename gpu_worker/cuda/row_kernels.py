"""Launches the Triton kernels that keep rows on the device and make the arrays of a step from them."""

from torch import Tensor

from ..kernels.triton.launch import launch
from ..kernels.triton.step_rows import prepare_step, scatter
from .step_tensors import SentStep, StepSize, StepTensors

_WIDTH = 256


class TritonRowKernels:
    """Fulfils :class:`~.step_tensors.RowKernels`."""

    def scatter(self, target: Tensor, places: Tensor, values: Tensor) -> None:
        count = len(places)
        launch(scatter, (-(-count // _WIDTH),), target, places, values, count, WIDTH=_WIDTH, num_warps=4)

    def prepare(
        self,
        sent: SentStep,
        tables: Tensor,
        last_tokens: Tensor,
        shifts: Tensor,
        made: StepTensors,
        padded: StepSize,
        block_size: int,
    ) -> None:
        size = sent.size
        launch(
            prepare_step,
            (padded.requests + 1,),
            sent.rows,
            sent.starts,
            sent.lengths,
            sent.token_ids,
            sent.work,
            last_tokens,
            shifts,
            tables,
            made.token_ids,
            made.positions,
            made.slots,
            made.tables,
            made.query_starts,
            made.seq_lens,
            made.work,
            size.requests,
            size.tokens,
            size.entries,
            padded.tokens,
            padded.entries,
            tables.stride(0),
            made.slots.stride(0),
            made.tables.stride(0),
            made.tables.stride(1),
            GROUPS=len(made.slots),
            BLOCK=block_size,
            WIDTH=_WIDTH,
            num_warps=4,
        )
