"""Takes the place of the kernels that keep rows on a device: the same arrays, made by torch on the CPU."""

import torch
from torch import Tensor

from tokenloom.gpu_worker.cuda.step_tensors import SentStep, StepSize, StepTensors


class HostRowKernels:
    """Fulfils ``RowKernels``. Reads and writes nothing but the tensors that it gets."""

    def scatter(self, target: Tensor, places: Tensor, values: Tensor) -> None:
        assert len(set(places.tolist())) == len(places)
        target.view(-1)[places] = values

    def prepare(
        self,
        sent: SentStep,
        tables: Tensor,
        last_tokens: Tensor,
        shifts: Tensor,
        made: StepTensors,
        padded: StepSize,
        block_size: int,
    ) -> None:
        size = sent.size
        made.work[: padded.entries] = -1
        made.work[: size.entries] = sent.work
        made.token_ids[: padded.tokens] = made.positions[: padded.tokens] = 0
        made.slots[:, : padded.tokens] = -1
        made.seq_lens[: padded.requests] = 1
        made.query_starts[: padded.requests + 1] = size.tokens
        made.query_starts[: size.requests + 1] = sent.starts
        made.seq_lens[: size.requests] = sent.lengths
        num_groups = len(made.slots)
        for request, row in enumerate(sent.rows.tolist()):
            start, end, length = int(sent.starts[request]), int(sent.starts[request + 1]), int(sent.lengths[request])
            ids = sent.token_ids[start:end].long()
            made.token_ids[start:end] = torch.where(ids < 0, last_tokens[row], ids)
            positions = torch.arange(length - (end - start), length)
            made.positions[start:end] = positions + shifts[row]
            for group in range(num_groups):
                blocks = tables[row, group::num_groups][: -(-length // block_size)]
                made.tables[group, request, : len(blocks)] = blocks
                made.slots[group, start:end] = blocks[positions // block_size] * block_size + positions % block_size
