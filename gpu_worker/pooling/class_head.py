"""Describes the head of a classifier, and how its logits become probabilities."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..checkpoint.load_config import num_classes
from ..checkpoint.weights import Checkpoint
from .sentence_files import PoolingType, Projection, activation_of, same


@dataclass(frozen=True, slots=True)
class ClassHead:
    """Turns a state into logits of classes."""

    projections: tuple[Projection, ...]
    activation: Callable[[Tensor], Tensor]
    """What the model's configuration says that logits become."""
    num_classes: int
    pooling: PoolingType
    """Whose state the head reads."""
    by_token: bool
    """Whether the head can also read each token's state."""


def load_score_head(checkpoint: Checkpoint, hidden_size: int) -> ClassHead:
    """Load the head of a decoder, which reads the last token's state."""
    count = num_classes(checkpoint.path)
    projection = Projection(checkpoint.take("score.weight", count, hidden_size), None)
    return ClassHead((projection,), class_activation(checkpoint.path), count, "LAST", by_token=True)


def class_labels(path: Path) -> tuple[str, ...]:
    """Return the names of the classes in the configuration of a checkpoint directory, in order; empty: it has none."""
    names = _config(path).get("id2label") or {}
    return tuple(str(names[number]) for number in sorted(names, key=int))


def class_activation(path: Path) -> Callable[[Tensor], Tensor]:
    """Return what the logits of a checkpoint's classes become: what its configuration names for sentence-transformers,
    or what the kind of its problem asks for. Raises ``ValueError`` naming an unknown function."""
    values = _config(path)
    named = values.get("sentence_transformers") or {}
    name = named.get("activation_fn") or values.get("sbert_ce_default_activation_function")
    if name:
        return activation_of(name, "config.json")
    match values.get("problem_type"):
        case "regression":
            return same
        case "multi_label_classification":
            return torch.sigmoid
    return torch.sigmoid if num_classes(path) == 1 else partial(torch.softmax, dim=-1)


def _config(path: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((path / "config.json").read_text())
    return values
