"""Quantiles are estimated from the buckets of a histogram."""

import math

from tokenloom.services.runtime.telemetry.fast_metrics import quantile

INF = math.inf


def test_quantiles_are_linear_within_a_bucket() -> None:
    assert quantile({1.0: 10, 2.0: 20, INF: 20}, 0.5) == 1.0
    assert quantile({1.0: 10, 2.0: 20, INF: 20}, 0.75) == 1.5
    assert quantile({1.0: 0, INF: 5}, 0.5) == 1.0, "past the last bound nothing is known"
    assert quantile({}, 0.5) is None
