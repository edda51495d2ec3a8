"""Describes how a layer turns products of queries and keys into the weights of the values."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
# One object and not arguments: softcap, sinks and windows each change the softmax, and the next feature changes this
# class and the backends, but no call of attend.
class ScoreRule:
    """Holds what one layer does to its attention scores. A model makes it once for each layer, when it loads."""

    scale: float
    """The factor on query times key."""
    sliding_window: int | None = None
    """A token at position p sees (p - sliding_window, p]; None: it sees all positions up to its own."""
    softcap: float | None = None
    """A scaled score s becomes softcap * tanh(s / softcap), before any mask; None: it stays s."""
    sinks: Tensor | None = None
    """[num_heads] float32: a score of each head that enters the sum of the softmax and weighs no value; None: none."""

    @property
    def is_plain(self) -> bool:
        """Return whether a scaled, masked softmax is all there is."""
        return self.softcap is None and self.sinks is None
