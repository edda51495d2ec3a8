import fcntl
import mmap
import os

import numpy as np
import pytest

from tokenloom.engine_core.kv_cache.pool_memory import PoolMemory
from tokenloom.process.control_groups import resident_bytes


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("nbytes", [0, 1, mmap.PAGESIZE, mmap.PAGESIZE + 1])
def test_is_zeroed_writable_and_of_whole_pages(nbytes: int, shared: bool) -> None:
    memory = PoolMemory.allocate(nbytes, shared)
    assert memory.nbytes == max(1, -(-nbytes // mmap.PAGESIZE)) * mmap.PAGESIZE == len(memory.buffer)
    assert not np.frombuffer(memory.buffer, dtype=np.uint8).any()
    memory.buffer[-1] = 7
    assert memory.buffer[-1] == 7
    memory.close()


def test_private_memory_has_nothing_to_pass() -> None:
    memory = PoolMemory.allocate(1, shared=False)
    assert memory.fd is None
    memory.close()


def test_a_descriptor_of_shared_memory_can_read_but_not_write_or_resize() -> None:
    memory = PoolMemory.allocate(10_000, shared=True)
    assert memory.fd is not None
    reader = mmap.mmap(memory.fd, memory.nbytes, prot=mmap.PROT_READ)
    memory.buffer[5] = 9
    assert reader[5] == 9
    for size in (0, memory.nbytes * 2):
        with pytest.raises(OSError):
            os.ftruncate(memory.fd, size)
    assert fcntl.fcntl(memory.fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SEAL
    with pytest.raises(PermissionError):
        mmap.mmap(memory.fd, memory.nbytes)
    with pytest.raises(OSError):
        os.pwrite(memory.fd, b"x", 0)


def test_the_descriptor_goes_with_the_last_reference() -> None:
    memory = PoolMemory.allocate(100, shared=True)
    fd = memory.fd
    assert fd is not None
    os.fstat(fd)
    del memory
    with pytest.raises(OSError):
        os.fstat(fd)


def test_views_outlive_close() -> None:
    memory = PoolMemory.allocate(100, shared=True)
    view = np.frombuffer(memory.buffer, dtype=np.uint8)
    fd = memory.fd
    memory.close()
    memory.close()
    assert memory.fd is None
    assert fd is not None
    with pytest.raises(OSError):
        os.fstat(fd)
    view[3] = 1
    assert view.sum() == 1


@pytest.mark.parametrize("shared", [False, True])
def test_discarded_memory_is_the_systems_again_and_reads_as_zeros(shared: bool) -> None:
    memory = PoolMemory.allocate(64 << 20, shared)
    view = np.frombuffer(memory.buffer, dtype=np.uint8)
    view[:] = 1
    before = resident_bytes()
    memory.discard()
    assert before - resident_bytes() > 60 << 20
    assert not view.any()
    view[5] = 3
    assert view.sum() == 3, "the views go on working"
