"""The arrays of a step, made on the device from the rows that it keeps."""

import numpy as np
import pytest
import torch

from tests.gpu_worker.cuda.host_rows import HostRowKernels
from tokenloom.gpu_worker.cuda.row_kernels import TritonRowKernels
from tokenloom.gpu_worker.cuda.step_tensors import SentStep, StepSize, StepTensors

CPU = torch.device("cpu")
STEPS = {
    "decodes": ([4, 0, 2], [1, 1, 1], [40, 1, 16]),
    "a prompt among decodes": ([1, 3, 0], [1, 300, 1], [33, 310, 80]),
    "one token": ([2], [1], [512]),
    "only padding": ([], [], []),
}


def ints(values):
    return torch.tensor(values, dtype=torch.int32)


def make(kernels, name, padding, num_groups, block_size=16):
    rows, query_lens, lengths = STEPS[name]
    rng = np.random.default_rng(1)
    tables = torch.from_numpy(rng.integers(1, 99, (5, 512 // block_size * num_groups)).astype(np.int32))
    ids = rng.integers(0, 1000, sum(query_lens))
    starts = np.cumsum([0, *query_lens])
    ids[starts[1:][::2] - 1] = -1  # the last token of every other request is known to the device alone
    work = [[request, 0, request % 2, 2] for request in range(len(rows))]
    sent = SentStep(ints(rows), ints(starts), ints(lengths), ints(ids), ints(work).view(-1, 4))
    size = sent.size
    padded = StepSize(size.tokens + padding, size.requests + padding, size.entries + padding)
    made = StepTensors.allocate(StepSize(400, 9, 9), num_groups, 512 // block_size, CPU)
    for tensor in (made.token_ids, made.positions, made.slots, made.query_starts, made.seq_lens, made.work):
        tensor.fill_(-99)  # an element that is left out shows
    shifts = torch.tensor([0, -7, 0, 30, -90])
    kernels.prepare(sent, tables, torch.arange(5) + 7000, shifts, made, padded, block_size)
    return made


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize(("padding", "num_groups", "block_size"), [(0, 1, 16), (5, 1, 32), (3, 2, 16)])
def test_the_arrays_of_a_step(name, padding, num_groups, block_size):
    found = make(TritonRowKernels(), name, padding, num_groups, block_size)
    expected = make(HostRowKernels(), name, padding, num_groups, block_size)
    for field in StepTensors.__dataclass_fields__:
        assert torch.equal(getattr(found, field), getattr(expected, field)), field


@pytest.mark.parametrize("dtype", [torch.int32, torch.float64])
def test_changes_are_written_to_their_places(dtype):
    places = torch.from_numpy(np.random.default_rng(2).permutation(700)[:300])
    values = torch.arange(300).to(dtype)
    target = torch.zeros(7, 100, dtype=dtype)
    TritonRowKernels().scatter(target, places, values)
    assert torch.equal(target.view(-1)[places], values)
    assert target.count_nonzero() == values.count_nonzero()
