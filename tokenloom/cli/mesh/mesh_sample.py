"""Reads the health and the metrics of every part of a local mesh."""

import asyncio
import http.client
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

from tokenloom.supervisor.part_health import is_serving
from tokenloom.supervisor.state_dir import MeshRecord, PartRecord, PartReport, read_part_state

from .placements import PREFIX, MeshPlacement, PlacementSamples

_TIMEOUT_SECONDS = 2.0


@dataclass(frozen=True)
class ScrapedMetrics:
    """Holds one scrape, summed over labels."""

    values: dict[str, float] = field(default_factory=dict)
    buckets: dict[str, dict[float, float]] = field(default_factory=dict)
    """For each histogram, the cumulative count of observations up to each bound."""
    placements: MeshPlacement = field(default_factory=MeshPlacement)
    """What a gateway shows of placement."""


@dataclass(frozen=True)
class PartSample:
    """Holds the sample of one part."""

    part: PartRecord
    state: PartReport | None
    """None until the part listens."""
    serving: bool
    metrics: ScrapedMetrics


@dataclass(frozen=True)
class MeshSample:
    """Holds the samples of all parts, taken at about the same time."""

    seconds: float
    """Monotonic time of the sample."""
    parts: list[PartSample]


async def take_sample(mesh: MeshRecord) -> MeshSample:
    """Sample all parts concurrently; a part that does not answer within two seconds has no metrics."""
    parts = list(await asyncio.gather(*map(_sample, mesh.parts)))
    return MeshSample(time.monotonic(), parts)


def parse(text: str) -> ScrapedMetrics:
    """Read Prometheus's text format. Raises ``ValueError``."""
    # Imported here, like cryptography in `certs`: other commands start faster without it.
    from prometheus_client.parser import text_string_to_metric_families

    values: defaultdict[str, float] = defaultdict(float)
    buckets: defaultdict[str, defaultdict[float, float]] = defaultdict(lambda: defaultdict(float))
    placements = PlacementSamples()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if "le" in sample.labels:
                buckets[sample.name.removesuffix("_bucket")][float(sample.labels["le"])] += sample.value
            else:
                values[sample.name] += sample.value
            if sample.name.startswith(PREFIX):
                placements.add(sample.name, sample.labels, sample.value)
    return ScrapedMetrics(dict(values), {name: dict(each) for name, each in buckets.items()}, placements.all())


async def _sample(part: PartRecord) -> PartSample:
    state = read_part_state(Path(part.state_file))
    if state is None:
        return PartSample(part, None, False, ScrapedMetrics())
    serving, metrics = await asyncio.gather(is_serving(state.health), asyncio.to_thread(scrape, state.metrics))
    return PartSample(part, state, serving, metrics)


def scrape(address: str | None) -> ScrapedMetrics:
    """Return the metrics that a part serves; none if it does not answer within two seconds."""
    if address is None:
        return ScrapedMetrics()
    connection = http.client.HTTPConnection(address, timeout=_TIMEOUT_SECONDS)
    try:
        connection.request("GET", "/metrics")
        return parse(connection.getresponse().read().decode())
    except (OSError, http.client.HTTPException, ValueError):  # the part ended meanwhile, as its health shows
        return ScrapedMetrics()
    finally:
        connection.close()
