"""On a device, the tokens that transformers and the host's sampler find on a CPU."""

from pathlib import Path

import numpy as np
import torch

from tests.parity.engine import Engine
from tests.parity.identical import assert_identical
from tests.parity.reference import Reference, make_reference
from tokenloom.engine_core.wire.core_sampling_params import SamplingParams
from tokenloom.gpu_worker.platform.cuda_platform import CUDAPlatform
from tokenloom.gpu_worker.sampler import Sampler

NEAR_BOUNDARY = 1e-3
"""Share of drawn tokens that may differ: the number falls within rounding of a boundary."""

_PARAMS = (
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 50},
    {"temperature": 1.3, "top_p": 0.9},
    {"temperature": 0.8, "top_k": 100, "top_p": 0.95, "min_p": 0.02},
)


def check_greedy(name: str, directory: Path, device: str) -> int:
    """All at once, in chunks, and with too few blocks, in float32. Returns the number of prompts."""
    reference = make_reference(name, directory)
    _check(reference, device, budget=8192)
    _check(reference, device, budget=64, prefix_caching=True)
    _check(reference, device, budget=256, num_blocks=42)
    return len(reference.cases)


def _check(reference: Reference, device: str, **settings: int) -> None:
    engine = Engine(reference.path, stop_token_ids=reference.eos_token_ids, device=device, **settings)
    assert_identical(reference.cases, engine.generate)


def check_sampler(device: torch.device, *, rows: int = 256, vocab: int = 151_936) -> int:
    """Draws from the same logits on both sides; returns how many tokens differ. Raises ``AssertionError`` for more than
    rounding explains."""
    logits = np.random.default_rng(3).normal(0.0, 3.0, (rows, vocab)).astype(np.float32)
    params = [SamplingParams(max_tokens=4, seed=row, **_PARAMS[row % len(_PARAMS)]) for row in range(rows)]
    indices = np.arange(rows)
    sampler = CUDAPlatform(0.9, device).make_sampler()
    assert sampler is not None
    drawn = sampler.sample(torch.from_numpy(logits).to(device), params, indices)
    expected = Sampler().sample(logits, params, indices)
    different = sum(a != b for a, b in zip(drawn, expected, strict=True))
    assert different <= max(1, NEAR_BOUNDARY * rows), f"{different} of {rows} tokens differ from the host's"
    return different
