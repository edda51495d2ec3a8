"""The states that layers keep between tokens: where they lie, and which tokens of a step read and write them.

A slot holds the states of all layers after some number of tokens. A step names for each run of tokens the slot that it
reads and the one that it writes, so that a snapshot, a fork and a hit copy nothing.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tokenloom.engine_core.data.scheduler_output import StateRun
from tokenloom.engine_core.kv_transfer.kv_transport import KVRegion

from ..checkpoint.model_config import ModelConfig
from ..device.device_link import copy_packed

FROM_ZERO = -1
"""Stands for the slot of a run that begins a sequence: it reads none."""


class LayerStates(NamedTuple):
    """Holds the states of one layer in all slots, contiguous."""

    conv: Tensor
    """[num_slots, taps, channels] in the model's dtype: the last inputs of the convolution, the newest last."""
    recurrent: Tensor | None
    """[num_slots, ...] float32, as ``StateShape.recurrent``; None: the layer has no recurrence."""


def allocate_states(
    config: ModelConfig, num_slots: int, device: torch.device, memory: memoryview | None = None
) -> list[LayerStates | None]:
    """Allocate slots of zeros, for each layer of ``config.states``; empty if the model keeps no states. ``memory``:
    fresh memory of the host to lay them in; None: torch's own."""

    def zeros(begin: int, dtype: torch.dtype, *shape: int) -> Tensor:
        if memory is None:
            return torch.zeros(num_slots, *shape, dtype=dtype, device=device)
        end = begin + num_slots * prod(shape) * dtype.itemsize
        return torch.frombuffer(memory[begin:end], dtype=dtype).view(num_slots, *shape)

    found = list[LayerStates | None]()
    places = iter(_places(config, num_slots))
    for shape in config.states.layers if config.states else ():
        if shape is None:
            found.append(None)
            continue
        conv = zeros(next(places).begin, config.dtype, shape.taps, shape.channels)
        recurrent = zeros(next(places).begin, torch.float32, *shape.recurrent) if shape.recurrent else None
        found.append(LayerStates(conv, recurrent))
    return found


def state_regions(config: ModelConfig, num_slots: int, offset: int) -> tuple[KVRegion, ...]:
    """Describe slots to transports that :func:`allocate_states` lays out in a memory from ``offset`` on."""
    return tuple(KVRegion(offset + place.begin, place.nbytes, is_state=True) for place in _places(config, num_slots))


class _Place(NamedTuple):
    begin: int
    """Of a tensor, in bytes behind the first one."""
    nbytes: int
    """Of one slot in it."""


def _places(config: ModelConfig, num_slots: int) -> list[_Place]:
    """Return where the tensors of all layers lie in one memory: of each its convolution's, then its recurrence's."""
    shapes = [shape for shape in config.states.layers if shape is not None] if config.states else []
    sizes = [shape.part_bytes(config.dtype.itemsize) for shape in shapes]
    begin, places = 0, dict[tuple[int, int], _Place]()
    for part in (1, 0):  # float32 first, so that each tensor begins at a multiple of its elements
        for layer, parts in enumerate(sizes):
            for nbytes in parts[part : part + 1]:
                places[layer, part] = _Place(begin, nbytes)
                begin += num_slots * nbytes
    return [places[key] for key in sorted(places)]


class SentRuns(NamedTuple):
    """Holds the runs of a plan on a device, int32, and which of them follow each other.

    A *chain* is the runs of one request: each but the first reads the slot that the one before it writes.
    """

    read: Tensor
    written: Tensor
    starts: Tensor
    """[R + 1], ``cu_lens``."""
    chains: Tensor
    """[C, 2]: the first run of each chain, and the one behind its last."""
    scanned: Tensor
    """[S, 2]: the same of what is computed token after token; without chunks it is ``chains``."""
    most_tokens: int
    """Of a chain."""
    chunks: "SentChunks | None" = None
    """What is computed in chunks, before the runs that are scanned; None: nothing."""


