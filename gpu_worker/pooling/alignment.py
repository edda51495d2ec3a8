"""Finds the row of a sound at which each token of its transcript is spoken, from what chosen heads of the decoder
attend to, as OpenAI's Whisper does: dynamic time warping of tokens to rows."""

from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from tokenloom.engine_core.data.core_params import CorePoolingParams, ModelPooling, PoolingTask

from ..checkpoint.model_config import ModelConfig
from .pooler import Pooler, PromptStates

Floats = npt.NDArray[np.float32]


class AttendedRows(PromptStates):
    """Collects what the tokens of one prompt attend to, chunk by chunk."""

    def __init__(self) -> None:
        super().__init__(None)

    def add(self, hidden: Tensor) -> None:
        """Add the weights [heads, n, rows] of the next tokens."""
        self._chunks.append(hidden)

    def pooled(self) -> Tensor:
        """Return the weights of all tokens, [heads, tokens, rows]."""
        return torch.cat(self._chunks, dim=1)


@dataclass(frozen=True, slots=True)
class Aligner(Pooler):
    """Holds how one model aligns: ``width`` rows are smoothed together."""

    width: int

    @classmethod
    def of_model(cls, config: ModelConfig) -> Self | None:
        """Return what aligns the transcripts of a model; None: its files name no heads for it."""
        if not config.alignment_heads:
            return None
        tasks = (PoolingTask.ALIGN,)
        return cls(ModelPooling(tasks, frozenset(tasks)), (), (), False, None, False, config.median_filter_width)

    def start(self, params: CorePoolingParams) -> PromptStates:
        """Return an empty collection for a prompt."""
        return AttendedRows()

    def finish(self, states: PromptStates, params: CorePoolingParams) -> Floats:
        """Return the row at which each token of a prompt is spoken, [tokens]; 0 for those that take no part."""
        weights = states.pooled()
        rows = np.zeros(weights.shape[1], dtype=np.float32)
        weights = weights[:, params.skipped_tokens :, : params.aligned_rows or None]
        if weights.shape[1]:
            rows[params.skipped_tokens :] = warp(-smoothed(weights, self.width).double().cpu().numpy())
        return rows


def smoothed(weights: Tensor, width: int) -> Tensor:
    """Return how well tokens and rows belong together, [tokens, rows]: weights [heads, tokens, rows] relative to those
    of the other tokens, as medians of ``width`` rows, and as the mean of the heads."""
    deviation, mean = torch.std_mean(weights, dim=-2, keepdim=True, unbiased=False)
    weights = (weights - mean) / deviation
    beside = width // 2
    if weights.shape[-1] > beside:
        padded = F.pad(weights, (beside, beside, 0, 0), mode="reflect")
        weights = padded.unfold(-1, width, 1).sort()[0][..., beside]
    return weights.mean(dim=0)


_DIAGONAL, _UP, _LEFT = 0, 1, 2


def warp(costs: npt.NDArray[np.float64]) -> Floats:
    """Return the row at which each token begins, [tokens], on the path of the least sum through costs [tokens, rows]
    that goes on by a token, a row or both."""
    # Whole diagonals at once, whose places do not depend on each other: 448 tokens of 1,500 rows take 52 ms, and
    # one place after the other takes 480, for which all requests of the engine would wait.
    num_tokens, num_rows = costs.shape
    steps = np.full((num_tokens + 1, num_rows + 1), _LEFT, dtype=np.int8)
    steps[1:, 0] = _UP
    before = np.full(num_tokens + 1, np.inf, dtype=np.float32)  # by token, of the diagonal before the last one
    last = before.copy()
    before[0] = 0.0
    for diagonal in range(2, num_tokens + num_rows + 1):
        tokens = np.arange(max(1, diagonal - num_rows), min(num_tokens, diagonal - 1) + 1)
        both, token, row = before[tokens - 1], last[tokens - 1], last[tokens]
        is_both, is_token = (both < token) & (both < row), (token < both) & (token < row)
        least = np.where(is_both, both, np.where(is_token, token, row))
        steps[tokens, diagonal - tokens] = np.where(is_both, _DIAGONAL, np.where(is_token, _UP, _LEFT))
        before, last = last, np.full(num_tokens + 1, np.inf, dtype=np.float32)
        last[tokens] = costs[tokens - 1, diagonal - tokens - 1] + least
    return _begins(steps)


def _begins(steps: npt.NDArray[np.int8]) -> Floats:
    """Go the path back from its end."""
    token, row = steps.shape[0] - 1, steps.shape[1] - 1
    begins = np.zeros(token, dtype=np.float32)
    while token > 0 or row > 0:
        if token:
            begins[token - 1] = row - 1  # the last one that is written is where the token begins
        step = steps[token, row] if token else _LEFT
        token -= step != _LEFT
        row -= step != _UP
    return np.maximum(begins, 0)
