"""Configures what is pooled from a prompt."""

from typing import Literal

from msgspec import Struct


class PoolerConfig(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """How a prompt becomes a vector; None: as the checkpoint says. Users write it as JSON (names as in vLLM)."""

    pooling_type: Literal["LAST", "MEAN", "CLS"] | None = None
    """Which hidden states make the vector: the last token's, the mean of all, or the first token's."""
    normalize: bool | None = None
    """Whether vectors have length 1 unless a request says otherwise."""
    use_activation: bool | None = None
    """Whether the logits of a class head become probabilities unless a request says otherwise."""
