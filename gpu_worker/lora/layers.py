"""Wraps linear layers, so that rows of a step get the change of the adapter that their request names."""

import ctypes
from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..checkpoint.weights import Linear
from ..kernels.library import LoraLayer, LoraPart, LoraRows
from ..kernels.threads import kernel_threads
from .adapter import Adapter, Matrices


class AdaptedRows:
    """Holds the rows of a step that have an adapter, those of an adapter next to each other."""

    def __init__(self, slots: npt.NDArray[np.int32], num_slots: int) -> None:
        """``slots`` [T]: the slot of each row's adapter, below ``num_slots``; -1: it has none. At least
        one row has one."""
        # The kernel takes pointers to matrices from the slot's entry: one behind the last would be any memory.
        assert slots.max() < num_slots, f"a row names slot {slots.max()} of {num_slots}, which is not there"
        order = np.argsort(slots, kind="stable").astype(np.int32)
        first = int(np.count_nonzero(slots < 0))
        self._rows = order[first:]
        self._slots, starts = np.unique(slots[self._rows], return_index=True)
        self._starts = np.append(starts, len(self._rows)).astype(np.int32)

    def fill(self, struct: LoraRows) -> None:
        """Describe the rows to kernels, as long as this object lives."""
        struct.rows, struct.starts = self._rows.ctypes.data, self._starts.ctypes.data
        struct.slots, struct.num_groups = self._slots.ctypes.data, len(self._slots)
        struct.num_threads = kernel_threads()

    def groups(self, device: torch.device) -> Iterator[tuple[int, Tensor]]:
        """Yield each slot with the indices of its rows, int64 on ``device``."""
        for index, slot in enumerate(self._slots.tolist()):
            rows = self._rows[self._starts[index] : self._starts[index + 1]]
            yield slot, torch.from_numpy(rows.astype(np.int64)).to(device)


class LoraKernel(Protocol):
    """Is the function ``add_lora`` of ``lora.cpp``."""

    def __call__(self, *args: object) -> None: ...


class CurrentRows:
    """Holds which rows of the step in work have an adapter.

    Attributes:
        rows: None if no row has one.
        at: The address of the struct that describes them to kernels, the same for every step: recorded steps read it.
    """

    def __init__(self) -> None:
        self.rows: AdaptedRows | None = None
        self._struct = LoraRows()
        self.at = ctypes.addressof(self._struct)

    def set(self, rows: AdaptedRows) -> None:
        """Begin a step with these rows."""
        self.rows = rows
        rows.fill(self._struct)


class LoraLinear:
    """Fulfils :class:`..layers.interface.Linear`: what ``base`` computes, changed in the rows that have an adapter."""

    def __init__(
        self,
        base: Linear,
        names: Sequence[str],
        inputs: int,
        outputs: Sequence[int],
        max_loras: int,
        current: CurrentRows,
        kernel: LoraKernel | None,
        dtype: torch.dtype,
    ) -> None:
        """``names`` and ``outputs``: of the parts, whose outputs lie next to each other. ``kernel``: None where torch
        computes the products. ``dtype``: of inputs and outputs."""
        self._base = base
        self._names = names
        self._outputs = outputs
        self._current = current
        self._kernel = kernel
        self._matrices: list[list[Matrices | None]] = [[None] * len(names) for _ in range(max_loras)]
        self._parts = (LoraPart * (max_loras * len(names)))()
        is_bf16 = dtype == torch.bfloat16
        self._struct = LoraLayer(ctypes.addressof(self._parts), len(names), inputs, sum(outputs), is_bf16)
        self._at = ctypes.addressof(self._struct)

    # The function that loads a layer wraps it, because it knows the names of the parts of a joined product. Sleep, new
    # weights and every quantization then need no code for adapters, and without --enable-lora no layer is wrapped.
    def __call__(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        out = self._base(x, dtype)
        if (rows := self._current.rows) is not None:
            self._add(x, out, rows)
        return out

    def occupy(self, slot: int, adapter: Adapter | None, device: torch.device) -> None:
        """Use the matrices of an adapter for the rows of a slot, or none."""
        column = 0
        for index, (name, outputs) in enumerate(zip(self._names, self._outputs, strict=True)):
            found = adapter.layers.get(name) if adapter is not None else None
            matrices = self._matrices[slot][index] = None if found is None else found.to(device)
            part = LoraPart(outputs=outputs, column=column)
            if matrices is not None:
                part = LoraPart(matrices.down.data_ptr(), matrices.up.data_ptr(), matrices.rank, column, outputs)
            self._parts[slot * len(self._names) + index] = part
            column += outputs

    def _add(self, x: Tensor, out: Tensor, rows: AdaptedRows) -> None:
        if self._kernel is None:
            self._add_with_torch(x, out, rows)
            return
        x = x.contiguous()
        self._kernel(x.data_ptr(), out.data_ptr(), self._current.at, self._at)

    def _add_with_torch(self, x: Tensor, out: Tensor, rows: AdaptedRows) -> None:
        for slot, indices in rows.groups(x.device):
            column = 0
            for outputs, matrices in zip(self._outputs, self._matrices[slot], strict=True):
                if matrices is not None:
                    change = x[indices] @ matrices.down[:, : matrices.rank] @ matrices.up
                    out[indices, column : column + outputs] += change.to(out.dtype)
                column += outputs
