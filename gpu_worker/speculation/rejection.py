"""Accepts drafts by rejection sampling (Leviathan et al., "Fast inference from transformers via speculative decoding").

A draft that was drawn from q is accepted with probability min(1, p / q) under the model's own p; otherwise the token is
drawn from what p has more than q. Tokens then have exactly the distribution p, but are not those that the request draws
without speculation.
"""

import functools
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from tokenloom.engine_core.data.core_params import CoreSamplingParams

from ..sampler.host.sampler import Purpose, Sampler, allowed_set, first_past, uniform
from ..sampler.step_sampler import SampleRows

Ints = npt.NDArray[np.int64]
Logits = npt.NDArray[np.float32]
Distribution = npt.NDArray[np.float64]
"""[vocab]: probabilities, whose sum is 1."""


def distribution(logits: Logits, params: CoreSamplingParams) -> Distribution:
    """Return what a request of a temperature above 0 draws from for logits [vocab], whose largest is finite."""
    token_ids, weights = allowed_set(logits, params)
    shares: Distribution = weights / weights.sum()
    if token_ids is None:
        return shares
    dense = np.zeros(len(logits))
    dense[token_ids] = shares
    return dense


class RejectionSampler:
    """Draws tokens for rows with and without a draft. Remembers the distributions of the drafts that were proposed."""

    def __init__(self) -> None:
        self._sampler = Sampler()
        self._proposed: dict[str, list[Distribution]] = {}

    def keep(self, req_id: str, drafted_from: list[Distribution]) -> None:
        """Remember what each draft of a request was drawn from. Drafts of other requests are certain proposals."""
        self._proposed[req_id] = drafted_from

    def forget(self, req_ids: Iterable[str]) -> None:
        """Drop what is known of these requests."""
        for req_id in req_ids:
            self._proposed.pop(req_id, None)

    def bind(self, req_ids: Sequence[str], number: int, drafts: Sequence[int | None]) -> SampleRows:
        """Return how pass ``number`` draws for these requests, of which each has its draft, or none."""
        return functools.partial(self._draw, req_ids, number, drafts)

    def _draw(
        self,
        req_ids: Sequence[str],
        number: int,
        drafts: Sequence[int | None],
        logits: Logits,
        params: Sequence[CoreSamplingParams],
        output_indices: Ints,
    ) -> list[int]:
        tokens = self._sampler.sample(logits, params, output_indices)
        seeds = np.array([each.seed for each in params], dtype=np.uint64)
        decides, draws = (
            uniform(seeds, output_indices.astype(np.uint64), purpose).tolist()
            for purpose in (Purpose.ACCEPT, Purpose.RESIDUAL)
        )
        for row, draft in enumerate(drafts):
            if draft is not None and params[row].temperature != 0.0 and np.isfinite(logits[row].max()):
                proposed = self._proposed.get(req_ids[row], ())
                drafted_from = proposed[number] if number < len(proposed) else None
                target = distribution(logits[row], params[row])
                tokens[row] = accept_or_redraw(target, draft, drafted_from, (decides[row], draws[row]))
        return tokens


def accept_or_redraw(
    target: Distribution, draft: int, drafted_from: Distribution | None, numbers: tuple[float, float]
) -> int:
    """Return the draft, or the token that replaces it.

    ``drafted_from`` is the distribution from which the draft was drawn; None: it was certain. ``numbers`` are uniform
    in [0, 1): one decides, one draws. A replacement is never the draft itself.
    """
    decides, draws = numbers
    share = 1.0 if drafted_from is None else drafted_from[draft]
    # As a product: the quotient p / q would divide by a probability that may be zero.
    if decides * share < target[draft]:
        return draft
    rest = target.copy() if drafted_from is None else np.maximum(target - drafted_from, 0.0)
    rest[draft] = 0.0
    # Rounding may leave nothing although the draft was not accepted: both distributions are then the same.
    return first_past(rest, draws) if rest.any() else draft
