"""Counts picks and the time that they are here."""

from prometheus_client import CollectorRegistry

from tokenloom.services.runtime.telemetry.fast_metrics import Histogram, LabelledCounter

_MILLISECONDS = (0.5, 1, 2, 3, 5, 7.5, 10, 15, 20, 30, 50, 75, 100, 150, 200, 300, 500, 1000)


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
            "Picks: WHOLE, PREFILL, DECODE or an error's reason. Most requests of a mesh with one engine need none.",
            "outcome",
            ("WHOLE", "PREFILL", "DECODE"),
        )
        self.seconds = Histogram(
            registry,
            "tokenloom_pick_seconds",
            "Time from reading a message with picks until the last of its answers was sent.",
            {},
            [bound / 1000 for bound in _MILLISECONDS],
        )
