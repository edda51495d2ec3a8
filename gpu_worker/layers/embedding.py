"""Loads token embeddings and the output matrix, which may be one tensor."""

from collections.abc import Callable, Sequence

import torch.nn.functional as F
from torch import Tensor

from ..checkpoint.model_config import ModelConfig
from ..checkpoint.weights import Checkpoint

_OUTPUT = "lm_head.weight"

InputEmbeds = Sequence[tuple[int, Tensor]]
"""(index of the first token, [n, levels * hidden_size] float32): embeddings that replace token ids, with levels behind
the first that are added after layers; see :func:`add_level`."""


def embed(
    table: Tensor,
    input_ids: Tensor,
    embeds: InputEmbeds,
    scale: float = 1.0,
    norm: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Return [T, hidden_size]: the rows of ``table`` for ``input_ids`` [T], times ``scale`` or after ``norm``, except
    where ``embeds`` gives others."""
    hidden = F.embedding(input_ids, table)
    if norm is not None:
        hidden = norm(hidden)
    if scale != 1.0:
        hidden *= scale
    for start, rows in embeds:
        hidden[start : start + len(rows)] = rows[:, : hidden.shape[1]]
    return hidden


def add_level(hidden: Tensor, embeds: InputEmbeds, level: int) -> None:
    """Add a level of rows to the tokens [T, hidden_size] that they belong to, in place: level i after the first i
    layers of the model (deepstack of Qwen3-VL). Rows that have fewer levels are left out."""
    size = hidden.shape[1]
    for start, rows in embeds:
        if rows.shape[1] > level * size:
            hidden[start : start + len(rows)] += rows[:, level * size : (level + 1) * size].to(hidden.dtype)


def load_embeddings(
    checkpoint: Checkpoint, name: str, config: ModelConfig, size: int | None = None
) -> tuple[Tensor, Tensor]:
    """Return (token embeddings, output matrix), each [vocab_size, size], where ``size`` is by default hidden_size.

    Tied matrices are stored under either name. If a checkpoint that says they are tied holds both, they may differ,
    and both are used, as transformers does.
    """
    shape = (config.vocab_size, size or config.hidden_size)
    stored = [key for key in (name, _OUTPUT) if key in checkpoint]
    if config.tie_word_embeddings and len(stored) == 1:
        tied = checkpoint.take(stored[0], *shape)
        return tied, tied
    return checkpoint.take(name, *shape), checkpoint.take(_OUTPUT, *shape)
