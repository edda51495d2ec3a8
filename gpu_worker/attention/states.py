"""The states that layers keep between tokens: where they lie, and which tokens of a step read and write them.

A slot holds the states of all layers after some number of tokens. A step names for each run of tokens the slot that it
reads and the one that it writes, so that a snapshot, a fork and a hit copy nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tokenloom.engine_core.data.scheduler_output import StateRun

from ..checkpoint.model_config import ModelConfig

FROM_ZERO = -1
"""Stands for the slot of a run that begins a sequence: it reads none."""


class LayerStates(NamedTuple):
    """Holds the states of one layer in all slots, contiguous."""

    conv: Tensor
    """[num_slots, taps, channels] in the model's dtype: the last inputs of the convolution, the newest last."""
    recurrent: Tensor | None
    """[num_slots, ...] float32, as ``StateShape.recurrent``; None: the layer has no recurrence."""


def allocate_states(config: ModelConfig, num_slots: int, device: torch.device) -> list[LayerStates | None]:
    """Allocate slots of zeros, for each layer of ``config.states``; empty if the model keeps no states."""
    found = list[LayerStates | None]()
    for shape in config.states.layers if config.states else ():
        if shape is None:
            found.append(None)
            continue
        conv = torch.zeros(num_slots, shape.taps, shape.channels, dtype=config.dtype, device=device)
        recurrent = None
        if shape.recurrent is not None:
            recurrent = torch.zeros(num_slots, *shape.recurrent, dtype=torch.float32, device=device)
        found.append(LayerStates(conv, recurrent))
    return found


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

    @property
    def num_slots(self) -> int:
        """Return how many slots there are. The last one has no owner."""
        return next(len(layer.conv) for layer in self.layers if layer is not None)

    @classmethod
    def make(
        cls, lengths: Sequence[int], read: Sequence[int], written: Sequence[int], layers: list[LayerStates | None]
    ) -> "StatePlan":
        """Return the plan of runs of these lengths, in tokens, that read and write these slots; all [R]."""
        cu_lens = torch.zeros(len(lengths) + 1, dtype=torch.int32)
        torch.cumsum(torch.tensor(lengths, dtype=torch.int32), 0, dtype=torch.int32, out=cu_lens[1:])
        before, after = (torch.tensor(slots, dtype=torch.int32) for slots in (read, written))
        return cls(before, after, cu_lens, layers)


class StateSlots:
    """Holds the slots of one model, and one more, which no request has: dummy steps write to it."""

    def __init__(self, config: ModelConfig, num_slots: int, device: torch.device) -> None:
        """``num_slots``: those of requests and snapshots. :meth:`allocate` makes them."""
        self._config, self._num_slots, self._device = config, num_slots, device
        self.layers: list[LayerStates | None] = []

    def allocate(self) -> None:
        """Allocate the slots, empty, if there are none."""
        if not self.layers:
            self.layers = allocate_states(self._config, self._num_slots + 1, self._device)

    def drop(self) -> None:
        """Drop the slots with their content."""
        self.layers = []

    def plan(self, runs: Sequence[StateRun]) -> StatePlan:
        """Return the plan of a step that computes these runs, in this order."""
        lengths, read = [run.num_tokens for run in runs], [run.read for run in runs]
        return StatePlan.make(lengths, read, [run.written for run in runs], self.layers)

    def dummy_plan(self, lengths: Sequence[int]) -> StatePlan:
        """Return the plan of a step that computes runs of these lengths and changes no state of a request."""
        slot = self._num_slots
        # A decoded token reads a state, and all of them the same: what they compute is not used.
        read = [slot if length == 1 else FROM_ZERO for length in lengths]
        return StatePlan.make(lengths, read, [slot] * len(lengths), self.layers)
