"""The copy of KV blocks, within a pool and from one pool into another."""

import pytest
import torch

from tokenloom.gpu_worker.cuda.block_copy import copy_pool_blocks, pool_words


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_only_the_wanted_blocks_change(dtype):
    generator = torch.Generator().manual_seed(1)
    source, target = (torch.randn(6, blocks, 2, 16, 8, generator=generator).to(dtype) for blocks in (9, 5))
    expected = target.clone()
    expected[:, [3, 0, 1]] = source[:, [8, 2, 7]]
    copy_pool_blocks(pool_words(source), pool_words(target), torch.tensor([8, 2, 7]), torch.tensor([3, 0, 1]))
    assert torch.equal(target, expected)


def test_within_a_pool():
    pool = torch.arange(2 * 4 * 2048).view(2, 4, 2048).float()
    expected = pool.clone()
    expected[:, 3] = pool[:, 0]
    copy_pool_blocks(pool_words(pool), pool_words(pool), torch.tensor([0]), torch.tensor([3]))
    assert torch.equal(pool, expected)


def test_blocks_of_different_sizes_are_refused():
    with pytest.raises(ValueError, match="a block has 16 words in one pool and 8 in the other"):
        copy_pool_blocks(
            torch.zeros(2, 3, 16, dtype=torch.int64),
            torch.zeros(2, 3, 8, dtype=torch.int64),
            torch.tensor([0]),
            torch.tensor([1]),
        )
