"""How the next token is chosen from logits: one rule, whatever finds the set of allowed tokens."""

from .penalties import SeenTokens
from .philox import Purpose, uniform
from .sampler import RowSampling, Sampler

__all__ = ["Purpose", "RowSampling", "Sampler", "SeenTokens", "uniform"]
