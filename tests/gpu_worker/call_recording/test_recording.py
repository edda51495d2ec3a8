"""A recording is tried without the other ranks, and rejected if they would get something else."""

import ctypes
import shutil

import pytest
import torch
from torch import Tensor

from tokenloom.gpu_worker.call_recording.buffers import Buffers
from tokenloom.gpu_worker.call_recording.recorder import CallRecorder, current_recorder, recording
from tokenloom.gpu_worker.call_recording.recording import DryRun, Recording
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
