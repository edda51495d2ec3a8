"""Packed weights share slabs of memory, which live as long as their last tensor."""

import os
import weakref
from concurrent.futures import ThreadPoolExecutor

import torch

from tokenloom.gpu_worker.layers import weight_memory
from tokenloom.gpu_worker.layers.weight_memory import WeightMemory
from tokenloom.process.control_groups import resident_bytes

LARGE = 256 << 10


def test_tensors_follow_each_other_in_a_slab():
    memory = WeightMemory(1 << 20)
    first, second = memory.empty(LARGE + 1, dtype=torch.uint8), memory.empty(LARGE // 8, 2, dtype=torch.float32)
    assert second.data_ptr() - first.data_ptr() == LARGE + 64
    assert second.shape == (LARGE // 8, 2)
    first.fill_(7)
    second.fill_(1.5)
    assert first.eq(7).all()
    assert second.eq(1.5).all()


def test_a_tensor_larger_than_a_slab_has_one_of_its_own():
    memory = WeightMemory(LARGE)
    first, second = (memory.empty(3 * LARGE, dtype=torch.uint8) for _ in range(2))
    assert not first.any()
    assert abs(second.data_ptr() - first.data_ptr()) >= 3 * LARGE


def test_a_copy_is_contiguous():
    matrix = torch.randn(256, 1024, generator=torch.Generator().manual_seed(0))
    copy = WeightMemory().copy(matrix.t())
    assert copy.is_contiguous()
    assert torch.equal(copy, matrix.t())


def test_small_tensors_take_no_slab(monkeypatch):
    monkeypatch.setattr(weight_memory, "_huge_pages", None)  # calling it fails
    assert WeightMemory().empty(4, 8, dtype=torch.bfloat16).shape == (4, 8)


def test_a_slab_is_freed_with_its_last_tensor(monkeypatch):
    slabs, make = [], weight_memory._huge_pages

    def remember(nbytes: int):
        buffer = make(nbytes)
        slabs.append(weakref.ref(buffer))
        return buffer

    monkeypatch.setattr(weight_memory, "_huge_pages", remember)
    memory = WeightMemory(4 * LARGE)
    first, second = (memory.empty(LARGE, dtype=torch.uint8) for _ in range(2))
    assert len(slabs) == 1
    del first
    assert slabs[0]() is not None
    del second
    assert slabs[0]() is None
    memory.empty(LARGE, dtype=torch.uint8)
    assert len(slabs) == 2


def test_pages_are_returned_with_the_last_tensor_in_them():
    memory = WeightMemory()
    first, second, third = (memory.empty(35 << 19, dtype=torch.uint8) for _ in range(3))  # 17.5 MiB
    for number, tensor in enumerate((first, second, third)):
        tensor.fill_(number + 1)
    before = resident_bytes()
    del second
    # Of the two huge pages at its ends the neighbours have a part.
    assert 14 << 20 <= before - resident_bytes() <= 18 << 20
    assert first.eq(1).all()
    assert third.eq(3).all()


def test_memory_that_was_returned_is_not_given_away_again():
    memory = WeightMemory()
    first, second = (memory.empty(LARGE, dtype=torch.uint8) for _ in range(2))
    first.fill_(7)
    del second  # in the page of the first one, in which the next one begins too
    third = memory.empty(LARGE, dtype=torch.uint8)
    assert third.data_ptr() == first.data_ptr() + 2 * LARGE
    third.fill_(9)
    part = third.view(torch.int16)[:8]
    del third
    assert first.eq(7).all()
    assert part.eq(9 * 257).all(), "a view keeps the memory too"


def test_a_copy_of_a_tensor_without_data_has_none_either():
    """Checkpoints are checked with such tensors before weights are replaced."""
    copy = WeightMemory(LARGE).copy(torch.empty(8, 4, device="meta", dtype=torch.int8).t())
    assert copy.is_meta
    assert copy.shape == (4, 8)
    assert copy.is_contiguous()


def test_threads_get_memory_of_their_own(monkeypatch):
    make = torch.frombuffer

    def make_slowly(*args, **options):
        os.sched_yield()  # another thread may run between the choice of a place and its use
        return make(*args, **options)

    monkeypatch.setattr(torch, "frombuffer", make_slowly)
    memory = WeightMemory(64 * LARGE)
    with ThreadPoolExecutor(8) as threads:
        tensors = list(threads.map(lambda _: memory.empty(LARGE, dtype=torch.uint8), range(400)))
    assert len({tensor.data_ptr() for tensor in tensors}) == len(tensors)
