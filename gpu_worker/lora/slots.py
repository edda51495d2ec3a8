"""Keeps adapters in host memory, and those of running requests in slots of the model's layers."""

import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from tokenloom.engine_core.data.config import LoraConfig
from tokenloom.engine_core.data.lora import LoraInfo

from ..batch.input_batch import StepInputs
from ..checkpoint.weights import Linear
from ..kernels.compiler import KernelsUnavailable
from ..kernels.library import load_lora, warn_unavailable
from .adapter import Adapter, Layout, read_adapter
from .layers import AdaptedRows, CurrentRows, LoraKernel, LoraLinear

_KINDS = frozenset(f"{kind}_proj" for kind in ("q", "k", "v", "o", "qkv", "gate", "up", "gate_up", "down"))
"""The last parts of the names of layers that may have an adapter."""


class LoraSlots:
    """Holds the adapters of one model. The core decides which of them occupy slots."""

    def __init__(self, config: LoraConfig, device: torch.device) -> None:
        self._config = config
        self._device = device
        self._kernel, self._layout = _load_kernel(device)
        self._current = CurrentRows()
        self._shapes: dict[str, tuple[int, int]] = {}
        # Without references of its own: layers that the model drops give their weights back.
        self._layers: weakref.WeakValueDictionary[str, LoraLinear] = weakref.WeakValueDictionary()
        self._adapters: dict[bytes, Adapter] = {}
        self._slots: list[bytes] = [b""] * config.max_loras
        """The digest of the adapter in each slot; empty: none."""
        self._dtype = torch.float32  # of the model's activations
        self._grouped: tuple[list[int], bytes, AdaptedRows] | None = None

    def adapt(
        self, base: Linear, names: Sequence[str], inputs: int, outputs: Sequence[int], dtype: torch.dtype
    ) -> Linear:
        """Wrap a layer of the model, if adapters may change it (fulfils :data:`..layers.interface.Adapt`)."""
        if any(name.rpartition(".")[2] not in _KINDS or ".experts." in name for name in names):
            return base
        layer = LoraLinear(base, names, inputs, outputs, len(self._slots), self._current, self._kernel, dtype)
        self._dtype = dtype
        self._shapes.update((name, (rows, inputs)) for name, rows in zip(names, outputs, strict=True))
        self._layers[names[0]] = layer
        for slot, digest in enumerate(self._slots):
            if digest:
                layer.occupy(slot, self._adapters[digest], self._device)
        return layer

    def check_model(self) -> None:
        """Raise ``ValueError`` if no layer of the model that was loaded can have an adapter."""
        if not self._shapes:
            raise ValueError(
                "enable_lora: no layer of this model can have an adapter; its architecture is not supported"
            )

    def load(self, path: Path) -> LoraInfo:
        """Keep an adapter in host memory. Raises ``ValueError`` naming what is wrong or not supported."""
        adapter = read_adapter(path, self._shapes, self._config.max_lora_rank, self._dtype, self._layout)
        self._adapters.setdefault(adapter.digest, adapter)
        return LoraInfo(adapter.digest, adapter.rank)

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
