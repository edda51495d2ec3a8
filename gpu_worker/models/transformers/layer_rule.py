"""Describes what one layer of a transformers model asks of attention."""

from dataclasses import dataclass

from torch import nn

from ...attention.score_rule import ScoreRule


@dataclass(frozen=True, slots=True)
class LayerRule:
    """Holds what the probe recorded of one call."""

    module: nn.Module
    num_heads: int
    num_kv_heads: int
    head_size: int
    """The size of a query and a key."""
    value_size: int
    scores: ScoreRule
    source: int | None = None
    """The earlier layer whose keys and values the call passes, with the same window; None: they are its own."""
