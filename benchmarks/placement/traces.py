"""Draws the requests of the simulation."""

import random
from dataclasses import dataclass

import numpy as np

from .engine import BLOCK, Request


@dataclass(frozen=True, slots=True)
class Trace:
    """Describes the requests. Without prefixes, nothing is shared and lengths are mixed."""

    name: str
    rate: float
    num_prefixes: int = 0
    median_tokens: float = 0.0
    sigma: float = 0.0

    def requests(self, seconds: float, seed: int) -> list[Request]:
        """Draw the requests of so many seconds."""
        rng = np.random.default_rng(seed)
        times = np.cumsum(rng.exponential(1 / self.rate, int(self.rate * seconds))).tolist()
        return [self._shared(at, rng, seed) if self.num_prefixes else _mixed(at, rng) for at in times]

    def _shared(self, at: float, rng: np.random.Generator, seed: int) -> Request:
        weights = 1 / np.arange(1, self.num_prefixes + 1)  # Zipf
        number = int(np.searchsorted(np.cumsum(weights / weights.sum()), rng.random()))
        own = random.Random(f"{seed}.{number}")
        tokens = min(max(own.lognormvariate(np.log(self.median_tokens), self.sigma), BLOCK), 24_000)
        prefix = [own.getrandbits(63) for _ in range(int(tokens) // BLOCK)]
        prompt = len(prefix) * BLOCK + max(int(rng.lognormal(5.5, 0.8)), 16)
        return Request(at, prefix, prompt, int(min(max(rng.lognormal(5.0, 0.8), 4), 3000)))


def _mixed(at: float, rng: np.random.Generator) -> Request:
    """Return a request of its own; 15 % have long answers."""
    output = rng.lognormal(4.6, 1.0) if rng.random() < 0.85 else rng.lognormal(7.0, 0.5)
    return Request(at, (), int(min(max(rng.lognormal(6.2, 1.0), 16), 16_000)), int(min(max(output, 4), 4000)))


TRACES = (
    Trace("mixed lengths", 190.0),
    Trace("1,000 prefixes of 5 k", 112.0, 1000, 3640.0, 0.8),
    Trace("200 prefixes of 18 k", 52.0, 200, 17_200.0, 0.3),
)
