"""Wraps linear layers, so that rows of a step get the change of the adapter that their request names, and keeps
adapters in host memory, and those of running requests in slots of the model's layers."""

import ctypes
import re
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tokenloom.engine_core.data.config import LoraConfig
from tokenloom.engine_core.data.lora import LoraInfo

from ..batch.input_batch import StepInputs
from ..checkpoint.weights import LayerPart, Linear
from ..kernels.compiler import KernelsUnavailable, warn_unavailable
from ..kernels.library import LoraLayer, LoraPart, LoraRows, load_lora
from ..kernels.threads import kernel_threads
from ..parallel.sharding import Dimension, length, total
from .adapter import Adapter, Layout, Matrices, layer_name, read_adapter


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


_KINDS = frozenset(
    [f"{kind}_proj" for kind in ("q", "k", "v", "o", "qkv", "gate", "up", "gate_up", "down", "in", "out")]
    + [f"in_proj_{kind}" for kind in ("qkv", "z", "a", "b")]
)
"""The last parts of the names of layers that may have an adapter."""
_LAYER = re.compile(r"\.layers\.(\d+)\.")


class LoraSlots:
    """Holds the adapters of one model. The core decides which of them occupy slots."""

    def __init__(self, config: LoraConfig, device: torch.device) -> None:
        self._config = config
        self._device = device
        self._kernel, self._layout = _load_kernel(device)
        self._current = CurrentRows()
        self._shapes: dict[str, tuple[int, int]] = {}
        self._parts: dict[str, dict[str, LayerPart]] = {}
        """As :func:`.adapter.read_adapter` takes them."""
        # Without references of its own: layers that the model drops give their weights back.
        self._layers: weakref.WeakValueDictionary[str, LoraLinear] = weakref.WeakValueDictionary()
        self._adapters: dict[bytes, Adapter] = {}
        self._slots: list[bytes] = [b""] * config.max_loras
        """The digest of the adapter in each slot; empty: none."""
        self._dtype = torch.float32  # of the model's activations
        self._num_layers, self._own = 0, range(0)
        self._grouped: tuple[list[int], bytes, AdaptedRows] | None = None

    def adapt(self, base: Linear, parts: Sequence[LayerPart], inputs: Dimension, dtype: torch.dtype) -> Linear:
        """Wrap a layer of the model, if adapters may change it (fulfils :data:`..checkpoint.weights.Adapt`)."""
        names, outputs = [part.name for part in parts], [part.outputs for part in parts]
        if any(name.rpartition(".")[2] not in _KINDS or ".experts." in name for name in names):
            return base
        own, slots = length(inputs), len(self._slots)
        layer = LoraLinear(base, names, own, outputs, slots, self._current, self._kernel, dtype)
        self._dtype = dtype
        for part in parts:
            stored = layer_name(part.stored)
            self._shapes[stored] = (part.total, total(inputs))
            self._parts.setdefault(stored, {})[part.name] = part
        self._layers[names[0]] = layer
        for slot, digest in enumerate(self._slots):
            if digest:
                layer.occupy(slot, self._adapters[digest], self._device)
        return layer

    def check_model(self, num_layers: int, own: range) -> None:
        """Raise ``ValueError`` if no layer of the model that was loaded can have an adapter. ``num_layers``: those of
        all stages; 0: this rank has them all. ``own``: those of this stage, by their numbers in the model."""
        self._num_layers, self._own = num_layers, own
        if not self._shapes:
            raise ValueError(
                "enable_lora: no layer of this model can have an adapter; its architecture is not supported"
            )

    def load(self, path: Path) -> LoraInfo:
        """Keep an adapter in host memory. Raises ``ValueError`` naming what is wrong or not supported."""
        rank, dtype, layout = self._config.max_lora_rank, self._dtype, self._layout
        adapter = read_adapter(path, self._shapes, rank, dtype, layout, self._parts, self._is_elsewhere)
        self._adapters.setdefault(adapter.digest, adapter)
        return LoraInfo(adapter.digest, adapter.rank)

    def _is_elsewhere(self, name: str) -> bool:
        """Return whether another stage of the pipeline computes a layer of this name."""
        found = _LAYER.search(name)
        return found is not None and int(found[1]) not in self._own and int(found[1]) < self._num_layers

    def drop(self, digest: bytes) -> None:
        """Forget an adapter, which no request names any more."""
        self.occupy([each for each in self._slots if each and each != digest])
        self._adapters.pop(digest, None)

    def occupy(self, digests: Sequence[bytes]) -> None:
        """Let these adapters, and no others, be in slots: at most as many as there are."""
        for slot, digest in enumerate(self._slots):
            if digest and digest not in digests:
                self._fill(slot, b"")
        for digest in digests:
            if digest not in self._slots:
                self._fill(self._slots.index(b""), digest)

    def begin(self, adapters: Mapping[int, bytes], inputs: StepInputs) -> None:
        """Prepare a step. ``adapters``: the digests by rows of the batch, of those requests that have one."""
        self._current.rows = None
        if not adapters:
            return
        number = {digest: slot for slot, digest in enumerate(self._slots) if digest}
        of_requests = [number[adapters[row]] if row in adapters else -1 for row in inputs.rows.tolist()]
        if max(of_requests) >= 0:
            self._current.set(self._group(of_requests, inputs.cu_query_lens))

    @property
    def are_used(self) -> bool:
        """Whether a row of the step in work has an adapter."""
        return self._current.rows is not None

    def end(self) -> None:
        """Forget the rows of the step: what is computed next has no adapter."""
        self._current.rows = None

    def _group(self, of_requests: list[int], cu_query_lens: npt.NDArray[np.int32]) -> AdaptedRows:
        """Return the rows by slots; while the same requests decode, those of the step before."""
        lengths = cu_query_lens.tobytes()
        if self._grouped is None or self._grouped[:2] != (of_requests, lengths):
            slots = np.repeat(np.array(of_requests, dtype=np.int32), np.diff(cu_query_lens))
            self._grouped = of_requests, lengths, AdaptedRows(slots, len(self._slots))
        return self._grouped[2]

    def _fill(self, slot: int, digest: bytes) -> None:
        self._slots[slot] = digest
        adapter = self._adapters[digest] if digest else None
        for layer in self._layers.values():
            layer.occupy(slot, adapter, self._device)


def _load_kernel(device: torch.device) -> tuple[LoraKernel | None, Layout]:
    """Return the kernel, if there is one, and how it reads matrices."""
    if device.type != "cpu":
        return None, Layout()
    try:
        library = load_lora()
    except KernelsUnavailable as error:
        warn_unavailable(f"LoRA adapters: {error}")
        return None, Layout()
    return library.add_lora, Layout(library.rank_step(), library.panel_outputs())
