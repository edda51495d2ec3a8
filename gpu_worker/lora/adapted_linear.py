"""Wraps linear layers, so that rows of a step get the change of the adapter that their request names."""

import ctypes
from collections.abc import Callable, Container, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from ..checkpoint.weights import LayerPart, Linear
from ..device.device_link import to_device
from ..kernels.library import LoraLayer, LoraPart, LoraRows
from ..kernels.threads import kernel_threads
from ..parallel.sharding import Dimension
from .adapter import Adapter, Matrices

if TYPE_CHECKING:  # engines without a GPU import none of it
    from ..layers.triton_linear import ExpertTiles


class AdaptedRows:
    """Holds the rows of a step that have an adapter, those of an adapter next to each other."""

    def __init__(self, slots: npt.NDArray[np.int32], num_slots: int) -> None:
        """``slots`` [T]: the slot of each row's adapter, below ``num_slots``; -1: it has none. At least
        one row has one."""
        # The kernel takes pointers to matrices from the slot's entry: one behind the last would be any memory.
        assert slots.max() < num_slots, f"a row names slot {slots.max()} of {num_slots}, which is not there"
        order = np.argsort(slots, kind="stable").astype(np.int32)
        first = int(np.count_nonzero(slots < 0))
        self._all_slots, self._num_slots = slots, num_slots
        self._indices: list[Tensor] | None = None  # of each group, on the device
        self._tiles: ExpertTiles | None = None
        self._rows = order[first:]
        self._slots, starts = np.unique(slots[self._rows], return_index=True)
        self._starts = np.append(starts, len(self._rows)).astype(np.int32)

    def fill(self, struct: LoraRows) -> None:
        """Describe the rows to kernels, as long as this object lives."""
        struct.rows, struct.starts = self._rows.ctypes.data, self._starts.ctypes.data
        struct.slots, struct.num_groups = self._slots.ctypes.data, len(self._slots)
        struct.num_threads = kernel_threads()

    def groups(self, device: torch.device, only: Container[int] | None = None) -> Iterator[tuple[int, Tensor]]:
        """Yield each slot, or those of ``only``, with the indices of its rows, int64 on ``device``."""
        if self._indices is None:  # one copy, for all layers, and for the next steps of the same requests
            rows = to_device(self._rows.astype(np.int64), device)
            self._indices = list(torch.split_with_sizes(rows, np.diff(self._starts).tolist()))
        for slot, indices in zip(self._slots.tolist(), self._indices, strict=True):
            if only is None or slot in only:
                yield slot, indices

    def tiles(self, device: torch.device) -> "ExpertTiles":
        """Return the rows by slots in tiles, for products on a GPU."""
        if self._tiles is None:
            from ..layers.triton_linear import ExpertTiles

            slots = to_device(self._all_slots.astype(np.int64)[:, None], device)
            counts = torch.zeros(self._num_slots, dtype=torch.int64, device=device)  # for the kernel, not read
            num_rows = torch.full((1,), len(slots), dtype=torch.int32, device=device)
            self._tiles = ExpertTiles.sort(slots, self._num_slots, counts, num_rows)
        return self._tiles


