"""Collects what a request changes in its next row of logits, for a device that changes it there."""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from tokenloom.engine_core.data.core_sampling_params import SamplingParams

from .seen_tokens import SeenTokens

Ints = npt.NDArray[np.int64]
Words = npt.NDArray[np.int32]


@dataclass(slots=True)
class RowEdit:
    """Holds the changes of one row. :class:`~.logits_processor.LogitsProcessor` s fill it in their order."""

    masked: list[Ints] = field(default_factory=list)
    """Tokens that may not be drawn."""
    allowed: list[Words] = field(default_factory=list)
    """Bitmasks: bit i of word w is set if token 32 * w + i may be drawn. Tokens beyond the last word may not."""
    bias: tuple[Ints, npt.NDArray[np.float32]] | None = None
    """Tokens, each once, and what is added to their logits."""
    penalties: tuple[SeenTokens, SamplingParams] | None = None
    forced: int = -1
    """The only token that may be drawn, whatever the others say; -1: none."""

    def listed(self) -> tuple[Ints, npt.NDArray[np.float32]]:
        """Return tokens, each once, and what is added to their logits; -inf masks one."""
        biased, values = self.bias if self.bias is not None else (np.empty(0, np.int64), np.empty(0, np.float32))
        if not self.masked:
            return biased, values
        masked = np.unique(np.concatenate(self.masked))
        kept = ~np.isin(biased, masked)
        minus = np.full(len(masked), -np.inf, dtype=np.float32)
        return np.concatenate([biased[kept], masked]), np.concatenate([values[kept], minus])


def pack_bits(token_ids: Ints) -> Words:
    """Return the shortest bitmask that allows these tokens, [n], and no others."""
    bits = np.zeros((int(token_ids.max(initial=-1)) // 32 + 1) * 32, dtype=np.uint8)
    bits[token_ids] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)
