"""Measures the logits of some steps for metrics."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from tokenloom.engine_core.data.core_sampling_params import SamplingParams
from tokenloom.engine_core.data.messages import LogitsStats


class LogitsMeter:
    """Measures every n-th step that draws tokens."""

    def __init__(self, interval: int) -> None:
        """``interval``: measure one step of so many, one or more."""
        self._interval = interval
        self._num_steps = 0

    def is_due(self) -> bool:
        """Count a step. Returns whether it is to be measured; the first one is."""
        self._num_steps += 1
        # Not each step: reading every logit costs as much as sampling.
        return self._num_steps % self._interval == 1 or self._interval == 1

    def measure(self, logits: torch.Tensor, params: Sequence[SamplingParams]) -> list[LogitsStats | None]:
        """Return the statistics of each row of the model's own logits [rows, vocab]; None for one that is not finite.

        They must not have been changed by logits processors. ``params`` [rows] are those of the rows' requests.
        """
        values: npt.NDArray[np.float32] = logits.float().cpu().numpy()
        largest, smallest = values.max(axis=1), values.min(axis=1)
        is_finite = np.isfinite(largest) & np.isfinite(smallest)
        stats: list[LogitsStats | None] = [None] * len(values)
        for row in np.flatnonzero(is_finite).tolist():
            entropy = _entropy(values[row], largest[row])
            stats[row] = LogitsStats(float(largest[row]), float(smallest[row]), entropy, params[row].temperature)
        return stats


def _entropy(logits: npt.NDArray[np.float32], largest: np.float32) -> float:
    """Return the entropy of the distribution of finite logits [vocab], in nats."""
    shifted = np.subtract(logits, largest, dtype=np.float64)
    weights = np.exp(shifted)
    total = float(weights.sum())
    # The sum of -p ln p, with p = weights / total and ln p = shifted - ln total.
    return max(0.0, float(np.log(total) - np.dot(weights, shifted) / total))
