"""Computes rates from two samples of a running local mesh, and shows them as tables on a screen."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter

from rich.console import Group, RenderableType
from rich.live import Live
from rich.text import Text

from tokenloom.services.runtime.telemetry.fast_metrics import quantile
from tokenloom.supervisor.state_dir import MeshRecord, running_meshes

from ..tables import UNLIMITED, Column, fitted, plain_console
from .mesh_sample import MeshPlacement, MeshSample, PartPlacement, PartSample, ScrapedMetrics, merged, take_sample

_DRAFTS = "vllm:spec_decode_num_"


@dataclass(frozen=True)
class PartRates:
    """Describes one part, as ``top --json`` prints it. A value that the part does not measure is None."""

    service: str
    index: int
    role: str | None
    pid: int | None
    health: str
    cpu_percent: float | None
    """Percent of one core, including the processes that the part started."""
    memory_bytes: int | None
    running: int | None
    """Requests in an engine's batch."""
    waiting: int | None
    kv_usage: float | None
    """Share of KV blocks in use, 0 to 1."""
    prefix_hit_rate: float | None
    """Share of prompt tokens that were in the prefix cache."""
    prompt_tokens_per_second: float | None
    generation_tokens_per_second: float | None
    draft_acceptance_rate: float | None
    """Share of draft tokens that were right."""
    tokens_per_draft: float | None
    """Tokens that a request got in a step with drafts: those that were right, and the one after them."""
    placement: PartPlacement | None
    """The rule of a coordinator, and what it compares of an engine."""


@dataclass(frozen=True)
class Latency:
    """Holds milliseconds from the buckets of a histogram; None: no observations."""

    p50_ms: float | None
    p95_ms: float | None


@dataclass(frozen=True)
class MeshRates:
    """Describes the mesh between two samples."""

    interval_seconds: float
    requests_per_second: float
    generation_tokens_per_second: float
    """Tokens that clients received."""
    time_to_first_token: Latency
    inter_token_latency: Latency
    parts: list[PartRates]


def view(before: MeshSample, after: MeshSample) -> MeshRates:
    """Compare two samples. A part that restarted between them is counted from its start."""
    seconds = max(after.seconds - before.seconds, 1e-9)
    pairs = [(_metrics_before(old, new), new) for old, new in zip(before.parts, after.parts, strict=True)]
    gateways = [(old, new.metrics) for old, new in pairs if new.part.service == "gateway"]
    placements = merged(new.placements for _, new in gateways)
    return MeshRates(
        interval_seconds=seconds,
        requests_per_second=sum(_gain(*pair, "vllm:request_success_total") or 0.0 for pair in gateways) / seconds,
        generation_tokens_per_second=sum(_gain(*pair, "vllm:generation_tokens_total") or 0.0 for pair in gateways)
        / seconds,
        time_to_first_token=_latency(gateways, "vllm:time_to_first_token_seconds"),
        inter_token_latency=_latency(gateways, "vllm:inter_token_latency_seconds"),
        parts=[_part(old, new, seconds, placements) for old, new in pairs],
    )


def _metrics_before(old: PartSample, new: PartSample) -> ScrapedMetrics:
    same = old.state is not None and new.state is not None and old.state.pid == new.state.pid
    return old.metrics if same else ScrapedMetrics()


def _part(old: ScrapedMetrics, new: PartSample, seconds: float, placements: MeshPlacement) -> PartRates:
    now, is_engine = new.metrics, new.part.service == "engine"
    cpu = _gain(_processes(old, "cpu_seconds_total"), _processes(now, "cpu_seconds_total"), "sum")
    memory = _processes(now, "resident_memory_bytes").values.get("sum")
    prompts, generated = (
        _gain(old, now, f"vllm:{name}_tokens_total") if is_engine else None for name in ("prompt", "generation")
    )
    right = _share(now, f"{_DRAFTS}accepted_tokens_total", f"{_DRAFTS}drafts_total")
    return PartRates(
        service=new.part.service,
        index=new.part.index,
        role=(new.state.role if new.state else None) or new.part.role,
        pid=new.state.pid if new.state else None,
        health="SERVING" if new.serving else "NOT_SERVING",
        cpu_percent=None if cpu is None else 100 * cpu / seconds,
        memory_bytes=None if memory is None else int(memory),
        running=_count(now, "vllm:num_requests_running") if is_engine else None,
        waiting=_count(now, "vllm:num_requests_waiting") if is_engine else None,
        kv_usage=now.values.get("vllm:kv_cache_usage_perc") if is_engine else None,
        prefix_hit_rate=_share(now, "vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total"),
        prompt_tokens_per_second=None if prompts is None else prompts / seconds,
        generation_tokens_per_second=None if generated is None else generated / seconds,
        draft_acceptance_rate=_share(now, f"{_DRAFTS}accepted_tokens_total", f"{_DRAFTS}draft_tokens_total"),
        tokens_per_draft=None if right is None else 1 + right,
        placement=placements.of(new.part.service, new.part.index, new.part.model),
    )


