"""Intermediate results share memory, but never with one that lives at the same time."""

import itertools

import torch

from tokenloom.gpu_worker.call_recording.buffers import Buffers, SharedMemory
from tokenloom.gpu_worker.call_recording.calls import Call


def call(*addresses: int) -> Call:
    return Call(function=1, letters="P" * len(addresses), words=list(addresses), args=None)


def make(sizes: list[int]) -> tuple[dict[int, torch.Tensor], list[int]]:
    tensors = [torch.empty(size, dtype=torch.uint8) for size in sizes]
    return {each.data_ptr(): each for each in tensors}, [each.data_ptr() for each in tensors]


def test_results_of_a_chain_take_turns_in_two_places() -> None:
    tensors, at = make([640] * 6)
    calls = [call(*pair) for pair in itertools.pairwise(at)]
    buffers = Buffers(tensors, calls, [])
    assert buffers.nbytes == 2 * 640
    first, second = buffers.moved(at[0], 0), buffers.moved(at[1], 0)
    assert {first, second} == {0, 640}
    assert [buffers.moved(each, 0) for each in at] == [first, second] * 3


def test_what_lives_at_the_same_time_never_overlaps() -> None:
    generator = torch.Generator().manual_seed(0)
    sizes = torch.randint(1, 5000, (40,), generator=generator).tolist()
    tensors, at = make(sizes)
    used = torch.randint(0, 40, (200, 3), generator=generator).tolist()
    calls = [call(*(at[index] for index in each)) for each in used]
    last = tensors[at[0]]
    buffers = Buffers(tensors, calls, [last])
    spans = {}
    for index, (address, size) in enumerate(zip(at, sizes, strict=True)):
        times = [number for number, each in enumerate(used) if index in each]
        until = len(calls) if index == 0 else times[-1]
        spans[index] = (times[0], until, buffers.moved(address, 0), buffers.moved(address, 0) + size)
    for one in spans.values():
        for other in spans.values():
            are_apart = one[1] < other[0] or other[1] < one[0] or one[3] <= other[2] or other[3] <= one[2]
            assert one is other or are_apart
    assert max(end for *_, end in spans.values()) <= buffers.nbytes


def test_addresses_within_a_buffer_move_with_it_and_others_stay() -> None:
    tensors, (first, second) = make([256, 256])
    buffers = Buffers(tensors, [call(first + 32, second)], [])
    assert buffers.moved(first + 32, 1 << 20) == buffers.moved(first, 1 << 20) + 32 >= 1 << 20
    assert buffers.moved(second + 256 + 4096, 0) == second + 256 + 4096
    assert buffers.moved(0, 1 << 20) == 0


def test_memory_grows_only_when_a_recording_needs_more() -> None:
    memory = SharedMemory()
    assert memory.reserve(1000)
    assert not memory.reserve(500)
    assert memory.reserve(1500)
    assert len(memory.bytes) == 2000, "so that few sizes make it move"
