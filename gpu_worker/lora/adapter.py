"""Reads LoRA adapters of the peft library, and arranges their matrices as the products read them."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from tokenloom.engine_core.data.lora import CONFIG, WEIGHTS, read_adapter_files, read_rank

from ..checkpoint.files.text_part import text_tensor
from ..checkpoint.weights import LayerPart

_PREFIX = "base_model.model."
_CHANGED_BASES = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Ways to begin a training that change the base model's own weights too, so that the adapter does not fit them."""
# Entries of adapter_config.json that say nothing about what is computed, or that are read here.
_UNDERSTOOD = frozenset(
    {
        *("peft_type", "r", "lora_alpha", "use_rslora", "bias", "init_lora_weights"),
        *("auto_mapping", "base_model_name_or_path", "revision", "task_type", "peft_version", "inference_mode"),
        *("lora_dropout", "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
        *("megatron_core", "qalora_group_size", "runtime_config", "loftq_config", "eva_config", "ensure_weight_tying"),
    }
)


@dataclass(frozen=True, slots=True)
class Matrices:
    """Holds the change of one layer: x · down · up."""

    down: Tensor
    """[inputs, rank in whole steps], zeros behind the rank."""
    up: Tensor
    """[rank, outputs], with the adapter's scaling; for the kernel in panels: [panels, rank, outputs of a panel]."""

    @property
    def rank(self) -> int:
        return self.up.shape[-2]

    def to(self, device: torch.device) -> "Matrices":
        """Return the matrices on a device: these if they are there."""
        return Matrices(self.down.to(device), self.up.to(device))


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
        up.view(-1, rank)[: len(b)] = b
        return Matrices(down, up.transpose(1, 2).contiguous())


@dataclass(frozen=True, slots=True)
class Adapter:
    """Holds an adapter in host memory."""

    digest: bytes
    rank: int
    layers: Mapping[str, Matrices]
    """By the names of the model's layers."""


def read_adapter(
    path: Path,
    shapes: Mapping[str, tuple[int, int]],
    max_rank: int,
    dtype: torch.dtype,
    layout: Layout,
    parts: Mapping[str, Mapping[str, LayerPart]] = MappingProxyType({}),
    is_elsewhere: Callable[[str], bool] = lambda _: False,
) -> Adapter:
    """Read the adapter in the directory ``path``.

    Raises ``ValueError`` naming what is wrong or not supported.

    Args:
        shapes: (outputs, inputs) of each layer that may have an adapter, by its name in the checkpoint.
        max_rank: The largest rank to accept.
        dtype: That of the model's activations.
        layout: How the products read the matrices.
        parts: By the same name: the model's layers that consist of a part of that layer, by their names. A layer that
            is not named is the model's own.
        is_elsewhere: Whether a layer of this name is one of another stage's, which checks and keeps its matrices.
    """
    files = read_adapter_files(path)
    try:
        rank = read_rank(files.config, max_rank)
        scaling = _scaling(files.config, rank)
    except ValueError as error:
        raise ValueError(f"{CONFIG}: {error}") from None
    try:
        tensors = safetensors.torch.load(files.weights)
        pairs = _pairs(tensors)
        layers = dict[str, Matrices]()
        for name, (a, b) in pairs.items():
            if is_elsewhere(name):
                continue
            _check(name, a, b, _shape(name, shapes), rank)
            for own, part in parts.get(name, {name: LayerPart(name, len(b), name, len(b))}).items():
                own_a = a if part.columns is None else a[:, part.columns]
                layers[own] = layout.arrange(own_a, _of_part(b, part) * scaling, dtype)
    except (ValueError, safetensors.SafetensorError) as error:
        raise ValueError(f"{WEIGHTS}: {error}") from None
    return Adapter(files.digest, rank, layers)


def _scaling(config: Mapping[str, Any], rank: int) -> float:
    """Return the factor on the adapter's products. Raises ``ValueError`` for what is not computed."""
    if config.get("peft_type") != "LORA":
        raise ValueError(f"peft_type is {config.get('peft_type')!r}; only LORA is supported")
    if config.get("bias", "none") != "none":
        raise ValueError(f"bias is {config['bias']!r}; adapters that train biases are not supported")
    initial = config.get("init_lora_weights")
    if isinstance(initial, str) and initial.startswith(_CHANGED_BASES):
        raise ValueError(
            f"init_lora_weights is {initial!r}, which changes the base model's weights; convert the adapter"
        )
    for key, value in config.items():
        if value and key not in _UNDERSTOOD:
            raise ValueError(f"{key} is set, which is not supported")
    alpha = config.get("lora_alpha", 8)
    if not isinstance(alpha, (int, float)):
        raise ValueError(f"lora_alpha must be a number, not {alpha!r}")
    return float(alpha / (rank**0.5 if config.get("use_rslora") else rank))


def _pairs(tensors: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    """Return the matrices A and B of each layer."""
    pairs: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        name, _, kind = key.removeprefix(_PREFIX).partition(".lora_")
        if not key.startswith(_PREFIX) or kind not in ("A.weight", "B.weight"):
            raise ValueError(f"tensor {key} is not supported; only the matrices A and B of linear layers are")
        layer = text_tensor(name)
        if layer is not None:  # what changes how images are read changes no text
            pairs.setdefault(layer_name(layer), {})[kind[0]] = tensor
    if not pairs:
        raise ValueError("holds no matrices")
    for name, pair in pairs.items():
        if len(pair) < 2:
            raise ValueError(f"{name} has only one of its two matrices")
    return {name: (pair["A"], pair["B"]) for name, pair in pairs.items()}


def _of_part(b: Tensor, part: LayerPart) -> Tensor:
    """Return the rows of the matrix B that change a layer of the model, float32."""
    rows = (b if part.rows is None else b[part.rows]).float()
    if part.scale is None:
        return rows
    return rows * (part.scale[:, None] if isinstance(part.scale, Tensor) else part.scale)


def layer_name(name: str) -> str:
    """Return the name of a layer of text, which Mamba-2's files and classes begin in two ways."""
    return re.sub(r"^backbone\.", "model.", name)


def _shape(name: str, shapes: Mapping[str, tuple[int, int]]) -> tuple[int, int]:
    if name not in shapes:
        kinds = ", ".join(sorted({name.rpartition(".")[2] for name in shapes}))
        raise ValueError(f"layer {name} cannot have an adapter; those of this model are {kinds}")
    return shapes[name]


def _check(name: str, a: Tensor, b: Tensor, shape: tuple[int, int], rank: int) -> None:
    """Raise ``ValueError`` unless these are the matrices of a layer of this shape."""
    outputs, inputs = shape
    for kind, tensor, wanted in (("A", a, (rank, inputs)), ("B", b, (outputs, rank))):
        if tuple(tensor.shape) != wanted:
            raise ValueError(f"matrix {kind} of {name} has shape {list(tensor.shape)}; expected {list(wanted)}")
        if not tensor.is_floating_point() or not tensor.isfinite().all():
            raise ValueError(f"matrix {kind} of {name} does not consist of finite numbers")
