"""The arrays of a step on the device, always in the same place: captured graphs read them there; and what a platform
offers to compute steps: copies, kernels and graphs."""

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, Self

import torch
from torch import Tensor

from ..attention.states import SentRuns, StatePlan
from ..device.device_link import DeviceArray, DeviceLink


@dataclass(frozen=True, slots=True)
class StepSize:
    """Says how large a step is."""

    tokens: int
    requests: int
    entries: int
    """Of the list of the attention kernel; see ``attention.triton_backend.work_entries``."""


@dataclass(frozen=True, slots=True)
class StepTensors:
    """Holds room for the largest step."""

    token_ids: Tensor
    """[tokens] int64, as are ``positions``."""
    positions: Tensor
    """Rotary positions: the indices of tokens plus the shift of their row."""
    slots: Tensor
    """[groups of layers, at least tokens] int64; -1: padding."""
    tables: Tensor
    """[groups of layers, at least requests, blocks of a request] int32."""
    query_starts: Tensor
    """[requests + 1] int32."""
    seq_lens: Tensor
    """[requests] int32."""
    work: Tensor
    """[entries, 4] int32; the request is -1 in padding."""

    @classmethod
    def allocate(cls, most: StepSize, num_groups: int, most_blocks: int, device: torch.device) -> Self:
        """Allocate room, zeroed. ``most_blocks``: of a request, in one group."""

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return cls(
            token_ids=zeros(most.tokens, dtype=torch.int64),
            positions=zeros(most.tokens, dtype=torch.int64),
            # Rounded up, so that the rows of every group begin at a multiple of 16 bytes.
            slots=zeros(num_groups, most.tokens + most.tokens % 2, dtype=torch.int64),
            tables=zeros(num_groups, -(-most.requests // 4) * 4, most_blocks),
            query_starts=zeros(most.requests + 1),
            seq_lens=zeros(most.requests),
            work=zeros(most.entries, 4),
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
class DecodedStates:
    """Holds the slots of a step in which each row decodes a token, always in the same place. Padding reads and writes
    the slot that no request has."""

    plan: StatePlan
    """Of as many rows as there may be."""
    chains: Tensor
    """[rows, 2] int32 on the device: each row's run is alone."""
    spare: int
    """The slot of padding."""

    @classmethod
    def allocate(cls, states: StatePlan, most_rows: int, device: torch.device) -> Self:
        """Allocate room for rows that are all padding. ``states``: any plan over the model's slots."""
        spare = states.num_slots - 1
        # Rounded up, so that the slots that are written begin at a multiple of 16 bytes, too.
        count = -(-most_rows // 4) * 4
        read, written = torch.full((2, count), spare, dtype=torch.int32, device=device).unbind()
        starts = torch.arange(count + 1, dtype=torch.int32, device=device)
        return cls(StatePlan(read, written, starts, states.layers), torch.stack((starts[:-1], starts[1:]), 1), spare)

    def clear(self) -> None:
        """Let all rows be padding."""
        self.plan.read.fill_(self.spare)
        self.plan.written.fill_(self.spare)

    def fill(self, slots: Tensor) -> None:
        """Take over the slots [2, rows] int32 on the device that the rows of a step, and padding, read and write."""
        count = slots.shape[1]
        self.plan.read[:count].copy_(slots[0])
        self.plan.written[:count].copy_(slots[1])

    def part(self, rows: int) -> StatePlan:
        """Return the plan of a step of so many rows, each a chain of its own."""
        read, written, starts = self.plan.read[:rows], self.plan.written[:rows], self.plan.cu_lens[: rows + 1]
        sent = SentRuns(read, written, starts, self.chains[:rows], self.chains[:rows], 1)
        return StatePlan(read, written, starts, self.plan.layers, sent)


@dataclass(frozen=True, slots=True)
class SentStep:
    """Holds what the host sent of a step, on the device; see ``kernels.triton.rows.prepare_step``."""

    rows: Tensor
    """[requests] int32."""
    starts: Tensor
    """[requests + 1] int32."""
    lengths: Tensor
    """[requests] int32."""
    token_ids: Tensor
    """[tokens] int32; negative: the token that its row drew last."""
    work: Tensor
    """[entries, 4] int32."""

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

    @property
    def results(self) -> Sequence[Tensor]:
        """What the captured call returned; a replay writes it, and the next replay of any graph may overwrite it."""

    def replay(self) -> None: ...


class Capture(Protocol):
    """Captures what calls give the device to do, as graphs that share memory."""

    def __call__(self, compute: Callable[[], Sequence[Tensor]]) -> Graph:
        """Capture a call. It runs before that, too, so that its kernels are compiled. Raises ``RuntimeError`` if the
        device cannot capture it; later calls can be captured nevertheless."""

    def forget(self) -> None:
        """Begin with memory of their own for the graphs to come: those captured so far are dropped."""


@dataclass(frozen=True, slots=True)
class StepTools:
    """Holds the means of a device that keeps the rows of the batch: a step is one copy to it."""

    link: DeviceLink
    kernels: RowKernels


class GraphCapture:
    """Fulfils :class:`Capture` on a GPU."""

    def __init__(self) -> None:
        # One stream for all captures: what a call has freed stays with its stream, so each further stream would keep
        # the activations of a step.
        self._stream = torch.cuda.Stream()
        self._pool = torch.cuda.graph_pool_handle()

    def forget(self) -> None:
        # PyTorch asserts that no capture takes a pool again whose graphs are gone but which still holds memory.
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, compute: Callable[[], Sequence[Tensor]]) -> "CapturedGraph":
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            compute()
        current.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # A graph that the collector frees during a capture would end it with an error.
        gc.collect()
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            return CapturedGraph(graph, self._capture(graph, compute))
        except BaseException:
            # PyTorch leaves the stream of a failed capture as the current one, and its pool as one that is in use.
            torch.cuda.set_stream(current)
            self.forget()
            raise
        finally:
            if was_enabled:
                gc.enable()

    def _capture(self, graph: torch.cuda.CUDAGraph, compute: Callable[[], Sequence[Tensor]]) -> list[Tensor]:
        # cuBLAS keeps a workspace for each stream: one that lies in the pool would keep it when its graphs are gone,
        # and one that does not could be given back while graphs write to it.
        torch._C._cuda_clearCublasWorkspaces()
        try:
            # Other threads of the process, such as those of transports, may use the device meanwhile.
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                results = compute()
            return [unowned(each) for each in results]
        finally:
            torch._C._cuda_clearCublasWorkspaces()


@dataclass(frozen=True, slots=True)
class CapturedGraph:
    """Fulfils :class:`Graph` on a GPU."""

    graph: torch.cuda.CUDAGraph
    results: list[Tensor]

    def replay(self) -> None:
        self.graph.replay()


def unowned(tensor: Tensor) -> Tensor:
    """Return a view of a tensor of a GPU that does not keep its memory, which a graph holds in any case.

    With the tensors themselves, no graph could use the memory of another one's results: the logits of all sizes took
    0.26 GiB with 128 rows, and 2.2 GiB with 512.
    """
    count = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    memory = DeviceArray(tensor.data_ptr(), (count * tensor.itemsize,), "|u1")
    return torch.as_tensor(memory, device=tensor.device).view(tensor.dtype).as_strided(tensor.shape, tensor.stride())