def _processes(metrics: ScrapedMetrics, name: str) -> ScrapedMetrics:
    """Return the sum over the part's process and those that it started."""
    found = [value for key, value in metrics.values.items() if key.endswith(f"process_{name}")]
    return ScrapedMetrics({"sum": sum(found)}) if found else ScrapedMetrics()


def _gain(old: ScrapedMetrics, new: ScrapedMetrics, name: str) -> float | None:
    value = new.values.get(name)
    return None if value is None else max(value - old.values.get(name, 0.0), 0.0)


def _count(metrics: ScrapedMetrics, name: str) -> int | None:
    value = metrics.values.get(name)
    return None if value is None else int(value)


def _share(metrics: ScrapedMetrics, part: str, whole: str) -> float | None:
    total = metrics.values.get(whole)
    return metrics.values.get(part, 0.0) / total if total else None


def _latency(gateways: list[tuple[ScrapedMetrics, ScrapedMetrics]], name: str) -> Latency:
    gained: dict[float, float] = {}
    for old, new in gateways:
        before = old.buckets.get(name, {})
        for bound, count in new.buckets.get(name, {}).items():
            gained[bound] = gained.get(bound, 0.0) + count - before.get(bound, 0.0)
    p50, p95 = (None if (at := quantile(gained, share)) is None else 1e3 * at for share in (0.5, 0.95))
    return Latency(p50, p95)


def look_once(mesh: MeshRecord, interval: float) -> MeshRates:
    """Return what a mesh did during an interval of so many seconds."""
    return asyncio.run(_look_once(mesh, interval))


def watch(mesh: MeshRecord, interval: float, *, wide: bool = False) -> None:
    """Refresh the screen until the mesh ends; ``wide``: show every column, also beyond the terminal's edge."""
    asyncio.run(_watch(mesh, interval, wide))


def shown(seen: MeshRates, width: int) -> RenderableType:
    """Return a line for the whole mesh and a row for each part, in so many columns of a terminal where possible."""
    return Group(*_summary(seen, width), Text(), fitted(_columns(seen), width))


async def _watch(mesh: MeshRecord, interval: float, wide: bool) -> None:
    console = plain_console()
    with Live(console=console, screen=True, auto_refresh=False) as live:
        async for seen in _looks(mesh, interval):
            live.update(shown(seen, UNLIMITED if wide else console.width), refresh=True)


async def _look_once(mesh: MeshRecord, interval: float) -> MeshRates:
    return await anext(_looks(mesh, interval))


async def _looks(mesh: MeshRecord, interval: float) -> AsyncIterator[MeshRates]:
    before = await take_sample(mesh)
    while mesh in running_meshes():
        await asyncio.sleep(interval)
        after = await take_sample(mesh)
        yield view(before, after)
        before = after


def _summary(seen: MeshRates, width: int) -> list[Text]:
    """Return what is true of the whole mesh, in as many lines as it takes."""
    rules = {part.placement.rule for part in seen.parts if part.placement and part.placement.rule}
    up = sum(part.health == _SERVING for part in seen.parts)
    facts = [
        Text.assemble((f"{up} of {len(seen.parts)} parts are serving", "green" if up == len(seen.parts) else "red")),
        Text(f"{seen.requests_per_second:.1f} requests/s"),
        Text(f"{seen.generation_tokens_per_second:,.0f} tokens/s"),
        Text(f"TTFT {_latency_text(seen.time_to_first_token)}"),
        Text(f"ITL {_latency_text(seen.inter_token_latency)}"),
        *([Text(f"placement by {' and '.join(sorted(rules))}")] if rules else ()),
    ]
    lines = [facts[0]]
    for fact in facts[1:]:
        if lines[-1].cell_len + len(_FACT_GAP) + fact.cell_len <= width:
            lines[-1].append(_FACT_GAP).append_text(fact)
        else:
            lines.append(fact)
    return lines


_FACT_GAP = "   "
_SERVING = "SERVING"
_SHORT_HEALTH = {_SERVING: "yes", "NOT_SERVING": "no"}


