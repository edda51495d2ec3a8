"""Reads the files of sentence-transformers that lie next to a checkpoint: how its states become a vector."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from tokenloom.model_files.sentence_texts import SentenceModule, read_modules

from ..checkpoint.directory_source import read_all


def same(x: Tensor) -> Tensor:
    """Return ``x``."""
    return x


@dataclass(frozen=True, slots=True)
class Projection:
    """Computes then(x · weightᵀ + bias) in float32, whatever the dtype of the model is."""

    weight: Tensor
    bias: Tensor | None
    then: Callable[[Tensor], Tensor] = same
    adds_input: bool = False
    residual: Tensor | None = None
    """With ``adds_input``: maps the input to the size of the output; None: they have the same size."""

    def __call__(self, x: Tensor) -> Tensor:
        """Map [..., in] to [..., out]."""
        y = self.then(F.linear(x, self.weight.float(), None if self.bias is None else self.bias.float()))
        if not self.adds_input:
            return y
        return y + (x if self.residual is None else F.linear(x, self.residual))


@dataclass(frozen=True, slots=True)
class VectorNorm:
    """Applies LayerNorm with the default epsilon of PyTorch."""

    weight: Tensor
    bias: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, (len(self.weight),), self.weight, self.bias)


def unit_length(x: Tensor) -> Tensor:
    """Return vectors of length 1."""
    return F.normalize(x, dim=-1)


VectorStep = Callable[[Tensor], Tensor]


def check_sizes(steps: Sequence[VectorStep], size: int) -> None:
    """Raise ``ValueError`` for a step that does not fit vectors of ``size`` numbers, or those of the step before it."""
    for step in steps:
        if isinstance(step, Projection | VectorNorm) and (wanted := step.weight.shape[-1]) != size:
            raise ValueError(
                f"modules.json: a module takes vectors of {wanted} numbers, and those before it give {size}"
            )
        if isinstance(step, Projection):
            size = len(step.weight)


def apply_steps(x: Tensor, steps: Sequence[VectorStep]) -> Tensor:
    """Apply steps one after the other."""
    for step in steps:
        x = step(x)
    return x


PoolingType = Literal["LAST", "MEAN", "CLS", "MAX", "MEAN_SQRT", "WEIGHTED_MEAN"]

_MODES: dict[str, PoolingType] = {
    "cls": "CLS",
    "max": "MAX",
    "mean": "MEAN",
    "mean_sqrt_len_tokens": "MEAN_SQRT",
    "weightedmean": "WEIGHTED_MEAN",
    "lasttoken": "LAST",
}
_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "torch.nn.modules.activation.Tanh": torch.tanh,
    "torch.nn.modules.linear.Identity": same,
    "torch.nn.modules.activation.Sigmoid": torch.sigmoid,
    "torch.nn.modules.activation.ReLU": torch.relu,
    "torch.nn.modules.activation.GELU": F.gelu,
    "torch.nn.modules.activation.SiLU": F.silu,
}


@dataclass(frozen=True, slots=True)
class SentenceFiles:
    """Describes what follows the transformer.

    Attributes:
        poolings: Whose states make a vector: the vectors of several are joined.
        steps: What is applied to that vector, in order.
        normalizes: Whether it gets length 1 after that.
        size: Numbers of a vector; None: as many as the poolings give.
        matryoshka: Whether vectors may be shortened.
        dimensions: To which lengths; empty: any.
    """

    poolings: tuple[PoolingType, ...]
    steps: tuple[VectorStep, ...] = ()
    normalizes: bool = False
    size: int | None = None
    matryoshka: bool = False
    dimensions: tuple[int, ...] = ()


def read_sentence_files(path: Path) -> SentenceFiles | None:
    """Read ``modules.json`` of a checkpoint directory and the files that it names; None if it has none.

    Raises ``ValueError`` naming what is not supported.
    """
    modules = read_modules(path)
    if modules is None:
        return None
    # A static table gives the mean of its rows.
    poolings: tuple[PoolingType, ...] = ("MEAN",) if modules[0].kind == "StaticEmbedding" else ()
    steps: list[VectorStep] = []
    size = None
    for module in modules:
        match module.kind:
            case "Pooling":
                poolings = tuple(_MODES[mode] for mode in module.pooling_modes)
            case "Dense":
                steps.append(dense := _read_dense(module))
                size = len(dense.weight)
            case "LayerNorm":
                tensors = read_all(module.directory)
                steps.append(VectorNorm(tensors["norm.weight"].float(), tensors["norm.bias"].float()))
            case "Normalize":
                steps.append(unit_length)
    normalizes = bool(steps) and steps[-1] is unit_length
    matryoshka, dimensions = read_matryoshka(path)
    # Files without a pooling are meant for vectors of tokens.
    kept = tuple(steps[:-1] if normalizes else steps)
    return SentenceFiles(poolings or ("MEAN",), kept, normalizes, size, matryoshka, dimensions)


def read_matryoshka(path: Path) -> tuple[bool, tuple[int, ...]]:
    """Return whether vectors may be shortened, and to which lengths; none: to any."""
    values: dict[str, Any] = {}
    for name in ("config.json", "config_sentence_transformers.json"):
        if (path / name).is_file():
            values |= json.loads((path / name).read_text())
    dimensions = tuple(values.get("matryoshka_dimensions") or ())
    return bool(dimensions or values.get("is_matryoshka")), dimensions


def activation_of(name: str, where: str) -> Callable[[Tensor], Tensor]:
    """Return the activation function of a class of torch. Raises ``ValueError`` naming one that is not supported."""
    if name not in _ACTIVATIONS:
        raise ValueError(f"{where}: the activation function {name} is not supported")
    return _ACTIVATIONS[name]


def _read_dense(module: SentenceModule) -> Projection:
    tensors = read_all(module.directory)
    if "linear.weight" not in tensors:
        raise ValueError(f"{module.where}: its weights have no tensor linear.weight")
    residual = tensors.get("residual.weight")
    return Projection(
        tensors["linear.weight"].float(),
        tensors["linear.bias"].float() if module.config.get("bias", True) else None,
        _ACTIVATIONS[module.activation],
        module.config.get("use_residual") is True,
        None if residual is None else residual.float(),
    )
