"""The arrays of a step on the device, always in the same place: captured graphs read them there; and what a platform
offers to compute steps: copies, kernels and graphs."""

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, Self

import torch
from torch import Tensor

from ..device.device_link import DeviceLink


@dataclass(frozen=True, slots=True)
class StepSize:
    """Says how large a step is."""

    tokens: int
    requests: int
    entries: int
    """Of the list of the attention kernel; see ``attention_work.work_entries``."""


@dataclass(frozen=True, slots=True)
class StepTensors:
    """Holds room for the largest step."""

    token_ids: Tensor
    """[tokens] int64, as are ``positions``."""
    positions: Tensor
    """Rotary positions: the indices of tokens plus the shift of their row."""
    slots: Tensor
    """[groups of layers, tokens] int64; -1: padding."""
    tables: Tensor
    """[groups of layers, requests, blocks of a request] int32."""
    query_starts: Tensor
    """[requests + 1] int32."""
    seq_lens: Tensor
    """[requests] int32."""
    work: Tensor
    """[entries, 2] int32; the request is -1 in padding."""

    @classmethod
    def allocate(cls, most: StepSize, num_groups: int, most_blocks: int, device: torch.device) -> Self:
        """Allocate room, zeroed. ``most_blocks``: of a request, in one group."""

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return cls(
            token_ids=zeros(most.tokens, dtype=torch.int64),
            positions=zeros(most.tokens, dtype=torch.int64),
            slots=zeros(num_groups, most.tokens, dtype=torch.int64),
            tables=zeros(num_groups, most.requests, most_blocks),
            query_starts=zeros(most.requests + 1),
            seq_lens=zeros(most.requests),
            work=zeros(most.entries, 2),
        )

    def part(self, size: StepSize) -> "StepTensors":
        """Return views of the first tokens, requests and entries."""
        return StepTensors(
            self.token_ids[: size.tokens],
            self.positions[: size.tokens],
            self.slots[:, : size.tokens],
            self.tables[:, : size.requests],
            self.query_starts[: size.requests + 1],
            self.seq_lens[: size.requests],
            self.work[: size.entries],
        )


@dataclass(frozen=True, slots=True)
class SentStep:
    """Holds what the host sent of a step, on the device; see ``kernels.triton.step_rows.prepare_step``."""

    rows: Tensor
    """[requests] int32."""
    starts: Tensor
    """[requests + 1] int32."""
    lengths: Tensor
    """[requests] int32."""
    token_ids: Tensor
    """[tokens] int32; negative: the token that its row drew last."""
    work: Tensor
    """[entries, 2] int32."""

    @property
    def size(self) -> StepSize:
        return StepSize(len(self.token_ids), len(self.rows), len(self.work))


class RowKernels(Protocol):
    """Does on a device what keeps rows there and makes the arrays of a step from them."""

    def scatter(self, target: Tensor, places: Tensor, values: Tensor) -> None:
        """Write ``values[i]`` to ``places[i]`` of the flat ``target``; no two places are equal."""

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
        """Make the arrays of a step and of what pads it up to ``padded``, in ``made``.

        Args:
            tables: The block tables of all rows, [rows, blocks * groups] int32, as ``BlockTable`` holds them.
            last_tokens: What each row drew last, [rows] int64.
            shifts: What is added to the index of a token of each row to get its rotary position, [rows] int64.
        """


class Graph(Protocol):
    """Holds work of the device that can be given to it again."""

    def replay(self) -> None: ...


Capture = Callable[[Callable[[], None]], Graph]
"""Captures what a call gives the device to do. The call runs before that, too, so that its kernels are compiled."""


@dataclass(frozen=True, slots=True)
class StepTools:
    """Holds the means of a device that keeps the rows of the batch: a step is one copy to it."""

    link: DeviceLink
    kernels: RowKernels


class GraphCapture:
    """Captures graphs that share one pool of memory: only the results of the graph replayed last may be read."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, compute: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """Run ``compute`` once, which compiles its kernels, and then capture it."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            compute()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # A graph that the collector frees during a capture would end it with an error.
        gc.collect()
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            # Other threads of the process, such as those of transports, may use the device meanwhile.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                compute()
        finally:
            if was_enabled:
                gc.enable()
        return graph
