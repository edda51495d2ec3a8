"""Runs the sampling rule as tensor operations on a GPU, so that only the tokens come to the host.

It draws the same tokens as :class:`~.sampler.Sampler`, unless a uniform number falls within rounding of a boundary.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tokenloom.engine_core.wire.core_sampling_params import SamplingParams

from ..batch.transfer import to_device
from .philox import Purpose, uniform
from .sampler import NO_TOKEN


class DeviceSampler:
    """Draws one token for each row, on the device of the logits."""

    @torch.inference_mode()
    def sample(
        self, logits: Tensor, params: Sequence[SamplingParams], output_indices: npt.NDArray[np.int64]
    ) -> list[int]:
        """Return token ids for float32 logits [rows, vocab]. A greedy row takes the largest, among equals the lowest
        id; ``NO_TOKEN`` if no logit is finite.

        ``output_indices`` [rows] are the output indices of the tokens to draw.
        """
        largest, best = logits.max(dim=1)  # of a row that contains NaN: the first one
        is_finite = largest.isfinite()
        token_ids = torch.where(is_finite, best, -1 - best)  # negative: one transfer for tokens and flags
        drawn = [row for row, wanted in enumerate(params) if wanted.temperature != 0.0]
        if drawn:
            where = to_device(np.array(drawn, dtype=np.int64), logits.device)
            # A row that is not finite has no distribution: it keeps its argmax.
            tokens = _draw(logits[where], [params[row] for row in drawn], output_indices[drawn])
            token_ids[where] = torch.where(is_finite[where], tokens, token_ids[where])
        result: list[int] = token_ids.tolist()
        if min(result, default=0) < 0:
            result = [each if each >= 0 else _settle(logits[row], -1 - each) for row, each in enumerate(result)]
        return result


def _settle(logits: Tensor, best: int) -> int:
    """Return the token of a row [vocab] whose largest logit, ``best``, is not finite."""
    return best if bool(logits.isfinite().any()) else NO_TOKEN


def _draw(logits: Tensor, params: Sequence[SamplingParams], output_indices: npt.NDArray[np.int64]) -> Tensor:
    """Return [n] token ids: the first at which the running mass of the allowed set passes the number."""
    device = logits.device
    seeds = np.array([each.seed for each in params], dtype=np.uint64)
    u = to_device(uniform(seeds, output_indices.astype(np.uint64), Purpose.SAMPLE), device)[:, None]
    temperatures = to_device(np.array([each.temperature for each in params]), device)[:, None]
    weights = ((logits - logits.amax(dim=1, keepdim=True)).double() / temperatures).exp()
    if any(each.min_p > 0.0 for each in params):
        min_p = to_device(np.array([each.min_p for each in params]), device)[:, None]
        weights = weights.where(weights >= min_p, 0.0)
    if any(each.top_k > 0 or each.top_p < 1.0 for each in params):
        weights = _keep_best(logits, weights, params)
    running = weights.cumsum(dim=1)
    found = torch.searchsorted(running, u * running[:, -1:], right=True)
    # The number may be a rounding error above the sum; then the last token with any mass is drawn.
    places = torch.arange(logits.shape[1], device=device)
    last = places.where(weights > 0.0, -1).amax(dim=1)
    return torch.minimum(found[:, 0], last)


def _keep_best(logits: Tensor, weights: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Return weights [n, vocab] without those beyond top-k and then top-p."""
    vocab = logits.shape[1]
    # One total order: larger first, and among equals the lower id.
    order = logits.argsort(dim=1, descending=True, stable=True)
    top_k = [each.top_k if 0 < each.top_k < vocab else vocab for each in params]
    num_kept = to_device(np.array(top_k, dtype=np.int64), logits.device)[:, None]
    places = torch.arange(vocab, device=logits.device)
    best_first = weights.gather(1, order).where(places < num_kept, 0.0)
    top_p = to_device(np.array([each.top_p for each in params]), logits.device)[:, None]
    mass = best_first.cumsum(dim=1)
    is_needed = (mass - best_first < top_p * mass[:, -1:]) | (top_p >= 1.0)
    return torch.zeros_like(weights).scatter_(1, order, best_first.where(is_needed, 0.0))