class SentChunks(NamedTuple):
    """Holds the runs of prompts, R in all, that are computed in chunks, N in all, on a device, int32."""

    read: Tensor
    """[R], as in :class:`SentRuns`."""
    written: Tensor
    run_chunks: Tensor
    """[R + 1]: where the chunks of each run begin."""
    chains: Tensor
    """[C, 2], of these runs."""
    chunks: Tensor
    """[N, 2]: the first token of each chunk, and the one behind its last."""


@dataclass(frozen=True, slots=True, eq=False)
class StatePlan:
    """Holds the runs of a step's tokens, R in all, and the slots. The runs of a request follow each other."""

    read: Tensor
    """[R] int32 on the host: the slot of the state before each run; ``FROM_ZERO``: the empty one."""
    written: Tensor
    """[R] int32 on the host: the slot of the state after it. A slot that is only read stays as it is."""
    cu_lens: Tensor
    """[R + 1] int32 on the host: where each run's tokens begin in the step."""
    layers: list[LayerStates | None]
    sent: SentRuns | None = None
    """The same on the device of the states, for kernels that read it there; None: they read the host's."""
    chunk: int = 1
    """Tokens of a chunk in which the built-in layers compute prompts on a GPU; 1: token after token."""

    @property
    def num_slots(self) -> int:
        """Return how many slots there are. The last one has no owner."""
        return next(len(layer.conv) for layer in self.layers if layer is not None)

    @classmethod
    def make(
        cls,
        lengths: Sequence[int],
        read: Sequence[int],
        written: Sequence[int],
        layers: list[LayerStates | None],
        chunk: int = 1,
    ) -> "StatePlan":
        """Return the plan of runs of these lengths, in tokens, that read and write these slots; all [R]."""
        cu_lens = torch.zeros(len(lengths) + 1, dtype=torch.int32)
        torch.cumsum(torch.tensor(lengths, dtype=torch.int32), 0, dtype=torch.int32, out=cu_lens[1:])
        before, after = (torch.tensor(slots, dtype=torch.int32) for slots in (read, written))
        return cls(before, after, cu_lens, layers, None, chunk)

    def arrays(self) -> list[npt.NDArray[np.int32]]:
        """Return the arrays of :class:`SentRuns` on the host, and behind them, if there are chunks, those that are
        scanned and those of :class:`SentChunks`."""
        read, written, starts = (each.numpy() for each in (self.read, self.written, self.cu_lens))
        # Dummy rows all have the slot that no request has, and do not follow each other.
        spare = self.num_slots - 1 if self.layers else FROM_ZERO
        begins = np.flatnonzero(np.concatenate(([True], (read[1:] != written[:-1]) | (read[1:] == spare))))
        chains = np.stack((begins, np.append(begins[1:], len(read))), axis=1).astype(np.int32)
        return [read, written, starts, chains, *self._chunk_arrays(chains)]

    def _chunk_arrays(self, chains: npt.NDArray[np.int32]) -> list[npt.NDArray[np.int32]]:
        """Divide each chain: its runs up to the last one of several tokens are of a prompt, and computed in chunks. The
        others are single tokens, which have the form of decoded ones."""
        read, written, starts = (each.numpy() for each in (self.read, self.written, self.cu_lens))
        lengths = np.diff(starts)
        if self.chunk == 1 or lengths.max(initial=0) < 2:
            return []
        ends = np.where(lengths > 1, np.arange(1, len(lengths) + 1), 0)
        splits = np.maximum(chains[:, 0], np.maximum.reduceat(ends, chains[:, 0]))
        scanned = np.stack((splits, chains[:, 1]), axis=1)[splits < chains[:, 1]]
        firsts = chains[:, 0][splits > chains[:, 0]]
        counts = (splits - chains[:, 0])[splits > chains[:, 0]]
        runs = _ranges(firsts, counts)
        behind = np.cumsum(counts)
        num_chunks = -(-lengths[runs] // self.chunk)
        begins = _ranges(np.zeros_like(runs), num_chunks) * self.chunk + np.repeat(starts[runs], num_chunks)
        chunks = np.stack((begins, np.minimum(begins + self.chunk, np.repeat(starts[runs + 1], num_chunks))), axis=1)
        found = [scanned, read[runs], written[runs], np.append(0, np.cumsum(num_chunks))]
        found += [np.stack((behind - counts, behind), axis=1), chunks]
        return [each.astype(np.int32) for each in found]

    def prompt_waves(self) -> Iterator[tuple[npt.NDArray[np.int64], ...]]:
        """Return the runs of prompts, those that read what earlier ones write after these: of each wave the tokens [T],
        where each run's begin in them [R + 1], and the slots that the runs read and write [R]; int64."""
        *_, chains = self.arrays()[:4]
        _, read, written, run_chunks, prompts, chunks = self._chunk_arrays(chains)
        for depth in range(int(np.diff(prompts, axis=1).max(initial=0))):
            runs = (prompts[:, 0] + depth)[prompts[:, 0] + depth < prompts[:, 1]]
            begins, ends = chunks[run_chunks[runs], 0], chunks[run_chunks[runs + 1] - 1, 1]
            starts = np.append(0, np.cumsum(ends - begins))
            found = (_ranges(begins, ends - begins), starts, read[runs], written[runs])
            yield tuple(each.astype(np.int64) for each in found)

    def sent_as(self, arrays: Sequence[Tensor], most_tokens: int) -> "StatePlan":
        """Return the plan with :meth:`arrays`, which were copied to a device. ``most_tokens``: of a chain."""
        read, written, starts, chains, *rest = arrays
        if not rest:
            return replace(self, sent=SentRuns(read, written, starts, chains, chains, most_tokens))
        chunks = SentChunks(*rest[1:])
        return replace(self, sent=SentRuns(read, written, starts, chains, rest[0], most_tokens, chunks))

    def send(self, device: torch.device) -> "StatePlan":
        """Return the plan with its runs on ``device``, too, by one copy."""
        arrays = self.arrays()
        most = int(np.diff(arrays[2][arrays[3]], axis=1).max(initial=0))
        return self.sent_as(copy_packed(arrays, device), most)


def _ranges(begins: npt.NDArray[Any], counts: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return the numbers begins[i] … begins[i] + counts[i] - 1 of all i, one after the other."""
    behind = np.cumsum(counts)
    found: npt.NDArray[Any] = np.arange(behind[-1]) + np.repeat(begins - behind + counts, counts)
    return found


class StateSlots:
    """Holds the slots of one model, and one more, which no request has: dummy steps write to it."""

    def __init__(
        self, config: ModelConfig, num_slots: int, device: torch.device, memory: memoryview | None = None
    ) -> None:
        """``num_slots``: those of requests and snapshots. :meth:`allocate` makes them, in ``memory`` of the host if
        that is given."""
        self._config, self._num_slots, self._device, self._memory = config, num_slots, device, memory
        # The chunks of transformers' modules are theirs.
        self._chunk = config.states.chunk if config.states is not None and config.mixer is not None else 1
        self.layers: list[LayerStates | None] = []

    def allocate(self) -> None:
        """Allocate the slots, empty, if there are none."""
        if not self.layers:
            self.layers = allocate_states(self._config, self._num_slots + 1, self._device, self._memory)

    def drop(self) -> None:
        """Drop the slots with their content."""
        self.layers = []

    def plan(self, runs: Sequence[StateRun]) -> StatePlan:
        """Return the plan of a step that computes these runs, in this order."""
        lengths, read = [run.num_tokens for run in runs], [run.read for run in runs]
        return StatePlan.make(lengths, read, [run.written for run in runs], self.layers, self._chunk)

    def dummy_plan(self, lengths: Sequence[int]) -> StatePlan:
        """Return the plan of a step that computes runs of these lengths and changes no state of a request."""
        slot = self._num_slots
        # A decoded token reads a state, and all of them the same: what they compute is not used.
        read = [slot if length == 1 else FROM_ZERO for length in lengths]
        return StatePlan.make(lengths, read, [slot] * len(lengths), self.layers, self._chunk)
