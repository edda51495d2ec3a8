"""Loads token embeddings and the output layer, which may be one tensor, and of which each rank may have some tokens."""

import contextlib
from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from ..checkpoint.model_config import ModelConfig
from ..checkpoint.weights import Checkpoint, Linear
from ..kernels.compiler import KernelsUnavailable
from ..kernels.library import load_replay
from ..parallel.group import RankGroup
from .linear import make_output

_OUTPUT = "lm_head.weight"

InputEmbeds = Sequence[tuple[int, Tensor]]
"""(index of the first token, [n, levels * hidden_size] float32): embeddings that replace token ids, with levels behind
the first that are added after layers; see :func:`add_level`."""


class CutTable:
    """Holds the embeddings of this rank's tokens."""

    def __init__(self, rows: Tensor, first: int, group: RankGroup) -> None:
        """``rows`` [n, size]: those of the tokens from ``first`` on; the ranks of ``group`` have the others."""
        self._rows = rows
        self._first = first
        self._group = group
        self._row_bytes = rows.shape[1] * rows.itemsize
        self._gather: Callable[..., object] | None = None
        if rows.device.type == "cpu" and rows.is_contiguous():
            with contextlib.suppress(KernelsUnavailable):  # the products, which every step needs, say so
                self._gather = load_replay().gather_own_rows

    def __call__(self, input_ids: Tensor) -> Tensor:
        """Return the embeddings [T, size] of tokens [T] of all ranks."""
        # One rank adds a token's row to the zeros of the others, which changes no number.
        return self._group.all_reduce(self._own_or_zeros(input_ids))

    def _own_or_zeros(self, input_ids: Tensor) -> Tensor:
        rows = self._rows
        if self._gather is None:
            places = input_ids - self._first
            is_own = (places >= 0) & (places < len(rows))
            return F.embedding(places.clamp_(0, len(rows) - 1), rows).masked_fill_(~is_own[:, None], 0.0)
        ids = input_ids.contiguous()
        found = torch.empty(len(ids), rows.shape[1], dtype=rows.dtype)
        addresses = (each.data_ptr() for each in (rows, ids, found))
        self._gather(*addresses, len(ids), self._row_bytes, self._first, len(rows))
        return found


class CutOutput:
    """Computes the logits of this rank's tokens; the rank that draws gets those of all."""

    def __init__(self, part: Linear, vocab_size: int, group: RankGroup) -> None:
        self._part = part
        self._vocab_size = vocab_size
        self._group = group

    def __call__(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Map [n, size] to float32 logits [n, vocab_size] where tokens are drawn, elsewhere to those of its tokens."""
        # Whole logits, and not the largest of each rank: masks, penalties, min_p and log probabilities read all. Two
        # ranks of one machine copy a row of 150,000 in less than a hundredth of the time of a step.
        own = self._part(x, torch.float32)
        if self._group.rank:
            self._group.gather_columns(own, width=self._vocab_size)
            return own
        logits = own.new_empty(len(own), self._vocab_size)
        self._group.gather_columns(own, logits, width=self._vocab_size)
        return logits


TokenTable: TypeAlias = Tensor | CutTable
"""The embeddings of all tokens [vocab_size, size], or of this rank's."""


def embed(
    table: TokenTable | None,
    input_ids: Tensor,
    embeds: InputEmbeds,
    scale: float = 1.0,
    norm: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Return [T, hidden_size]: the rows of ``table`` for ``input_ids`` [T], times ``scale`` or after ``norm``, except
    where ``embeds`` gives others."""
    assert table is not None, "the first stage embeds tokens"
    hidden = F.embedding(input_ids, table) if isinstance(table, Tensor) else table(input_ids)
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


def load_embeddings(checkpoint: Checkpoint, name: str, config: ModelConfig) -> tuple[Tensor, Tensor]:
    """Return (token embeddings, output matrix) of a rank that is alone, each [vocab_size, embedding_size]."""
    shape, stored = (config.vocab_size, config.embedding_size), _stored(checkpoint, name, config)
    table = checkpoint.take(stored[0], *shape)
    return table, table if stored[0] == stored[1] else checkpoint.take(stored[1], *shape)


def load_table(checkpoint: Checkpoint, name: str, config: ModelConfig) -> TokenTable | None:
    """Load this rank's embeddings of a model that computes no logits; None: it needs none, because it begins behind the
    first layer."""
    if not _embeds(config):
        return None
    return _table(checkpoint.take(name, config.vocabulary, config.embedding_size), checkpoint, config)


def load_ends(
    checkpoint: Checkpoint, name: str, config: ModelConfig, *, adapts: bool = False
) -> tuple[TokenTable | None, Linear | None]:
    """Return this rank's token embeddings as :func:`load_table`, and what computes logits; None: other ranks do.
    ``adapts``: whether adapters may change the output layer."""
    shape, stored = (config.vocabulary, config.embedding_size), _stored(checkpoint, name, config)
    rows = checkpoint.take(stored[0], *shape) if _embeds(config) else None
    table = None if rows is None else _table(rows, checkpoint, config)
    if not config.computes_logits:
        return table, None
    if rows is None or stored[0] != stored[1]:
        rows = checkpoint.take(stored[1], *shape)
    layer: Linear = make_output(rows, config.quantization)
    if adapts and checkpoint.adapt is not None:
        parts = [checkpoint.part("lm_head", config.vocabulary, config.embedding_size)]
        layer = checkpoint.adapt(layer, parts, config.embedding_size, config.dtype)
    if not isinstance(config.vocabulary, int):
        layer = CutOutput(layer, config.vocab_size, checkpoint.group)
    return table, layer


def _embeds(config: ModelConfig) -> bool:
    """Return whether this rank embeds tokens: in the first stage, and wherever a head may draft."""
    return config.first_layer == 0 or not config.shard.cuts_vocabulary


def _stored(checkpoint: Checkpoint, name: str, config: ModelConfig) -> tuple[str, str]:
    """Return the names of token embeddings and output matrix, one name for a matrix that is both.

    Tied matrices are stored under either name. If a checkpoint that says they are tied holds both, they may differ,
    and both are used, as transformers does.
    """
    stored = [key for key in (name, _OUTPUT) if key in checkpoint]
    if config.tie_word_embeddings and len(stored) == 1:
        return stored[0], stored[0]
    return name, _OUTPUT


def _table(rows: Tensor, checkpoint: Checkpoint, config: ModelConfig) -> TokenTable:
    if isinstance(config.vocabulary, int):
        return rows
    return CutTable(rows, config.vocabulary.ranges[0][0], checkpoint.group)
