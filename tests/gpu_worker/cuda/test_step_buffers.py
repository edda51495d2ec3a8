"""The arrays of a step, sent with one copy."""

import numpy as np
import torch

from tests.gpu_worker.cuda.late_link import LateLink
from tokenloom.gpu_worker.cuda.step_buffers import StepBuffers
from tokenloom.gpu_worker.device.device_link import copy_packed, to_device

CPU = torch.device("cpu")


def arrays_of(step):
    return {
        "ids": np.arange(3) + step,
        "lens": np.arange(5, dtype=np.int32) * step,
        "tables": np.arange(6, dtype=np.int32).reshape(2, 3) + step,
        "none": np.zeros((0, 2), dtype=np.int32),
        "u": np.array([0.5 * step]),
    }


def test_one_copy_of_all_arrays() -> None:
    link = LateLink()
    buffers = StepBuffers(CPU, link)
    for step in range(5):
        arrays = arrays_of(step)
        sent = buffers.send(arrays)
        assert link.num_sends == step + 1
        for name, array in arrays.items():
            assert np.array_equal(sent[name].numpy(), array)
            assert sent[name].numpy().dtype == array.dtype
            assert sent[name].data_ptr() % 16 == 0
            array[...] = 0  # which the copy does not see
        assert sent["ids"].tolist() == [step, step + 1, step + 2]
        assert len({tensor.untyped_storage().data_ptr() for tensor in sent.values()}) == 1


def test_there_is_room_for_a_long_prompt() -> None:
    buffers = StepBuffers(CPU, LateLink())
    for size in (10, 100_000, 10):
        ids = np.arange(size)
        assert np.array_equal(buffers.send({"ids": ids})["ids"].numpy(), ids)


def test_memory_is_written_again_only_after_its_copy() -> None:
    link = LateLink()
    buffers = StepBuffers(CPU, link)
    for step in range(3):
        link.fetch(torch.zeros(1), torch.ones(1))  # so that each event is still to come
        buffers.send(arrays_of(step))
    assert link.num_waits == 0
    buffers.send(arrays_of(3))
    assert link.num_waits == 1
    assert link.num_done == 1, "only the oldest copy was waited for"


def test_one_copy_of_several_arrays() -> None:
    arrays = [np.arange(3, dtype=np.int64), np.ones((2, 2), dtype=np.int32), np.zeros((0, 4), dtype=np.float64)]
    copies = copy_packed(arrays, CPU)
    for array, copy in zip(arrays, copies, strict=True):
        assert np.array_equal(copy.numpy(), array)
        assert copy.numpy().dtype == array.dtype
        assert copy.data_ptr() % 16 == 0
    arrays[0][:] = 9
    assert copies[0].tolist() == [0, 1, 2]
    assert len({copy.untyped_storage().data_ptr() for copy in copies}) == 1


def test_the_cpu_reads_the_array_itself() -> None:
    array = np.arange(4)
    tensor = to_device(array, CPU)
    array[0] = 7
    assert tensor[0] == 7
