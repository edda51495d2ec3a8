"""A recording is tried without the other ranks, and rejected if they would get something else."""

import ctypes
import itertools
import shutil

import pytest
import torch
from torch import Tensor

from tokenloom.gpu_worker.call_recording.recorder import Call, CallRecorder, current_recorder, recording
from tokenloom.gpu_worker.call_recording.recording import Buffers, DryRun, Recording, SharedMemory
from tokenloom.gpu_worker.kernels.library import load_replay

pytestmark = pytest.mark.skipif(not shutil.which("g++"), reason="no C++ compiler")

COUNT = 64


class OtherRank:
    """Adds 2 to what it gets, as a sum with another rank does."""

    def __init__(self) -> None:
        self.got: list[float] = []

    def __call__(self, x: Tensor) -> None:
        self.got.append(float(x[0]))
        x += 2


def record(source: Tensor, other: OtherRank, *, with_ends: bool = True) -> tuple[CallRecorder, Tensor]:
    """Widen ``source``, exchange it, and scale what came; without ends Python scales before and after the exchange."""
    kernels = load_replay()
    with torch.inference_mode(), recording() as recorder:
        assert recorder is not None
        x = torch.empty(COUNT, dtype=torch.float32)
        kernels.widen(source.data_ptr(), x.data_ptr(), COUNT)
        if not with_ends:
            (ctypes.c_float * COUNT).from_address(x.data_ptr())[0] = 7.0
        recorder.exchange(other, x, reads=True, writes=True)
        kernels.scale(0, x.data_ptr(), 10.0, COUNT)
    return recorder, x


def make(recorder: CallRecorder, result: Tensor, rehearsal: DryRun | None = None) -> tuple[Recording, Tensor]:
    buffers = Buffers(recorder.tensors, recorder.calls, [result])
    with torch.inference_mode():
        memory = torch.zeros(buffers.nbytes, dtype=torch.uint8)
    calls = recorder.calls if rehearsal is None else rehearsal.calls
    return Recording(calls, buffers, memory, [result]), memory


def test_a_rehearsal_exchanges_nothing_and_a_run_does() -> None:
    source, other = torch.full((COUNT,), 3.0, dtype=torch.bfloat16), OtherRank()
    recorder, x = record(source, other)
    assert x.tolist() == [50.0] * COUNT
    rehearsal = DryRun(recorder.calls, recorder.exchanged)
    tried, _memory = make(recorder, x, rehearsal)
    tried.run()
    assert rehearsal.was_right()
    assert torch.equal(tried.results[0], x)
    assert other.got == [3.0], "the other rank takes part in the recorded step alone"
    made, _memory = make(recorder, x)
    source.fill_(4.0)
    made.run()
    assert made.results[0].tolist() == [60.0] * COUNT
    assert other.got == [3.0, 4.0]


def test_other_content_for_the_ranks_is_noticed() -> None:
    """What the exchange left hides the difference from everything behind it."""
    recorder, x = record(torch.full((COUNT,), 3.0, dtype=torch.bfloat16), OtherRank(), with_ends=False)
    rehearsal = DryRun(recorder.calls, recorder.exchanged)
    tried, _memory = make(recorder, x, rehearsal)
    tried.run()
    assert torch.equal(tried.results[0], x)
    assert not rehearsal.was_right()


def test_what_an_exchange_fills_is_another_tensor_of_the_recording() -> None:
    """The trial leaves it as the recorded step did; a run gives what the tensor of the run holds."""
    source = torch.full((COUNT,), 3.0, dtype=torch.bfloat16)
    got: list[float] = []

    def gather(x: Tensor, out: Tensor) -> None:
        got.append(float(x[0]))
        out[:COUNT], out[COUNT:] = x, 5.0

    kernels = load_replay()
    with torch.inference_mode(), recording() as recorder:
        assert recorder is not None
        x, out = torch.empty(COUNT), torch.empty(2 * COUNT)
        kernels.widen(source.data_ptr(), x.data_ptr(), COUNT)
        recorder.exchange(gather, x, reads=True, writes=False, into=out)
        kernels.scale(0, out.data_ptr(), 10.0, 2 * COUNT)
    rehearsal = DryRun(recorder.calls, recorder.exchanged)
    tried, _memory = make(recorder, out, rehearsal)
    tried.run()
    assert rehearsal.was_right()
    assert torch.equal(tried.results[0], out)
    assert got == [3.0]
    made, _memory = make(recorder, out)
    source.fill_(4.0)
    made.run()
    assert made.results[0].tolist() == [40.0] * COUNT + [50.0] * COUNT
    assert got == [3.0, 4.0]


def test_an_exchange_inside_another_one_is_a_part_of_it() -> None:
    heard: list[object] = []
    with recording() as recorder:
        assert recorder is not None
        assert current_recorder() is recorder
        x = torch.empty(COUNT)
        recorder.exchange(lambda _: heard.append(current_recorder()), x, reads=False, writes=True)
    assert heard == [None]
    assert current_recorder() is None
    assert len(recorder.calls) == len(recorder.exchanged) == 1


def test_an_exchange_of_a_part_of_each_row_is_not_recorded() -> None:
    column = torch.zeros(4, 4)[:, 0]
    with recording() as recorder:
        assert recorder is not None
        recorder.exchange(OtherRank(), column, reads=True, writes=True)
    assert recorder.failure == "an exchange of an odd tensor"


def call(*addresses: int) -> Call:
    return Call(function=1, letters="P" * len(addresses), words=list(addresses), args=None)


def make_buffers(sizes: list[int]) -> tuple[dict[int, torch.Tensor], list[int]]:
    tensors = [torch.empty(size, dtype=torch.uint8) for size in sizes]
    return {each.data_ptr(): each for each in tensors}, [each.data_ptr() for each in tensors]


def test_results_of_a_chain_take_turns_in_two_places() -> None:
    tensors, at = make_buffers([640] * 6)
    calls = [call(*pair) for pair in itertools.pairwise(at)]
    buffers = Buffers(tensors, calls, [])
    assert buffers.nbytes == 2 * 640
    first, second = buffers.moved(at[0], 0), buffers.moved(at[1], 0)
    assert {first, second} == {0, 640}
    assert [buffers.moved(each, 0) for each in at] == [first, second] * 3


def test_what_lives_at_the_same_time_never_overlaps() -> None:
    generator = torch.Generator().manual_seed(0)
    sizes = torch.randint(1, 5000, (40,), generator=generator).tolist()
    tensors, at = make_buffers(sizes)
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
    tensors, (first, second) = make_buffers([256, 256])
    buffers = Buffers(tensors, [call(first + 32, second)], [])
    assert buffers.moved(first + 32, 1 << 20) == buffers.moved(first, 1 << 20) + 32 >= 1 << 20
    assert buffers.moved(second + 256 + 4096, 0) == second + 256 + 4096
    assert buffers.moved(0, 1 << 20) == 0


def test_memory_grows_only_when_a_recording_needs_more() -> None:
    memory = SharedMemory()
    assert memory.reserve(1000)
    assert not memory.reserve(500)
    assert memory.reserve(1500)
    assert len(memory.bytes) == 2000, "so that few sizes make_buffers it move"