@dataclass(frozen=True)
class _Figure:
    """A column of numbers."""

    title: str
    value: Callable[[PartRates], float | None]
    form: Callable[[float], str]
    short_title: str
    short_form: Callable[[float], str]
    rank: int = 0

    def column(self, parts: Sequence[PartRates]) -> Column:
        whole, short = ([_number(self.value(part), form) for part in parts] for form in (self.form, self.short_form))
        return Column(self.title, whole, Column(self.short_title, short), is_right=True, rank=self.rank)


def _brief(value: float) -> str:
    """Return a number in at most four characters: ``950``, ``1.2k``, ``213M``."""
    for unit in ("", "k", "M", "G"):
        if value < 999.5:
            return f"{value:.1f}{unit}" if unit and value < 9.95 else f"{value:.0f}{unit}"
        value /= 1000
    return f"{value:.0f}T"


def _hundredfold(name: str) -> Callable[[PartRates], float | None]:
    """Return what reads a share of a part as a percentage."""
    return lambda part: None if (share := getattr(part, name)) is None else 100.0 * share


def _placed(name: str) -> Callable[[PartRates], float | None]:
    return lambda part: part.placement.values.get(name) if part.placement else None


_COUNT, _MANY, _PERCENT, _SHORT_PERCENT = "{:.0f}".format, "{:,.0f}".format, "{:.0f} %".format, "{:.0f}%".format
_FIGURES = (
    _Figure("CPU", attrgetter("cpu_percent"), _PERCENT, "CPU", _SHORT_PERCENT),
    _Figure("MEMORY", attrgetter("memory_bytes"), lambda value: f"{value * 1e-6:,.0f} MB", "MEM", _brief, rank=8),
    _Figure("RUN", attrgetter("running"), _COUNT, "RUN", _brief),
    _Figure("WAIT", attrgetter("waiting"), _COUNT, "WAIT", _brief),
    _Figure("KV", _hundredfold("kv_usage"), _PERCENT, "KV", _SHORT_PERCENT),
    _Figure("HITS", _hundredfold("prefix_hit_rate"), _PERCENT, "HITS", _SHORT_PERCENT, rank=6),
    _Figure("PROMPT/S", attrgetter("prompt_tokens_per_second"), _MANY, "IN/S", _brief, rank=10),
    _Figure("TOKENS/S", attrgetter("generation_tokens_per_second"), _MANY, "OUT/S", _brief),
)
_DRAFT_FIGURES = (
    _Figure("DRAFTS", _hundredfold("draft_acceptance_rate"), _PERCENT, "DRAFT", _SHORT_PERCENT, rank=4),
    _Figure("TOK/STEP", attrgetter("tokens_per_draft"), "{:.1f}".format, "T/STEP", "{:.1f}".format, rank=7),
)
_SCORE_FIGURES = (_Figure("SCORE", _placed("score"), _COUNT, "SCORE", _brief, rank=5),)
_COST_FIGURES = (
    _Figure("AHEAD", _placed("uncached_tokens"), _MANY, "AHEAD", _brief, rank=3),
    _Figure("COST", _placed("expected_seconds"), "{:.2f} s".format, "COST", "{:.1f}s".format, rank=9),
)


def _columns(seen: MeshRates) -> Iterator[Column]:
    """Yield the columns. PID and role are the first that a narrow terminal does without: `ps` has them too."""
    parts = seen.parts
    rules = {part.placement.rule for part in parts if part.placement is not None}
    health = [Text(part.health, _colour(part)) for part in parts]
    short = [Text(_SHORT_HEALTH.get(part.health, part.health.lower()), _colour(part)) for part in parts]
    yield Column("PART", [f"{part.service}-{part.index}" for part in parts])
    yield Column("ROLE", [part.role or "-" for part in parts], rank=2)
    yield Column("PID", [_number(part.pid, _COUNT) for part in parts], is_right=True, rank=1)
    yield Column("HEALTH", health, Column("UP", short))
    drafts = any(part.draft_acceptance_rate is not None for part in parts)
    placing = (*(_SCORE_FIGURES if rules else ()), *(_COST_FIGURES if "cost" in rules else ()))
    for figure in (*_FIGURES, *(_DRAFT_FIGURES if drafts else ()), *placing):
        yield figure.column(parts)


def _colour(part: PartRates) -> str:
    return "green" if part.health == _SERVING else "red"


def _number(value: float | None, form: Callable[[float], str]) -> str:
    return "-" if value is None else form(value)


def _latency_text(latency: Latency) -> str:
    if latency.p50_ms is None or latency.p95_ms is None:
        return "-"
    return f"{latency.p50_ms:.0f} / {latency.p95_ms:.0f} ms (p50 / p95)"
