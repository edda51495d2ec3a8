"""Arrays of a step with twins on the host."""

import numpy as np
import torch

from tokenloom.gpu_worker.cuda.packed_copy import copy_packed, to_device
from tokenloom.gpu_worker.cuda.step_buffers import StepBuffers

CPU = torch.device("cpu")
LAYOUT = {"ids": (np.int64, (3,)), "lens": (np.int32, (5,)), "tables": (np.int32, (2, 3)), "u": (np.float64, (1,))}


def test_what_is_written_comes_with_send() -> None:
    buffers = StepBuffers(LAYOUT, CPU)
    places = {name: tensor.data_ptr() for name, tensor in buffers.tensors.items()}
    assert all(place % 16 == 0 for place in places.values())
    for step in range(3):
        arrays = buffers.begin()
        for values in arrays.values():
            values[...] = np.arange(values.size).reshape(values.shape) + step
        buffers.send()
        for name, (dtype, shape) in LAYOUT.items():
            tensor = buffers.tensors[name]
            assert tensor.shape == shape
            assert tensor.numpy().dtype == dtype
            assert np.array_equal(tensor.numpy().ravel(), np.arange(tensor.numel()) + step)
            assert tensor.data_ptr() == places[name], "a graph reads it there"


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
