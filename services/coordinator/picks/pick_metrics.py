"""Counts picks and the time that they are here."""

from prometheus_client import CollectorRegistry

from tokenloom.services.runtime.telemetry.fast_metrics import Histogram, LabelledCounter

SECONDS = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1.0)


class PickMetrics:
    """Holds the metrics of one coordinator's picks.

    Attributes:
        outcomes: Counts them by outcome.
        seconds: Of the picks of streams.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self.outcomes = LabelledCounter(
            registry,
            "tokenloom_picks",
            "Picks: WHOLE, PREFILL, DECODE or an error's reason.",
            "outcome",
            ("WHOLE", "PREFILL", "DECODE"),
        )
        self.seconds = Histogram(
            registry,
            "tokenloom_pick_seconds",
            "Time from reading a message with picks until the last of its answers was sent.",
            {},
            SECONDS,
        )
