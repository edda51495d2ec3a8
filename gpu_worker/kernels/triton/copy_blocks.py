"""Copies KV blocks: within a pool, from a pool into a packed buffer, or from such a buffer into a pool."""

import triton
import triton.language as tl


@triton.jit
def copy_blocks(
    source,
    target,
    source_blocks,
    target_blocks,
    words,
    source_block_stride,
    source_region_stride,
    target_block_stride,
    target_region_stride,
    WORDS: tl.constexpr,
):
    """Copy WORDS words of one region of one block.

    Grid: (blocks, regions, words / WORDS, rounded up). Strides and sizes count int64 words. A region is what a block
    has in one place: the keys of a layer, or its values.

    Args:
        source, target: The memory as int64 words.
        source_blocks, target_blocks: [blocks] int64: where each block is on either side.
        words: How many words a region of a block has.
    """
    index, region = tl.program_id(0), tl.program_id(1).to(tl.int64)
    columns = tl.program_id(2) * WORDS + tl.arange(0, WORDS)
    is_word = columns < words
    source_block, target_block = tl.load(source_blocks + index), tl.load(target_blocks + index)
    at_source = source_block * source_block_stride + region * source_region_stride + columns
    at_target = target_block * target_block_stride + region * target_region_stride + columns
    tl.store(target + at_target, tl.load(source + at_source, mask=is_word), mask=is_word)
