"""Takes the place of the kernel that draws: the host's rule, with the columns that the kernel would get."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from tokenloom.engine_core.wire.core_sampling_params import SamplingParams
from tokenloom.gpu_worker.sampler.allowed_set import allowed_set
from tokenloom.gpu_worker.sampler.sampler import NO_TOKEN, first_past


def host_draw(logits: Tensor, columns: Sequence[Tensor]) -> Tensor:
    return torch.tensor([_draw(row, *each) for row, *each in zip(logits.numpy(), *columns, strict=True)])


def _draw(logits, temperature, top_p, min_p, number, top_k) -> int:
    best = int(logits.argmax())
    if not np.isfinite(logits).any():
        return NO_TOKEN
    if not np.isfinite(logits[best]) or not temperature:
        return best
    filters = {"top_p": float(top_p), "min_p": float(min_p), "top_k": int(top_k)}
    wanted = SamplingParams(max_tokens=1, seed=0, temperature=float(temperature), **filters)
    token_ids, weights = allowed_set(logits, wanted)
    index = first_past(weights, float(number))
    return index if token_ids is None else int(token_ids[index])
