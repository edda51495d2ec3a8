"""Holds what LoRA adapters change in the layers of a model, arranged as the products read it."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from tokenloom.engine_core.data.lora import WEIGHTS, AdapterFiles, read_adapter_files

from ..checkpoint.weights import Checkpoint, LayerPart
from ..parallel.sharding import ShardedDimension
from .stored_changes import (
    CLASSES,
    EMBEDDINGS,
    OUTPUT,
    TIED,
    StoredChange,
    layer_name,
    read_changes,
    split_experts,
)

ReadBase = Callable[[], AbstractContextManager[Checkpoint]]
"""Opens the files of the model's own weights. Raises ``ValueError`` if they are others than were loaded."""
_AT_ONCE = 1 << 22
"""About how many weights are float32 at a time while the norms of their rows are computed."""
APART: Final = frozenset({EMBEDDINGS, OUTPUT, CLASSES})
"""The layers whose rows are not those of the step's tokens, or that read no states."""
_BEHIND_LATENTS: Final = ".kv_b_proj"
"""Ends the name of the matrix from compressed vectors to keys and values."""
_ROW_STEP = 64
"""Rows of weights in few bits are unpacked in multiples of it."""


@dataclass(frozen=True, slots=True)
class Matrices:
    """Holds the change of one layer: what it computes becomes (that + x · down · up) · factors + shifts.

    Of embeddings x is a row of zeros with a one at the token's place.
    """

    down: Tensor
    """[inputs, rank in whole steps], zeros behind the rank."""
    up: Tensor
    """[rank, outputs], with the adapter's scaling; for the kernel in panels: [panels, rank, outputs of a panel]."""
    factors: Tensor | None = None
    """[outputs in whole panels] float32; None, as :attr:`shifts` is: the layer is only added to."""
    shifts: Tensor | None = None
    """[outputs in whole panels] float32"""
    weight: Tensor | None = None
    """[outputs, inputs], of embeddings [inputs, outputs]: takes the place of the layer's own; None: none does."""

    @property
    def rank(self) -> int:
        return self.up.shape[-2]

    @property
    def _tensors(self) -> list[Tensor]:
        tensors = (self.down, self.up, self.factors, self.shifts, self.weight)
        return [tensor for tensor in tensors if tensor is not None]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._tensors)

    @property
    def are_finite(self) -> bool:
        """Return whether all numbers are finite."""
        return all(bool(tensor.isfinite().all()) for tensor in self._tensors)

    def merged(self, weight: Tensor) -> Tensor:
        """Return a weight [outputs, inputs], to which these matrices belong without panels, with the change in it."""
        own = weight if self.weight is None else self.weight
        return own + (self.down @ self.up).t() if self.rank else own

    def to(self, device: torch.device) -> "Matrices":
        """Return the matrices on a device: these if they are there."""
        more = (self.factors, self.shifts, self.weight)
        factors, shifts, weight = (None if each is None else each.to(device) for each in more)
        return Matrices(self.down.to(device), self.up.to(device), factors, shifts, weight)


