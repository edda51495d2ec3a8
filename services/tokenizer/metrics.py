"""What a tokenizer counts."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from prometheus_client import CollectorRegistry

from tokenloom.services.runtime.telemetry.fast_metrics import Counter, Histogram
from tokenloom.services.runtime.telemetry.process_metrics import LATENCY_SECONDS

METHODS = ("encode", "encode_chat", "decode")


class Metrics:
    """Calls that were answered, by method, and their tokens."""

    def __init__(self, registry: CollectorRegistry) -> None:
        name = "tokenloom_tokenizer_"
        self.tokens = Counter(registry, name + "tokens", "Tokens that came out of encoding, or went into decoding.", {})
        self._seconds = {
            method: Histogram(
                registry, f"{name}{method}_seconds", f"From a call of {method} to its answer.", {}, LATENCY_SECONDS
            )
            for method in METHODS
        }

    @contextmanager
    def call(self, method: str) -> Iterator[None]:
        """Measures a call, unless it fails. ``method``: one of ``METHODS``."""
        started = time.monotonic()
        yield
        self._seconds[method].observe(time.monotonic() - started)
