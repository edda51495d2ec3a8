"""Reads the files of sentence-transformers that lie next to a checkpoint: how its states become a vector."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor


def same(x: Tensor) -> Tensor:
    """Return ``x``."""
    return x


@dataclass(frozen=True, slots=True)
class Projection:
    """Computes then(x · weightᵀ + bias) in float32, whatever the dtype of the model is."""

    weight: Tensor
    bias: Tensor | None
    then: Callable[[Tensor], Tensor] = same

    def __call__(self, x: Tensor) -> Tensor:
        """Map [..., in] to [..., out]."""
        return self.then(F.linear(x, self.weight.float(), None if self.bias is None else self.bias.float()))


def project(x: Tensor, projections: Sequence[Projection]) -> Tensor:
    """Apply projections one after the other."""
    for each in projections:
        x = each(x)
    return x


PoolingType = Literal["LAST", "MEAN", "CLS"]

_MODES: dict[str, PoolingType] = {"cls": "CLS", "mean": "MEAN", "lasttoken": "LAST"}
_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "torch.nn.modules.activation.Tanh": torch.tanh,
    "torch.nn.modules.linear.Identity": same,
    "torch.nn.modules.activation.Sigmoid": torch.sigmoid,
    "torch.nn.modules.activation.ReLU": torch.relu,
    "torch.nn.modules.activation.GELU": torch.nn.functional.gelu,
}


@dataclass(frozen=True, slots=True)
class SentenceFiles:
    """Describes what follows the transformer."""

    pooling: PoolingType | None = None
    """None: the files name no pooling, so only token vectors are meant."""
    projections: tuple[Projection, ...] = ()
    normalizes: bool = False
    matryoshka: bool = False
    dimensions: tuple[int, ...] = ()
    """The lengths of Matryoshka vectors; empty: any."""


def read_sentence_files(path: Path) -> SentenceFiles | None:
    """Read ``modules.json`` of a checkpoint directory and the files that it names; None if it has none.

    Raises ``ValueError`` naming what is not supported.
    """
    if not (path / "modules.json").is_file():
        return None
    pooling, projections, normalizes = None, [], False
    for module in json.loads((path / "modules.json").read_text()):
        kind, directory = str(module["type"]).rpartition(".")[2], path / module["path"]
        match kind:
            case "Transformer":
                pass
            case "Pooling":
                pooling = _read_pooling(directory / "config.json")
            case "Dense":
                projections.append(_read_dense(directory))
            case "Normalize":
                normalizes = True
            case _:
                raise ValueError(f"modules.json: the module {module['type']} is not supported")
    matryoshka, dimensions = read_matryoshka(path)
    return SentenceFiles(pooling, tuple(projections), normalizes, matryoshka, dimensions)


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


def _read_pooling(path: Path) -> PoolingType:
    values = json.loads(path.read_text())
    if isinstance(values.get("pooling_mode"), str):
        modes = [values["pooling_mode"]]
    else:
        on = [name.removeprefix("pooling_mode_") for name, value in values.items() if value is True]
        modes = [name.removesuffix("_tokens").removesuffix("_token") for name in on if name != "include_prompt"]
    if len(modes) != 1 or modes[0] not in _MODES:
        raise ValueError(f"{path.parent.name}/config.json: must choose one of {', '.join(_MODES)}, not {modes}")
    return _MODES[modes[0]]


def _read_dense(directory: Path) -> Projection:
    where = f"{directory.name}/config.json"
    values = json.loads((directory / "config.json").read_text())
    if not (directory / "model.safetensors").is_file():
        raise ValueError(f"{directory.name} has no model.safetensors")
    tensors = load_file(directory / "model.safetensors")
    weight = tensors["linear.weight"].float()
    bias = tensors["linear.bias"].float() if values.get("bias", True) else None
    return Projection(weight, bias, activation_of(values.get("activation_function", ""), where))