@dataclass(frozen=True, slots=True)
class Layout:
    """Says how the products read matrices."""

    rank_step: int = 1
    """The columns of ``down`` are padded to a multiple of it."""
    panel: int = 0
    """Outputs of a panel of ``up``; 0: it has no panels."""

    def arrange(self, a: Tensor, b: Tensor, dtype: torch.dtype) -> Matrices:
        """Return the matrices of a layer from A [rank, inputs] and the scaled B [outputs, rank]."""
        rank, inputs = a.shape
        down = torch.zeros(inputs, -(-rank // self.rank_step) * self.rank_step, dtype=dtype)
        down[:, :rank] = a.t()
        if not self.panel:
            return Matrices(down, b.t().to(dtype).contiguous())
        up = torch.zeros(-(-len(b) // self.panel), self.panel, rank, dtype=dtype)
        up.flatten(0, 1)[: len(b)] = b
        return Matrices(down, up.transpose(1, 2).contiguous())

    def by_output(self, values: Tensor) -> Tensor:
        """Return numbers of a layer's outputs [outputs], float32, with zeros up to the end of the last panel."""
        panel = self.panel or 1
        padded = torch.zeros(-(-len(values) // panel) * panel)
        padded[: len(values)] = values
        return padded


@dataclass(frozen=True, slots=True)
class Adapter:
    """Holds an adapter in host memory."""

    digest: bytes
    rank: int
    """The largest of its layers, those of other stages included."""
    layers: Mapping[str, Matrices]
    """By the names of the model's layers."""
    files: AdapterFiles | None = None
    """What it was made of, if it has to be made again when the model's weights are replaced; None: it depends on
    none."""

    @property
    def is_plain(self) -> bool:
        """Return whether it only adds to linear layers, which recorded steps know, and not to those that compute other
        rows than the step's tokens."""
        return all(
            name not in APART and not name.endswith(_BEHIND_LATENTS) and each.weight is None
            for name, each in self.layers.items()
        )

    @property
    def nbytes(self) -> int:
        """Return the size of all matrices, and of the files that are kept."""
        kept = len(self.files.weights) if self.files is not None else 0
        return kept + sum(matrices.nbytes for matrices in self.layers.values())


@dataclass(frozen=True, slots=True)
class AdaptedModel:
    """Describes the layers of a model that may have adapters."""

    shapes: Mapping[str, tuple[int, int]]
    """(outputs, inputs) of each, by its name in the checkpoint."""
    dtype: torch.dtype
    """That of the model's activations."""
    layout: Layout
    """How the products read the matrices."""
    parts: Mapping[str, Mapping[str, LayerPart]] = field(default_factory=dict)
    """By the same name: the model's layers that consist of a part of that layer, by their names. A layer that is not
    named is the model's own."""
    is_elsewhere: Callable[[str], bool] = lambda _: False
    """Whether a layer of this name is one of another stage's, which checks and keeps its matrices."""
    is_tied: bool = False
    """Whether its output layer is that of its embeddings."""
    num_experts: int = 0
    """Of a layer, on all ranks; 0: no layer has any."""
    experts_take_turns: bool = False
    """Whether gates and ups take turns in the tensors of all experts."""
    reads_media: bool = False
    """Whether prompts may have images or sounds."""
    read_base: ReadBase | None = None
    """None: adapters that depend on the model's own weights are refused."""
    names: Mapping[str, str] = field(default_factory=dict)
    """What a plugin's architecture calls tensors, as in :class:`..checkpoint.weights.RenamedSource`."""


def read_adapter(path: Path, model: AdaptedModel, max_rank: int) -> Adapter:
    """Read the adapter in the directory ``path``, whose matrices have ranks up to ``max_rank``. Raises ``ValueError``
    naming what is wrong or not supported."""
    return make_adapter(read_adapter_files(path), model, max_rank)


def make_adapter(files: AdapterFiles, model: AdaptedModel, max_rank: int) -> Adapter:
    """Make an adapter of what its files contain. Raises as :func:`read_adapter`."""
    changes = read_changes(files, max_rank, reads_media=model.reads_media, names=model.names)
    rank = max((change.rank for change in changes.values() if change.a is not None), default=0)
    try:
        changes = split_experts(changes, model.shapes, model.num_experts, takes_turns=model.experts_take_turns)
        named = _by_name(changes, model)
        own = {name: change for name, change in named.items() if not model.is_elsewhere(name)}
        for name, change in own.items():
            _check(name, change, _shape(name, model))
        arranger = _Arranger(model)
        depends = any(_depends(name, change) for name, change in own.items())
        if not depends:
            layers = arranger.arrange(own, None)
        elif model.read_base is None:
            raise ValueError("has magnitude vectors or biases, for which the model's own weights cannot be read")
        else:
            with model.read_base() as base:
                layers = arranger.arrange(own, base)
    except ValueError as error:
        raise ValueError(f"{WEIGHTS}: {error}") from None
    return Adapter(files.digest, rank, layers, files if depends else None)


def is_without_kernel(name: str) -> bool:
    """Return whether PyTorch computes the products with a layer's matrices, on every device."""
    # Routers and output layers compute float32 whatever the states are, and the kernel adds to rows of one dtype.
    return name in APART or name.endswith((".gate", ".router", _BEHIND_LATENTS))


def _by_name(changes: Mapping[str, StoredChange], model: AdaptedModel) -> dict[str, StoredChange]:
    """Return the changes by what the model calls the layers. Raises ``ValueError`` for two of one layer."""
    found = dict[str, StoredChange]()
    for name, change in changes.items():
        own = _named(name, model)
        if own in found:
            raise ValueError(f"{own} is there twice, under two names")
        if own:
            found[own] = change
    return found


def _named(name: str, model: AdaptedModel) -> str:
    """Return what the model calls a layer that an adapter names; empty: it has no such layer and needs none."""
    if name == TIED:
        return OUTPUT if model.is_tied else ""
    # Of a class without a head names begin below it, and newer classes call the part with the experts mlp.
    others = (f"model.{name}", name.replace(".mlp.", ".block_sparse_moe."))
    return name if name in model.shapes else next((other for other in others if other in model.shapes), name)


def _depends(name: str, change: StoredChange) -> bool:
    """Return whether what is computed depends on the layer's own weight or bias."""
    replaces = change.weight is not None and name not in APART  # keeps the layer's own bias
    return change.magnitude is not None or change.bias is not None or replaces


class _Arranger:
    """Makes matrices of what an adapter stores."""

    def __init__(self, model: AdaptedModel) -> None:
        self._model = model

    def arrange(self, changes: Mapping[str, StoredChange], base: Checkpoint | None) -> dict[str, Matrices]:
        """Return the changes of the model's layers by their names. ``base``: the model's own weights; None: no change
        depends on them."""
        layers: dict[str, Matrices] = {}
        for name, change in changes.items():
            outputs, _ = self._model.shapes[name]
            parts = self._model.parts.get(name) or {name: LayerPart(name, outputs, name, outputs)}
            stored = next(iter(parts.values())).stored
            row_changes = self._row_changes(name, stored, change, base)
            for own, part in parts.items():
                layers[own] = self._matrices(change, part, row_changes)
                if not layers[own].are_finite:
                    dtype = str(self._model.dtype).removeprefix("torch.")
                    raise ValueError(f"{name} has numbers that are not finite in {dtype}, in which the model computes")
        return layers

    def _matrices(self, change: StoredChange, part: LayerPart, row_changes: tuple[Tensor, Tensor] | None) -> Matrices:
        """Return what changes a layer of the model that consists of ``part`` of a stored one."""
        model = self._model
        layout = Layout() if is_without_kernel(part.name) else model.layout
        if change.a is not None and change.b is not None:
            a = change.a if part.columns is None else change.a[:, part.columns]
            found = layout.arrange(a, _of_part(change.b, part, part.scale) * change.scaling, model.dtype)
        else:
            count = self._model.shapes[layer_name(part.stored)][1] if part.columns is None else len(part.columns)
            found = layout.arrange(torch.empty(0, count), torch.empty(part.outputs, 0), model.dtype)
        if change.weight is not None:
            found = replace(found, weight=self._weight(change.weight, part))
        if row_changes is None:
            return found
        factors, shifts = row_changes
        own_factors = factors if part.rows is None else factors[part.rows]
        own_shifts = _of_part(shifts, part, part.bias_scale) if part.adds_bias else torch.zeros(part.outputs)
        return replace(found, factors=layout.by_output(own_factors), shifts=layout.by_output(own_shifts))

    def _weight(self, weight: Tensor, part: LayerPart) -> Tensor:
        """Return the part of a whole weight that a layer of the model has."""
        rows = weight if part.name == EMBEDDINGS else _of_part(weight, part, part.scale)
        return (rows if part.columns is None else rows[:, part.columns]).to(self._model.dtype).contiguous()

    def _row_changes(
        self, name: str, stored: str, change: StoredChange, base: Checkpoint | None
    ) -> tuple[Tensor, Tensor] | None:
        """Return what each output of a stored layer is multiplied by, and what is added to it then, float32 [outputs]
        both; None: nothing."""
        outputs, inputs = self._model.shapes[name]
        factors, shifts = torch.ones(outputs), torch.zeros(outputs)
        if change.b_bias is not None:
            shifts = shifts + change.b_bias * change.scaling
        elif not _depends(name, change):
            return None
        if change.magnitude is not None:
            assert base is not None
            assert change.a is not None
            assert change.b is not None
            norms = _row_norms(base, stored, (outputs, inputs), change.a, change.b * change.scaling)
            if not norms.all():
                raise ValueError(f"{name} has a row of zeros, which no magnitude makes another one")
            factors = change.magnitude / norms
        if base is None:
            return factors, shifts
        own = base.take(f"{stored}.bias", outputs) if f"{stored}.bias" in base else None
        if own is None and change.bias is not None:
            raise ValueError(f"{name} has a bias, and the model's own layer has none")
        if own is not None:
            # A layer adds its bias before what is multiplied here, unless another weight takes its place.
            added = factors * own if change.weight is None else 0.0
            shifts = shifts + (own if change.bias is None else change.bias) - added
        return factors, shifts


def _row_norms(base: Checkpoint, stored: str, shape: tuple[int, int], a: Tensor, b: Tensor) -> Tensor:
    """Return the norm of each row of the layer's weight and b · a, float32 [outputs]. Of the weight, which may be of
    few bits, only some rows are float32 at a time."""
    # Read from the files, not taken from the layer: the weight of a layer may be rounded at load or cut among ranks,
    # and a norm over ranks would be a collective call that an adapter could fail on some of them.
    outputs, inputs = shape
    packed = base.take_packed(f"{stored}.weight", outputs, inputs)
    norms, step = torch.empty(outputs), max(_ROW_STEP, _AT_ONCE // inputs // _ROW_STEP * _ROW_STEP)
    for first in range(0, outputs, step):
        last = min(first + step, outputs)
        rows = ShardedDimension(outputs, ((first, last),))
        weight = base.take(f"{stored}.weight", rows, inputs) if packed is None else packed.rows(first, last)
        norms[first:last] = torch.addmm(weight, b[first:last], a).norm(dim=1)
    return norms


def _of_part(rows: Tensor, part: LayerPart, scale: float | Tensor | None) -> Tensor:
    """Return the rows of B, or of what is added to outputs, that change a layer of the model."""
    rows = rows if part.rows is None else rows[part.rows]
    if scale is None:
        return rows
    return rows * (scale.view(-1, *[1] * (rows.dim() - 1)) if isinstance(scale, Tensor) else scale)


def _shape(name: str, model: AdaptedModel) -> tuple[int, int]:
    if name not in model.shapes:
        kinds = ", ".join(sorted({name.rpartition(".")[2] for name in model.shapes}))
        raise ValueError(f"layer {name} cannot have an adapter; those of this model are {kinds}")
    return model.shapes[name]


def _check(name: str, change: StoredChange, shape: tuple[int, int]) -> None:
    """Raise ``ValueError`` unless these are the tensors of a layer of this shape."""
    outputs, inputs = shape
    wanted = {"matrix A": (change.rank, inputs), "matrix B": (outputs, change.rank), "weight": (outputs, inputs)}
    if name == EMBEDDINGS:
        wanted["weight"] = (inputs, outputs)
    if name.endswith(_BEHIND_LATENTS) and change.b_bias is not None:
        raise ValueError(f"{name} has a bias of B (lora_bias), which is not supported behind compressed vectors")
    size = inputs if name == EMBEDDINGS else outputs
    if change.weight is not None and name in (EMBEDDINGS, OUTPUT) and len(change.weight) != size:
        raise ValueError(
            f"weight of {name} has rows for {len(change.weight)} tokens, and the model has {size}: tokens that an "
            "adapter adds are not served, merge it into the model"
        )
    for kind, tensor in change.tensors():
        expected = wanted.get(kind, (outputs,))
        if tuple(tensor.shape) != expected:
            raise ValueError(f"{kind} of {name} has shape {list(tensor.shape)}; expected {list(expected)}")
