"""Computes rates from two samples of a running local mesh, and shows them as tables on a screen."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from tokenloom.services.runtime.telemetry.fast_metrics import quantile
from tokenloom.supervisor.state_dir import MeshRecord, running_meshes

from ..tables import plain_console
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


_COLUMNS = ("PART", "ROLE", "PID", "HEALTH", "CPU", "MEMORY", "RUN", "WAIT", "KV", "HITS", "PROMPT/S", "TOKENS/S")
_DRAFT_COLUMNS = ("DRAFTS", "TOK/STEP")
_COST_COLUMNS = ("AHEAD", "COST")
_LEFT = ("PART", "ROLE", "HEALTH")


def look_once(mesh: MeshRecord, interval: float) -> MeshRates:
    """Return what a mesh did during an interval of so many seconds."""
    return asyncio.run(_look_once(mesh, interval))


def watch(mesh: MeshRecord, interval: float) -> None:
    """Refresh the screen until the mesh ends."""
    asyncio.run(_watch(mesh, interval))


def shown(seen: MeshRates) -> RenderableType:
    """Return a line for the whole mesh and a row for each part."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    drafts = any(part.draft_acceptance_rate is not None for part in seen.parts)
    rules = {part.placement.rule for part in seen.parts if part.placement is not None}
    placing = (*(("SCORE",) if rules else ()), *(_COST_COLUMNS if "cost" in rules else ()))
    for title in (*_COLUMNS, *(_DRAFT_COLUMNS if drafts else ()), *placing):
        table.add_column(title, no_wrap=True, justify="left" if title in _LEFT else "right")
    for part in seen.parts:
        table.add_row(*_cells(part), *(_draft_cells(part) if drafts else ()), *_placement_cells(part)[: len(placing)])
    return Group(_summary(seen), Text(), table)


async def _watch(mesh: MeshRecord, interval: float) -> None:
    with Live(console=plain_console(), screen=True, auto_refresh=False) as live:
        async for seen in _looks(mesh, interval):
            live.update(shown(seen), refresh=True)


async def _look_once(mesh: MeshRecord, interval: float) -> MeshRates:
    return await anext(_looks(mesh, interval))


async def _looks(mesh: MeshRecord, interval: float) -> AsyncIterator[MeshRates]:
    before = await take_sample(mesh)
    while mesh in running_meshes():
        await asyncio.sleep(interval)
        after = await take_sample(mesh)
        yield view(before, after)
        before = after


def _summary(seen: MeshRates) -> Text:
    rules = {part.placement.rule for part in seen.parts if part.placement and part.placement.rule}
    up = sum(part.health == "SERVING" for part in seen.parts)
    return Text.assemble(
        (f"{up} of {len(seen.parts)} parts are serving", "green" if up == len(seen.parts) else "red"),
        f"   {seen.requests_per_second:.1f} requests/s   {seen.generation_tokens_per_second:,.0f} tokens/s",
        f"   TTFT {_latency_text(seen.time_to_first_token)}   ITL {_latency_text(seen.inter_token_latency)}",
        f"   placement by {' and '.join(sorted(rules))}" if rules else "",
    )


def _cells(part: PartRates) -> list[Text | str]:
    return [
        f"{part.service}-{part.index}",
        part.role or "-",
        "-" if part.pid is None else str(part.pid),
        Text(part.health, "green" if part.health == "SERVING" else "red"),
        _number(part.cpu_percent, "{:.0f} %"),
        _number(part.memory_bytes, "{:,.0f} MB", 1e-6),
        _number(part.running, "{:.0f}"),
        _number(part.waiting, "{:.0f}"),
        _number(part.kv_usage, "{:.0f} %", 100.0),
        _number(part.prefix_hit_rate, "{:.0f} %", 100.0),
        _number(part.prompt_tokens_per_second, "{:,.0f}"),
        _number(part.generation_tokens_per_second, "{:,.0f}"),
    ]


def _draft_cells(part: PartRates) -> list[str]:
    """Return the share of drafts that were right, and the tokens of a step with drafts."""
    return [_number(part.draft_acceptance_rate, "{:.0f} %", 100.0), _number(part.tokens_per_draft, "{:.1f}")]


def _placement_cells(part: PartRates) -> list[str]:
    """Return what the coordinator compares of an engine: the score; prompt tokens to compute, and expected seconds."""
    values = part.placement.values if part.placement else {}
    return [
        _number(values.get("score"), "{:.0f}"),
        _number(values.get("uncached_tokens"), "{:,.0f}"),
        _number(values.get("expected_seconds"), "{:.2f} s"),
    ]


def _number(value: float | None, form: str, factor: float = 1.0) -> str:
    return "-" if value is None else form.format(value * factor)


def _latency_text(latency: Latency) -> str:
    if latency.p50_ms is None or latency.p95_ms is None:
        return "-"
    return f"{latency.p50_ms:.0f} / {latency.p95_ms:.0f} ms (p50 / p95)"
