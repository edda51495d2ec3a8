"""Keeps LoRA adapters in host memory, and those of running requests in slots of the model's layers."""

import functools
import re
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tokenloom.engine_core.data.config import LoraConfig
from tokenloom.engine_core.data.lora import LoraInfo, adapter_size

from ..batch.input_batch import StepInputs
from ..batch.prompt_rows import TokenRows
from ..checkpoint.local_config import NO_ADAPTERS
from ..checkpoint.model_config import ModelConfig
from ..checkpoint.weights import LayerPart, Linear
from ..kernels.compiler import KernelsUnavailable, warn_unavailable
from ..kernels.library import load_lora, uses_triton
from ..parallel.sharding import Dimension, length, total
from .adapted_linear import (
    AdaptedMatrix,
    AdaptedRows,
    CurrentRows,
    ExpertLayer,
    ExpertSlots,
    GroupedChanges,
    LoraKernel,
    LoraLinear,
)
from .adapter import AdaptedModel, Adapter, Layout, Matrices, ReadBase, is_without_kernel, make_adapter, read_adapter
from .stored_changes import CLASSES, EMBEDDINGS, EXPERT, OUTPUT, layer_name

_KINDS = frozenset(
    [f"{kind}_proj" for kind in ("q", "k", "v", "o", "qkv", "gate", "up", "gate_up", "down", "in", "out")]
    + [f"in_proj_{kind}" for kind in ("qkv", "z", "a", "b")]
    + ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa"]  # of compressed vectors
    + [f"{kind}_proj" for kind in ("f_a", "f_b", "g_a", "g_b", "b")]  # of Kimi-Linear
    + ["gate", "router", "shared_expert_gate", OUTPUT]
)
"""The last parts of the names of layers that may have an adapter."""
Occupied = TypeVar("Occupied", LoraLinear, AdaptedMatrix)
_LAYER = re.compile(r"\.(?:layers|h)\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """Describes the model that was loaded, beside its layers."""

    config: ModelConfig
    embed: Callable[[Tensor], Tensor] | None
    """Returns the states [T, hidden_size] with which tokens [T] begin; None: not on this rank, or not as rows of one
    matrix times a factor."""
    num_classes: int
    """Of a head that this rank has; 0: it has none."""
    read_base: ReadBase
    """Opens the files of its own weights."""
    reads_media: bool = False
    """Whether prompts may have images or sounds."""
    names: Mapping[str, str] = field(default_factory=dict)
    """As of :class:`.adapter.AdaptedModel`."""


class LoraSlots:
    """Holds the adapters of one model. The core decides which of them occupy slots."""

    def __init__(self, config: LoraConfig, device: torch.device) -> None:
        self._config = config
        self._device = device
        self._kernel, self._layout = _load_kernel(device)
        self._is_grouped = uses_triton(device)
        self._current = CurrentRows()
        self._shapes: dict[str, tuple[int, int]] = {}
        self._parts: dict[str, dict[str, LayerPart]] = {}
        """As :func:`.adapter.read_adapter` takes them."""
        # Without references of its own: layers that the model drops give their weights back.
        # Not by name: copies of an expert on this rank have one name.
        self._layers: weakref.WeakSet[LoraLinear | AdaptedMatrix] = weakref.WeakSet()
        self._adapters: dict[bytes, Adapter] = {}
        self._slots: list[bytes] = [b""] * config.max_loras
        """The digest of the adapter in each slot; empty: none."""
        self._dtype = torch.float32  # of the model's activations
        self._model: LoadedModel | None = None
        self._grouped: tuple[list[int], bytes, AdaptedRows] | None = None
        self._special: set[int] = set()
        """Slots whose adapters are not plain."""
        self._of_requests: list[int] = []
        """The slot of each request of the step in work; -1: it has no adapter."""
        self._picked = CurrentRows()
        """Those of the rows whose logits are computed."""
        # On a GPU tokens may be known to the device alone, and its steps pick the rows themselves.
        self._computes_apart = device.type == "cpu"
        self.experts = ExpertSlots(config.max_loras, self._register)

    def __call__(self, base: Linear, parts: Sequence[LayerPart], inputs: Dimension, dtype: torch.dtype) -> Linear:
        """Wrap a layer of the model, if adapters may change it (fulfils :class:`..checkpoint.weights.Adapt`)."""
        if any(part.name.rpartition(".")[2] not in _KINDS and ".experts." not in part.name for part in parts):
            return base
        return self.wrap(base, parts, inputs, dtype)

    def wrap(self, base: Linear, parts: Sequence[LayerPart], inputs: Dimension, dtype: torch.dtype) -> Linear:
        name = parts[0].name
        if ".experts." in name:
            self._add_expert_layer(ExpertLayer(parts, inputs, dtype))
            return base
        if name == OUTPUT and not self._computes_apart:
            return base
        self._note(parts, inputs, dtype)
        current = self._picked if name == OUTPUT else self._current
        layer = self._maker(parts, inputs, dtype)(base, current=current)
        if self._is_grouped and not is_without_kernel(name):
            own, outputs, slots = length(inputs), [part.outputs for part in parts], len(self._slots)
            layer.group(GroupedChanges(own, outputs, slots, self._config.max_lora_rank, dtype, self._device))
        return self._register(layer)

    def spread(self, prefix: str, count: int) -> None:
        for layer in self.experts.missing(prefix, count):
            self._add_expert_layer(layer)

    def _add_expert_layer(self, layer: ExpertLayer) -> None:
        self._note(*layer)
        self.experts.add(layer, self._maker(*layer))

    def _maker(self, parts: Sequence[LayerPart], inputs: Dimension, dtype: torch.dtype) -> Callable[..., LoraLinear]:
        """Return what wraps a layer, given that and the rows of a step that have adapters (``current``)."""
        return functools.partial(
            LoraLinear,
            names=[part.name for part in parts],
            inputs=length(inputs),
            outputs=[part.outputs for part in parts],
            max_loras=len(self._slots),
            kernel=None if is_without_kernel(parts[0].name) else self._kernel,
            dtype=dtype,
        )

    def matrix(self, part: LayerPart, inputs: Dimension, dtype: torch.dtype) -> AdaptedMatrix:
        self._note([part], inputs, dtype)
        return self._register(AdaptedMatrix(part.name, self._current))

    def _note(self, parts: Sequence[LayerPart], inputs: Dimension, dtype: torch.dtype) -> None:
        """Accept adapters of these parts."""
        self._dtype = dtype
        for part in parts:
            stored = layer_name(part.stored)
            self._shapes[stored] = (part.total, total(inputs))
            self._parts.setdefault(stored, {})[part.name] = part

    def _register(self, layer: Occupied) -> Occupied:
        """Let adapters of slots change a layer."""
        self._layers.add(layer)
        for slot, digest in enumerate(self._slots):
            if digest:
                layer.occupy(slot, self._adapters[digest], self._device)
        return layer

    def check_model(self, model: "LoadedModel") -> None:
        """Raise ``ValueError`` if no layer of the model that was loaded can have an adapter."""
        if not self._shapes:
            raise ValueError(f"{NO_ADAPTERS}; its architecture is not supported")
        self._model = model
        if not self._computes_apart:
            return
        if model.embed is not None:
            self._shapes[EMBEDDINGS] = (model.config.hidden_size, model.config.vocab_size)
        if model.num_classes:
            self._shapes[CLASSES] = (model.num_classes, model.config.hidden_size)

    def reserved_bytes(self) -> int:
        """Return what adapters will take of the model's device: on a host those that are named at the start, whose size
        their files show; elsewhere an adapter of the largest rank in every slot, as far as layers have not taken that,
        and the largest whole layers of those that are named."""
        named = [adapter_size(Path(path)) for _, path in self._config.named_paths()]
        if self._device.type == "cpu":
            return sum(size.nbytes * (1 + size.keeps_files) for size in named)  # the files beside what is made of them
        rank, itemsize = self._config.max_lora_rank, self._dtype.itemsize
        numbers = 0
        for stored, parts in self._parts.items():
            for part in parts.values():
                if self._is_grouped and not (is_without_kernel(part.name) or ".experts." in part.name):
                    continue  # the layer has taken it already
                inputs = self._shapes[stored][1] if part.columns is None else len(part.columns)
                numbers += (inputs + part.outputs) * rank
        layers = sorted((size.nbytes for size in named if size.has_layers), reverse=True)
        return self._config.max_loras * numbers * itemsize + sum(layers[: self._config.max_loras])

    def load(self, path: Path) -> LoraInfo:
        """Keep an adapter in host memory. Raises ``ValueError`` naming what is wrong or not supported."""
        adapter = read_adapter(path, self._adapted_model(), self._config.max_lora_rank)
        self._adapters.setdefault(adapter.digest, adapter)
        return LoraInfo(adapter.digest, adapter.rank)

    def weights_replaced(self) -> None:
        """Make the adapters again that depend on the model's own weights, which are others now. Raises ``ValueError``
        if one cannot be made."""
        for digest, adapter in self._adapters.items():
            if adapter.files is not None:
                self._adapters[digest] = make_adapter(adapter.files, self._adapted_model(), self._config.max_lora_rank)
        for slot, digest in enumerate(self._slots):
            self._fill(slot, digest)

    @property
    def adapters(self) -> Mapping[bytes, Adapter]:
        """The adapters in host memory, by their digests."""
        return self._adapters

    def _adapted_model(self) -> AdaptedModel:
        assert self._model is not None, "check_model comes first"
        config = self._model.config
        return AdaptedModel(
            self._shapes,
            self._dtype,
            self._layout,
            self._parts,
            self._is_elsewhere,
            is_tied=config.tie_word_embeddings,
            num_experts=config.experts.count if config.experts is not None else 0,
            experts_take_turns=config.family == "gpt_oss",
            reads_media=self._model.reads_media,
            read_base=self._model.read_base,
            names=self._model.names,
        )

    def _is_elsewhere(self, name: str) -> bool:
        """Return whether another rank computes a layer of this name, and this one does not."""
        assert self._model is not None
        config = self._model.config
        if name in (EMBEDDINGS, OUTPUT):
            is_first = not config.layers_of_model or config.first_layer == 0
            is_here = is_first if name == EMBEDDINGS else config.computes_logits or not config.has_output
            return self._computes_apart and name not in self._shapes and not is_here
        layer = _LAYER.search(name)
        if layer is not None and int(layer[1]) not in config.own_layers and int(layer[1]) < config.layers_of_model:
            return True
        if name in self._shapes or config.experts is None or config.experts.own is None:
            return False
        expert = EXPERT.fullmatch(name)
        return expert is not None and int(expert[2]) not in config.experts.own and int(expert[2]) < config.experts.count

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
        self._of_requests = [number[adapters[row]] if row in adapters else -1 for row in inputs.rows.tolist()]
        if max(self._of_requests) >= 0:
            self._current.set(self._group(self._of_requests, inputs.cu_query_lens))
            if self.experts.are_changed:
                self.experts.begin(self._of_requests, inputs.cu_query_lens)

    @property
    def are_used(self) -> bool:
        """Whether a row of the current step has an adapter."""
        return self._current.rows is not None

    @property
    def are_plain(self) -> bool:
        """Whether recordings of steps include all that the adapters of the current step change. Otherwise the step
        takes :meth:`embeds`, and calls :meth:`pick` before logits are computed."""
        return not self._special or self._special.isdisjoint(self._of_requests) or not self.are_used

    @contextmanager
    def all_adapted(self, num_rows: int) -> Iterator[None]:
        """Let all rows of what is computed meanwhile have the adapter of the first slot, which may be empty."""
        self._current.set(AdaptedRows(np.zeros(num_rows, dtype=np.int32), len(self._slots)))
        try:
            yield
        finally:
            self._current.rows = None

    def end(self) -> None:
        """Forget the rows of the step: what is computed next has no adapter."""
        self._current.rows = self._picked.rows = None
        self.experts.end()

    def embeds(self, inputs: StepInputs) -> list[TokenRows]:
        """Return the embeddings of tokens whose adapters change them, for the step in work."""
        found: list[TokenRows] = []
        for index, slot in enumerate(self._of_requests):
            change = None if slot < 0 else self.change(self._slots[slot], EMBEDDINGS)
            if change is not None:
                begin, end = inputs.cu_query_lens[index : index + 2].tolist()
                ids = torch.from_numpy(inputs.token_ids[begin:end].astype(np.int64))
                found.append(TokenRows(begin, self._embedded(change, ids).float().numpy()))
        return found

    def pick(self, rows: npt.NDArray[np.integer] | None, inputs: StepInputs) -> None:
        """Say which rows of the step in work the output layer computes next; None: all of them."""
        slots = np.repeat(np.array(self._of_requests, dtype=np.int32), np.diff(inputs.cu_query_lens))
        slots = slots if rows is None else slots[rows]
        self._picked.rows = None
        if slots.max(initial=-1) >= 0:
            self._picked.set(AdaptedRows(slots, len(self._slots)))

    def logits(self, digest: bytes, compute: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        """Return what computes the logits of rows that all have this adapter, as ``compute`` does of those that have
        none."""
        if self.change(digest, OUTPUT) is None:
            return compute
        slot = self._slots.index(digest)

        def adapted(hidden: Tensor) -> Tensor:
            self._picked.set(AdaptedRows(np.full(len(hidden), slot, dtype=np.int32), len(self._slots)))
            try:
                return compute(hidden)
            finally:
                self._picked.rows = None

        return adapted

    def change(self, digest: bytes, name: str) -> Matrices | None:
        """Return what an adapter changes in one of the model's layers; None: nothing."""
        return self._adapters[digest].layers.get(name)

    def _embedded(self, change: Matrices, ids: Tensor) -> Tensor:
        assert self._model is not None
        assert self._model.embed is not None
        scale = self._model.config.embedding_scale
        with torch.inference_mode():
            rows = self._model.embed(ids) if change.weight is None else change.weight[ids] * scale
            return rows + change.down[ids] @ change.up * scale if change.rank else rows

    def _group(self, of_requests: list[int], cu_query_lens: npt.NDArray[np.int32]) -> AdaptedRows:
        """Return the rows by slots; while the same requests decode, those of the step before."""
        lengths = cu_query_lens.tobytes()
        if self._grouped is None or self._grouped[:2] != (of_requests, lengths):
            slots = np.repeat(np.array(of_requests, dtype=np.int32), np.diff(cu_query_lens))
            self._grouped = of_requests, lengths, AdaptedRows(slots, len(self._slots))
        return self._grouped[2]

    def _fill(self, slot: int, digest: bytes) -> None:
        self._slots[slot] = b""
        adapter = self._adapters[digest] if digest else None
        self._special.discard(slot)
        if adapter is not None and not adapter.is_plain:
            self._special.add(slot)
        self.experts.fill(slot, adapter)
        for layer in self._layers:
            layer.occupy(slot, adapter, self._device)
        self._slots[slot] = digest  # only now: a slot that could not be filled is filled again


def _load_kernel(device: torch.device) -> tuple[LoraKernel | None, Layout]:
    """Return the kernel, if there is one, and how it reads matrices."""
    if device.type != "cpu" or uses_triton(device):
        return None, Layout()
    try:
        library = load_lora()
    except KernelsUnavailable as error:
        warn_unavailable(f"LoRA adapters: {error}")
        return None, Layout()
    return library.add_lora, Layout(library.rank_step(), library.panel_outputs())
