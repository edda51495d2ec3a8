"""Defines the metrics of a tokenizer."""

from prometheus_client import CollectorRegistry

from tokenloom.services.runtime.telemetry.fast_metrics import Counter, Histogram
from tokenloom.services.runtime.telemetry.process_metrics import LATENCY_SECONDS


class TokenizerMetrics:
    """Counts tokens, and measures the calls that were answered, by method."""

    def __init__(self, registry: CollectorRegistry) -> None:
        name = "tokenloom_tokenizer_"
        self.tokens = Counter(registry, name + "tokens", "Tokens that encoding made or that were decoded.", {})
        self.encode, self.encode_chat, self.decode = (
            Histogram(
                registry, f"{name}{method}_seconds", f"Seconds that a call of {method} took.", {}, LATENCY_SECONDS
            )
            for method in ("encode", "encode_chat", "decode")
        )
