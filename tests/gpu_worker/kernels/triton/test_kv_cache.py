"""The copy of KV blocks, within a pool and from one pool into another."""

import pytest
import torch

from tests.gpu_worker.kv_connector.fake_device import LAYOUT, fake_pool
from tokenloom.gpu_worker.cuda.row_kernels import copy_pool_blocks, pool_words
from tokenloom.gpu_worker.kv_connector.device_transport import DeviceTransport
from tokenloom.gpu_worker.kv_connector.shared_memory import SharedMemoryTransport


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


@pytest.mark.parametrize("make", [DeviceTransport, SharedMemoryTransport])
def test_transports_move_blocks_of_all_layers_with_the_kernel(make):
    owner, pool = fake_pool(9, seed=1, copy=copy_pool_blocks), fake_pool(7, seed=2, copy=copy_pool_blocks)
    serving, reading = make(), make()
    reader = reading.open(serving.serve(owner), LAYOUT)
    reader.read([8, 0, 3], [1, 6, 2], pool)
    assert pool.checksums([1, 6, 2]) == owner.checksums([8, 0, 3])
    assert pool.checksums([0, 3, 4, 5]) == fake_pool(7, seed=2).checksums([0, 3, 4, 5])
    reading.close()
    serving.close()


def test_one_launch_moves_all_blocks_and_layers():
    launched = []

    def copy(*arguments):
        launched.append(arguments[0].shape)
        copy_pool_blocks(*arguments)

    owner, pool = fake_pool(9, seed=1), fake_pool(9, seed=2, copy=copy)
    launched.clear()  # of the copy that compiles the kernel
    serving, reading = DeviceTransport(), DeviceTransport()
    reading.open(serving.serve(owner), LAYOUT).read(range(9), range(9), pool)
    assert launched == [(6, 9, 32)]
    reading.close()
    serving.close()