class GroupedChanges:
    """Holds what the adapters in all slots change in a layer, on a GPU: two products then change the rows of all of
    them."""

    # Products by adapter were 8 calls and a copy of indices for each of them in each layer: 4,096 calls and 512 copies
    # in a step of 32 layers with 4 adapters.
    def __init__(
        self, inputs: int, outputs: Sequence[int], max_loras: int, rank: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """``outputs``: of the parts of the layer; ``rank``: the largest of an adapter."""
        from ..layers.triton_linear import SlotMatrices

        self._outputs = outputs
        self._rank = -(-rank // _RANK_STEP) * _RANK_STEP
        ranks, total = self._rank * len(outputs), sum(outputs)
        # Each part has ranks of its own, so that all parts are one product; zeros lie in those of other parts.
        down = torch.zeros(max_loras, ranks, inputs, dtype=dtype, device=device)
        up = torch.zeros(max_loras, total, ranks, dtype=dtype, device=device)
        factors, shifts = torch.zeros(2, max_loras, total, dtype=torch.float32, device=device)
        self._changes = SlotMatrices(down, up, factors, shifts)

    def occupy(self, slot: int, matrices: Sequence[Matrices | None]) -> None:
        """Use these matrices, one or none for each part, for the rows of a slot."""
        down, up, factors, shifts = (each[slot] for each in self._changes)
        for each, value in ((down, 0.0), (up, 0.0), (factors, 1.0), (shifts, 0.0)):
            each.fill_(value)
        column = 0
        for index, (outputs, own) in enumerate(zip(self._outputs, matrices, strict=True)):
            columns = slice(column, column + outputs)
            column += outputs
            if own is None:
                continue
            ranks = slice(index * self._rank, index * self._rank + own.rank)
            down[ranks] = own.down[:, : own.rank].t()
            up[columns, ranks] = own.up.t()
            if own.factors is not None and own.shifts is not None:
                factors[columns], shifts[columns] = own.factors, own.shifts

    def add(self, x: Tensor, out: Tensor, rows: AdaptedRows) -> None:
        """Change the outputs of a layer [T, outputs] in place, of rows x [T, inputs]."""
        from ..layers.triton_linear import change_rows

        change_rows(x, out, self._changes, rows.tiles(x.device))


_RANK_STEP = 16
"""Ranks are padded to a multiple of it, so that rows of matrices begin at addresses that 16 divides."""

LoraKernel = Callable[..., None]
"""Is the function ``add_lora`` of ``lora.cpp``."""


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
    """Fulfils :class:`..checkpoint.weights.Linear`: what ``base`` computes, changed in rows that have an adapter."""

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
        self._replaced: set[int] = set()
        """Slots whose adapters have whole weights for this layer."""
        self._grouped: GroupedChanges | None = None
        self._parts = (LoraPart * (max_loras * len(names)))()
        is_bf16 = dtype == torch.bfloat16
        self._struct = LoraLayer(ctypes.addressof(self._parts), len(names), inputs, sum(outputs), is_bf16)
        self._at = ctypes.addressof(self._struct)

    def group(self, changes: GroupedChanges) -> None:
        """Let two products on a GPU change the rows of all adapters. Called before a slot is occupied."""
        self._grouped = changes

    # The function that loads a layer wraps it, because the names of the parts of a joined product are at hand there.
    # Sleep, new weights and every quantization then need no code for adapters, and without --enable-lora no layer is
    # wrapped.
    def __call__(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        out = self._base(x, dtype)
        if (rows := self._current.rows) is not None:
            if self._replaced:
                self._replace(x, out, rows)
            self._add(x, out, rows)
        return out

    def occupy(self, slot: int, adapter: Adapter | None, device: torch.device) -> None:
        """Use the matrices of an adapter for the rows of a slot, or none."""
        column = 0
        self._replaced.discard(slot)
        for index, (name, outputs) in enumerate(zip(self._names, self._outputs, strict=True)):
            found = adapter.layers.get(name) if adapter is not None else None
            keeps = found is not None and (self._grouped is None or found.weight is not None)
            matrices = self._matrices[slot][index] = found.to(device) if found is not None and keeps else None
            part = LoraPart(outputs=outputs, column=column)
            if matrices is not None:
                tensors = (matrices.down, matrices.up, matrices.factors, matrices.shifts)
                reads = self._kernel is not None  # a kernel of the host reads those of the host
                addresses = [each.data_ptr() if reads and each is not None else None for each in tensors]
                part = LoraPart(*addresses, matrices.rank, column, outputs)
                if matrices.weight is not None:
                    self._replaced.add(slot)
            self._parts[slot * len(self._names) + index] = part
            column += outputs
        if self._grouped is not None:
            self._grouped.occupy(slot, [None if adapter is None else adapter.layers.get(each) for each in self._names])

    def _replace(self, x: Tensor, out: Tensor, rows: AdaptedRows) -> None:
        """Compute the rows of adapters that have whole weights with these."""
        for slot, indices in rows.groups(x.device, self._replaced):
            column = 0
            for outputs, matrices in zip(self._outputs, self._matrices[slot], strict=True):
                if matrices is not None and matrices.weight is not None:
                    computed = F.linear(x[indices], matrices.weight)
                    out[indices, column : column + outputs] = computed.to(out.dtype)
                column += outputs

    def _add(self, x: Tensor, out: Tensor, rows: AdaptedRows) -> None:
        if self._grouped is not None:
            self._grouped.add(x, out, rows)
            return
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
                    columns = slice(column, column + outputs)
                    change = x[indices] @ matrices.down[:, : matrices.rank] @ matrices.up
                    changed = out[indices, columns] + change.to(out.dtype)
                    if matrices.factors is not None and matrices.shifts is not None:
                        changed = changed * matrices.factors + matrices.shifts
                    out[indices, columns] = changed.to(out.dtype)
                column += outputs


class AdaptedMatrix:
    """Fulfils :class:`..checkpoint.weights.MatrixChanges`."""

    def __init__(self, name: str, current: CurrentRows) -> None:
        self._name = name
        self._current = current
        self._changes: dict[int, Matrices] = {}
        """By slot."""

    def occupy(self, slot: int, adapter: Adapter | None, device: torch.device) -> None:
        """Use the matrices of an adapter for the rows of a slot, or none."""
        found = adapter.layers.get(self._name) if adapter is not None else None
        self._changes.pop(slot, None)
        if found is not None:
            self._changes[slot] = found.to(device)

    def groups(self, device: torch.device) -> list[tuple[Matrices, Tensor]]:
        if not self._changes or (rows := self._current.rows) is None:
            return []
        return [(self._changes[slot], indices) for slot, indices in rows.groups(device, self._changes)]


class ExpertLayer(NamedTuple):
    """Describes a layer of an expert: what wraps it when an adapter changes it."""

    parts: Sequence[LayerPart]
    inputs: Dimension
    dtype: torch.dtype

    def of_expert(self, own: str, other: str) -> "ExpertLayer":
        """Return the same layer of another expert, whose names begin with ``other`` where these do with ``own``."""
        parts = [
            part._replace(name=part.name.replace(own, other), stored=part.stored.replace(own, other))
            for part in self.parts
        ]
        return self._replace(parts=parts)


class ExpertSlots:
    """Fulfils :class:`..checkpoint.weights.ExpertAdapters`."""

    def __init__(self, max_loras: int, register: Callable[[LoraLinear], LoraLinear]) -> None:
        """``register`` lets adapters of slots change a layer."""
        self._max_loras = max_loras
        self._register = register
        self._layers: dict[str, dict[str, tuple[ExpertLayer, Callable[..., LoraLinear]]]] = {}
        """The layers of an expert and what wraps them, by its name and that of the layer."""
        self._changed: dict[int, frozenset[str]] = {}
        """By slot: below which names its adapter changes experts."""
        self._of_tokens: npt.NDArray[np.int32] | None = None
        self._rows = CurrentRows()

    def add(self, layer: ExpertLayer, make: Callable[..., LoraLinear]) -> None:
        """Note how to wrap a layer of an expert."""
        name = layer.parts[0].name
        self._layers.setdefault(name.rpartition(".")[0], {})[name] = layer, make

    def missing(self, prefix: str, count: int) -> Iterator[ExpertLayer]:
        """Yield the layers of those of ``count`` experts below ``prefix`` that were not added: they are as those of
        one that was. Raises ``ValueError`` if none was."""
        known = next((number for number in range(count) if f"{prefix}.{number}" in self._layers), None)
        if known is None:
            raise ValueError(
                f"enable_lora: this worker has none of the {count} experts, whose shapes adapters need: let at most "
                f"{count} workers share them"
            )
        layers = [layer for layer, _ in self._layers[f"{prefix}.{known}"].values()]
        for number in range(count):
            if f"{prefix}.{number}" not in self._layers:
                yield from (layer.of_expert(f"{prefix}.{known}.", f"{prefix}.{number}.") for layer in layers)

    def fill(self, slot: int, adapter: Adapter | None) -> None:
        """Use the matrices of an adapter for the rows of a slot, or none."""
        names = () if adapter is None else (name for name in adapter.layers if ".experts." in name)
        self._changed.pop(slot, None)
        if prefixes := frozenset(f"{name.partition('.experts.')[0]}.experts" for name in names):
            self._changed[slot] = prefixes

    @property
    def are_changed(self) -> bool:
        """Whether the adapter in a slot changes experts."""
        return bool(self._changed)

    def begin(self, of_requests: list[int], cu_query_lens: npt.NDArray[np.int32]) -> None:
        """Begin a step of requests that have these slots."""
        self._of_tokens = np.repeat(np.array(of_requests, dtype=np.int32), np.diff(cu_query_lens))

    def end(self) -> None:
        """Forget the rows of the step."""
        self._of_tokens = None

    def slots_of(self, prefix: str) -> npt.NDArray[np.int32] | None:
        if self._of_tokens is None:
            return None
        slots = [slot for slot, prefixes in self._changed.items() if prefix in prefixes]
        found = np.where(np.isin(self._of_tokens, slots), self._of_tokens, np.int32(-1))
        return found if found.max() >= 0 else None

    def wrap(self, prefix: str, layers: Sequence[Linear]) -> list[Linear]:
        makers = [make for _, make in self._layers[prefix].values()]
        return [self._register(make(base, current=self._rows)) for base, make in zip(layers, makers, strict=True)]

    def take(self, slots: npt.NDArray[np.int32] | None) -> None:
        self._rows.rows = None
        if slots is not None:
            self._rows.set(AdaptedRows(slots, self._max_loras))
