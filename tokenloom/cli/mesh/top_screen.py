"""Shows samples of a running local mesh as tables on a screen."""

import asyncio
from collections.abc import AsyncIterator

from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from tokenloom.supervisor.state_dir import MeshRecord, running_meshes

from ..tables import plain_console
from .mesh_rates import Latency, MeshRates, PartRates, view
from .mesh_sample import take_sample

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
        f"   TTFT {_latency(seen.time_to_first_token)}   ITL {_latency(seen.inter_token_latency)}",
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


def _latency(latency: Latency) -> str:
    if latency.p50_ms is None or latency.p95_ms is None:
        return "-"
    return f"{latency.p50_ms:.0f} / {latency.p95_ms:.0f} ms (p50 / p95)"
