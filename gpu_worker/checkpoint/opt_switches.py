"""Describes how the sizes of OPT differ from each other."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class OPTSwitches:
    """Holds what only OPT's class knows."""

    embedding_size: int
    """The size of token embeddings; if it is not the hidden size, two matrices lead from the one to the other."""
    norm_before: bool
    """Whether a layer normalizes the input of attention and MLP; otherwise their sums (opt-350m)."""
    final_norm: bool
    norms_have_weights: bool
