"""Launches the Triton kernels that keep rows on the device and make the arrays of a step from them, and the one that
copies KV blocks between pools on a device, for all layers at once."""

import torch
from torch import Tensor

from ..kernels.triton import launch
from ..kernels.triton.kv_cache import copy_blocks
from ..kernels.triton.rows import prepare_step, scatter
from .step_tensors import SentStep, StepSize, StepTensors

_WIDTH = 256
_WORDS = 1024


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


def pool_words(pool: Tensor) -> Tensor:
    """Return a view of a pool [regions, blocks, …], all of one allocation, as [regions, blocks, words] int64."""
    return pool.flatten(2).view(torch.int64)


def copy_pool_blocks(source: Tensor, target: Tensor, source_blocks: Tensor, target_blocks: Tensor) -> None:
    """Copy block ``source_blocks[i]`` of one pool over ``target_blocks[i]`` of another, in all regions.

    Both pools are as :func:`pool_words` returns them; the block ids are [n] int64 on the device. No block may be both
    read and written. Raises ``ValueError`` if blocks or regions of the pools differ.
    """
    if source.shape[2] != target.shape[2]:
        raise ValueError(f"a block has {source.shape[2]} words in one pool and {target.shape[2]} in the other")
    if len(source) != len(target):
        raise ValueError(f"a block has {len(source)} regions in one pool and {len(target)} in the other")
    words = source.shape[2]
    launch(
        copy_blocks,
        (len(source_blocks), len(source), -(-words // _WORDS)),
        source,
        target,
        source_blocks,
        target_blocks,
        words,
        source.stride(1),
        source.stride(0),
        target.stride(1),
        target.stride(0),
        WORDS=_WORDS,
        num_warps=4,
    )
