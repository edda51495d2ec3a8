"""Our metrics show the same text as prometheus_client's."""

import prometheus_client
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from tokenloom.services.runtime.telemetry.fast_metrics import Counter, Histogram, HistogramAlias, LabelledCounter

LABELS = {"model_name": "m", "engine": "e"}
BUCKETS = (0.001, 0.5, 2.5, 80)
VALUES = (0.0, 0.001, 0.0011, 0.5, 3.0, 80.0, 81.0)


def shown(registry: CollectorRegistry) -> list[str]:
    """Return the lines without the time of creation, which only prometheus_client's metrics show."""
    lines = generate_latest(registry).decode().splitlines()
    return [line for line in lines if "_created" not in line]


def test_a_histogram_shows_what_prometheus_clients_would() -> None:
    registry, theirs = CollectorRegistry(), CollectorRegistry()
    ours = Histogram(registry, "vllm:time_seconds", "Time.", LABELS, BUCKETS)
    reference = prometheus_client.Histogram(
        "vllm:time_seconds", "Time.", list(LABELS), buckets=BUCKETS, registry=theirs
    ).labels(*LABELS.values())
    for value in VALUES:
        ours.observe(value)
        reference.observe(value)
    ours.observe_many(2.0, 3)
    for _ in range(3):
        reference.observe(2.0)
    assert shown(registry) == shown(theirs)


def test_a_counter_shows_what_prometheus_clients_would() -> None:
    registry, theirs = CollectorRegistry(), CollectorRegistry()
    ours = Counter(registry, "vllm:tokens", "Tokens.", LABELS)
    reference = prometheus_client.Counter("vllm:tokens", "Tokens.", list(LABELS), registry=theirs)
    for amount in (1, 5):
        ours.inc(amount)
        reference.labels(*LABELS.values()).inc(amount)
    assert shown(registry) == shown(theirs)


def test_a_reading_shows_what_its_keeper_says_when_scraped() -> None:
    registry, theirs = CollectorRegistry(), CollectorRegistry()
    kept = [0]
    Counter(registry, "vllm:tokens", "Tokens.", LABELS, lambda: kept[0])
    reference = prometheus_client.Counter("vllm:tokens", "Tokens.", list(LABELS), registry=theirs)
    for amount in (1, 5):
        kept[0] += amount
        reference.labels(*LABELS.values()).inc(amount)
        assert shown(registry) == shown(theirs)


@pytest.mark.parametrize("name", ["vllm:one", "vllm:two", "vllm:three"])
def test_a_name_is_taken_once(name: str) -> None:
    registry = CollectorRegistry()
    Counter(registry, "vllm:one", "One.", {})
    Histogram(registry, "vllm:two", "Two.", {}, BUCKETS)
    Counter(registry, "vllm:three", "Three.", {}, lambda: 3)
    with pytest.raises(ValueError, match="Duplicated"):
        prometheus_client.Counter(name, "Again.", registry=registry)


def test_a_labelled_counter_shows_what_prometheus_clients_would() -> None:
    registry, theirs = CollectorRegistry(), CollectorRegistry()
    ours = LabelledCounter(registry, "picks", "Picks.", "outcome", ("WHOLE", "PREFILL"))
    reference = prometheus_client.Counter("picks", "Picks.", ["outcome"], registry=theirs)
    for value in ("WHOLE", "PREFILL"):
        reference.labels(value)
    for value in ("WHOLE", "WHOLE", "NO_ENGINE"):
        ours.inc(value)
        reference.labels(value).inc()
    assert shown(registry) == shown(theirs)


def test_an_alias_shows_the_same_buckets_with_labels_of_its_own() -> None:
    registry, theirs = CollectorRegistry(), CollectorRegistry()
    source = Histogram(CollectorRegistry(), "vllm:seconds", "Seconds.", {"model_name": "m"}, BUCKETS)
    HistogramAlias(registry, source, "other_seconds", "The same.", LABELS)
    reference = prometheus_client.Histogram(
        "other_seconds", "The same.", list(LABELS), buckets=BUCKETS, registry=theirs
    ).labels(*LABELS.values())
    for value in (0.01, 3.0, 1e9):
        source.observe(value)
        reference.observe(value)
    assert [sample for sample in shown(registry) if "_created" not in str(sample)] == [
        sample for sample in shown(theirs) if "_created" not in str(sample)
    ]
