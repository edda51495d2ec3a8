"""Reads the health, the addresses and the metrics of every part of a local mesh."""

import asyncio
import http.client
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from tokenloom.supervisor.part import is_serving
from tokenloom.supervisor.state_dir import MeshRecord, PartRecord, PartReport, read_part_state

PREFIX = "tokenloom_placement_"
_RULE = PREFIX + "rule"


@dataclass(frozen=True)
class PartPlacement:
    """Describes a coordinator, or an engine as a coordinator compares it, as ``--json`` prints it."""

    rule: str | None
    """The coordinator's ``--placement``; None: its release does not show it."""
    values: dict[str, float] = field(default_factory=dict)
    """What the rule compares of an engine and computes that from, such as waiting, running and score."""

    def __str__(self) -> str:
        """Say how the value comes about; of a coordinator only the rule."""
        if not self.values:
            return self.rule or "-"
        waiting, running, score = (self.values.get(name, 0.0) for name in ("waiting", "running", "score"))
        if self.rule != "cost":
            return f"{waiting:.0f} * 4 + {running:.0f} = {score:.0f}"
        seconds, tokens, rate, seats = (
            self.values.get(name, 0.0)
            for name in ("expected_seconds", "uncached_tokens", "uncached_tokens_per_second", "seats")
        )
        return f"{seconds:.2f} s: {tokens:,.0f} tokens at {rate:,.0f}/s, {waiting + running:.0f} of {seats:.0f} seats"


@dataclass(frozen=True)
class MeshPlacement:
    """Holds what one or more gateways show: rules by model, and values by engine."""

    rules: Mapping[str, str] = field(default_factory=dict)
    engines: Mapping[str, tuple[str, dict[str, float]]] = field(default_factory=dict)
    """Of each engine the model of its mesh, and its values."""

    def of(self, service: str, index: int, model: str) -> PartPlacement | None:
        """Return what is known of a part; None: nothing, or it has no say in placement."""
        if service == "coordinator":
            rule = self.rules.get(model) or next(iter(self.rules.values()), None)
            return None if rule is None else PartPlacement(rule)
        if (found := self.engines.get(f"{service}-{index}")) is None:
            return None
        of_model, values = found
        return PartPlacement(self.rules.get(of_model), values)


def merged(several: Iterable[MeshPlacement]) -> MeshPlacement:
    """Return what several gateways show together; the first one that knows an engine decides."""
    rules: dict[str, str] = {}
    engines: dict[str, tuple[str, dict[str, float]]] = {}
    for each in several:
        rules = {**each.rules, **rules}
        engines = {**each.engines, **engines}
    return MeshPlacement(rules, engines)


class PlacementSamples:
    """Gathers the samples of one scrape."""

    def __init__(self) -> None:
        self._rules: dict[str, str] = {}
        self._engines: dict[str, tuple[str, dict[str, float]]] = {}

    def add(self, name: str, labels: Mapping[str, str], value: float) -> None:
        """Take a sample whose name begins with :data:`PREFIX`."""
        model = labels.get("model_name", "")
        if name == _RULE:
            self._rules[model] = labels.get("rule", "")
        elif engine := labels.get("engine"):
            self._engines.setdefault(engine, (model, {}))[1][name.removeprefix(PREFIX)] = value

    def all(self) -> MeshPlacement:
        return MeshPlacement(self._rules, self._engines)


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


_NOT_SERVED: Mapping[str, str] = {"other_weights": "ASIDE", "unreached": "UNREACHED"}
"""The health of an engine that serves by its own word and gets no requests, by the fall-back that says so."""


@dataclass(frozen=True)
class Row:
    """Describes one part, as ``--json`` prints it."""

    service: str
    index: int
    role: str | None
    pid: int | None
    address: str | None
    metrics: str | None
    health: str
    model: str
    """Empty for gateways, which serve all models of the mesh."""
    fall_backs: list[str] = field(default_factory=list)
    """What the part does without; of an engine also what the coordinator knows of it."""
    placement: PartPlacement | None = None
    """The rule of a coordinator, and what it compares of an engine; None if no gateway shows it."""
    plugins: list[str] = field(default_factory=list)
    """The packages whose plugins it may load, each with its version and the kinds of its plugins."""


def find_rows(mesh: MeshRecord) -> list[Row]:
    """Ask all parts for their health concurrently."""
    return asyncio.run(rows_of(mesh))


async def rows_of(mesh: MeshRecord) -> list[Row]:
    """Ask all parts for their health concurrently."""
    rows = await asyncio.gather(*map(_row, mesh.parts))
    placements = await _placements(rows)
    known = [_with_known(row, rows) for row in rows]
    return [replace(row, placement=placements.of(row.service, row.index, row.model)) for row in known]


async def _placements(rows: Iterable[Row]) -> MeshPlacement:
    """Return how engines are compared, as the gateways that serve show it."""
    shown = [row.metrics for row in rows if row.service == "gateway" and row.health == "SERVING"]
    scrapes = await asyncio.gather(*(asyncio.to_thread(scrape, address) for address in shown))
    return merged(each.placements for each in scrapes)


def _with_known(row: Row, rows: Sequence[Row]) -> Row:
    """Return an engine's row with what coordinators know of it, which its own health does not show."""
    if row.service != "engine":
        return row
    about = f"{row.service}-{row.index}: "
    known = [each.removeprefix(about) for other in rows for each in other.fall_backs if each.startswith(about)]
    kinds = {each.partition(":")[0] for each in (*row.fall_backs, *known)}
    health = next((word for kind, word in _NOT_SERVED.items() if kind in kinds), row.health)
    own = {each.partition(":")[0] for each in row.fall_backs}
    added = [each for each in known if each.partition(":")[0] not in own]
    return replace(row, health=health if row.health == "SERVING" else row.health, fall_backs=[*row.fall_backs, *added])


async def _row(part: PartRecord) -> Row:
    state = read_part_state(Path(part.state_file))
    if state is None:
        return Row(part.service, part.index, part.role, None, None, None, "NOT_SERVING", part.model)
    fall_backs = list(map(str, state.fall_backs))
    health = "SERVING" if await is_serving(state.health) else "NOT_SERVING"
    role = state.role or part.role
    about = (part.service, part.index, role, state.pid, state.address, state.metrics, health, part.model, fall_backs)
    return Row(*about, plugins=list(state.plugins))
