"""Parameters and logits over which every way to draw is tested."""

from typing import Any

import numpy as np
import numpy.typing as npt

from tokenloom.engine_core.data.core_params import CoreSamplingParams

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "cold": {"temperature": 0.3},
    "hot": {"temperature": 3.0},
    "greedy": {"temperature": 0.0},
    "nearly greedy": {"temperature": 1e-30},
    "top-k": {"top_k": 7},
    "top-k 1": {"top_k": 1},
    "top-k of all": {"top_k": 10**6},
    "top-p": {"top_p": 0.9},
    "tiny top-p": {"top_p": 1e-6},
    "wide top-p": {"top_p": 0.999, "temperature": 2.0},
    "min-p": {"min_p": 0.05},
    "min-p and top-p": {"min_p": 0.02, "top_p": 0.8},
    "everything": {"temperature": 0.8, "top_k": 50, "top_p": 0.95, "min_p": 0.01},
}


def params(**values: Any) -> CoreSamplingParams:
    return CoreSamplingParams(**{"max_tokens": 16, "seed": 1, **values})


def peaked(generator: np.random.Generator, vocab: int, dtype: Any = np.float32) -> npt.NDArray[Any]:
    """A few likely tokens above a wide tail; rounded, so that equals occur, as they do in bf16."""
    logits = generator.standard_normal(vocab) * 2.0
    logits[generator.permutation(vocab)[: min(30, vocab)]] += 6.0
    rounded: npt.NDArray[Any] = (np.round(logits * 8) / 8).astype(dtype)
    return rounded
