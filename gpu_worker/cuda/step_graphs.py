"""Replays decode steps as CUDA graphs: one call launches all kernels of a step.

A graph belongs to a number of rows, and a step takes the next larger one. The rows behind its requests are padding:
they have no slot, so they write no KV, and no entry in the list of the attention kernel, so they read none. All graphs
share one pool of memory, because only the results of the latest step are needed.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..attention.attention_backend import AttentionBackend, AttentionPlan, KVCache
from ..attention.attention_work import num_splits
from ..attention.grouped_backend import GroupedBackend
from ..attention.triton_backend import PlanTensors, TritonBackend, TritonPlan
from ..batch.input_batch import StepInputs
from ..recorded.recorded_model import StepModel
from .graphs import Capture, Graph
from .step_buffers import Layout, StepBuffers


@dataclass(frozen=True, slots=True)
class _Step:
    """Holds the graph of one size."""

    graph: Graph
    buffers: StepBuffers
    results: list[Tensor]
    """The last hidden states [rows, hidden_size] and the logits [rows, vocab], written by each replay."""


def row_buckets(most: int) -> list[int]:
    """Return the sizes of graphs: 1, 2, 4, the multiples of 8 up to 64, and then those of 32; the last is ``most``."""
    sizes = [1, 2, 4, *range(8, 65, 8), *range(96, most + 1, 32)]
    return [size for size in sizes if size < most] + [most]


class StepGraphs:
    """Fulfils what the runner needs of ``recorded.RecordedModel``, on a GPU. Belongs to one thread."""

    def __init__(
        self, backend: AttentionBackend, most_rows: int, most_blocks: int, device: torch.device, capture: Capture
    ) -> None:
        """``most_rows``: requests of a step; ``most_blocks``: of a request, in one group of layers."""
        self._backend = backend
        self._parts = _parts(backend)
        self._buckets = row_buckets(most_rows)
        self._most_blocks = most_blocks
        self._device = device
        self._capture = capture
        self._steps: dict[int, _Step] = {}

    @property
    def sizes_ahead(self) -> list[int]:
        """Return all sizes, the largest first, whose memory the others then share: compiling and capturing one takes
        seconds."""
        return self._buckets[::-1]

    def forget(self) -> None:
        """Drop all graphs: the weights or the KV caches are others from now on."""
        self._steps.clear()

    @torch.inference_mode()
    def compute(
        self, model: StepModel, inputs: StepInputs, kv_caches: list[KVCache], *, adapted: bool = False
    ) -> tuple[Tensor, Tensor] | None:
        """Compute a step in which every request decodes one token. Returns the last hidden states [T, hidden_size] and
        the logits [T, vocab], which hold until the next step; None: the step must be computed operation by operation.
        """
        count = len(inputs.token_ids)
        decodes = count == len(inputs.seq_lens) == len(inputs.sampled)
        if adapted or inputs.embeds or not decodes or not 0 < count <= self._buckets[-1]:
            return None
        rows = next(size for size in self._buckets if size >= count)
        step = self._steps.get(rows)
        if step is None:
            buffers = StepBuffers(self._layout(rows), self._device)
            self._fill(buffers, rows, inputs)
            step = self._steps[rows] = self._record(model, buffers, rows, kv_caches)
        else:
            self._fill(step.buffers, rows, inputs)
        step.graph.replay()
        hidden, logits = step.results
        return hidden[:count], logits[:count]

    def _layout(self, rows: int) -> Layout:
        layout: dict[str, tuple[type[np.generic], tuple[int, ...]]] = {
            "token_ids": (np.int64, (rows,)),
            "positions": (np.int64, (rows,)),
            "query_starts": (np.int32, (rows + 1,)),
            "seq_lens": (np.int32, (rows,)),
            "work": (np.int32, (rows, 2)),
        }
        for index in range(len(self._parts)):
            layout[f"slots {index}"] = (np.int64, (rows,))
            layout[f"tables {index}"] = (np.int32, (rows, self._most_blocks))
        return layout

    def _fill(self, buffers: StepBuffers, rows: int, inputs: StepInputs) -> None:
        """Write a step to the device, with one copy."""
        arrays, count = buffers.begin(), len(inputs.token_ids)
        for name, values in (("token_ids", inputs.token_ids), ("positions", inputs.positions)):
            arrays[name][:count], arrays[name][count:] = values, 0
        arrays["query_starts"][:] = np.arange(rows + 1)
        arrays["seq_lens"][:count], arrays["seq_lens"][count:] = inputs.seq_lens, 1
        arrays["work"][:, 0], arrays["work"][:, 1] = np.arange(rows), 0
        arrays["work"][count:, 0] = -1
        num_parts = len(self._parts)
        for index in range(num_parts):
            slots = inputs.slot_mapping if num_parts == 1 else inputs.slot_mapping[index]
            arrays[f"slots {index}"][:count], arrays[f"slots {index}"][count:] = slots, -1
            tables = inputs.block_tables[:, index::num_parts]
            arrays[f"tables {index}"][:count, : tables.shape[1]] = tables
        buffers.send()

    def _record(self, model: StepModel, buffers: StepBuffers, rows: int, kv_caches: list[KVCache]) -> _Step:
        tensors, results = buffers.tensors, list[Tensor]()
        plan = self._plan(buffers, rows)

        def compute() -> None:
            hidden = model.forward(tensors["token_ids"], tensors["positions"], kv_caches, plan)
            results[:] = [hidden, model.compute_logits(hidden)]

        return _Step(self._capture(compute), buffers, results)

    def _plan(self, buffers: StepBuffers, rows: int) -> AttentionPlan:
        tensors, plans = buffers.tensors, list[AttentionPlan]()
        for index, part in enumerate(self._parts):
            shape = part.shape(1)
            longest = self._most_blocks * part.block_size
            splits = num_splits(rows, rows, part.num_kv_heads, longest, shape.tile)
            arrays = PlanTensors(
                tensors[f"slots {index}"],
                tensors["work"],
                tensors["query_starts"],
                tensors["seq_lens"],
                tensors[f"tables {index}"],
            )
            plans.append(TritonPlan(part, arrays, shape, splits))
        return self._backend.join(plans) if isinstance(self._backend, GroupedBackend) else plans[0]


def make_step_graphs(
    backend: AttentionBackend, most_rows: int, most_blocks: int, device: torch.device, capture: Capture
) -> StepGraphs | None:
    """Return graphs of decode steps, see :class:`StepGraphs`; None: the backend's plans keep on the host what differs
    between steps."""
    if not all(isinstance(part, TritonBackend) for part in _all_parts(backend)):
        return None
    return StepGraphs(backend, most_rows, most_blocks, device, capture)


def _all_parts(backend: AttentionBackend) -> Sequence[AttentionBackend]:
    return backend.parts if isinstance(backend, GroupedBackend) else [backend]


def _parts(backend: AttentionBackend) -> list[TritonBackend]:
    return [part for part in _all_parts(backend) if isinstance(part, TritonBackend)]
