"""Remembers ten minutes of the gateway's traffic, for a page without Prometheus."""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple, NoReturn

from tokenloom.services.runtime.telemetry.fast_metrics import Histogram, quantile

from ..http.response_counts import ResponseCounts
from ..mesh.mesh_view import MeshLoad
from ..metrics.gateway_metrics import GatewayMetrics
from ..serving.served_mesh import ServedMesh
from ..serving.served_meshes import ServedMeshes

INTERVAL_SECONDS = 5.0
NUM_INTERVALS = 120
"""Ten minutes."""
_HALF, _MOST = 0.5, 0.95


class Interval(NamedTuple):
    """Sums up one interval. Times are milliseconds, rates are per second; None: nothing was measured."""

    ttft_p50_ms: float | None
    ttft_p95_ms: float | None
    itl_p50_ms: float | None
    itl_p95_ms: float | None
    output_tokens_per_second: float
    prompt_tokens_per_second: float
    hit_share: float | None
    """Share of the prompt tokens of finished requests that were in a prefix cache, 0 to 1."""
    missed: dict[str, int]
    """Prompt tokens of conversations that an earlier turn would have spared, by why they were computed again."""
    refused: dict[str, int]
    """Requests that ended in an error, by its reason."""
    running: int
    """Requests in the batches of all engines at the end of the interval."""
    waiting: int
    kv_usage: float


@dataclass(frozen=True, slots=True)
class _Totals:
    """Holds what had been counted since the start of the gateway."""

    at: float
    ttft: tuple[int, ...]
    itl: tuple[int, ...]
    output_tokens: int
    prompt_tokens: int
    finished_prompt_tokens: int
    cached_tokens: int
    missed: dict[str, int]
    refused: dict[str, int]


class Traffic:
    """Compares the counters of one model at an interval."""

    def __init__(self, metrics: GatewayMetrics, counts: ResponseCounts, load: Callable[[], MeshLoad]) -> None:
        """``load``: returns the load of all engines now."""
        self._metrics = metrics
        self._counts = counts
        self._load = load
        self._intervals: deque[Interval] = deque(maxlen=NUM_INTERVALS)
        self._ended_at = time.time()
        self._before = self._totals()

    def end_interval(self) -> None:
        """Add what happened since the last call."""
        before, self._before = self._before, self._totals()
        self._ended_at = time.time()
        # The counters are compared every 5 s instead of observed: nothing is added per token, and the last ten minutes
        # need no open page.
        self._intervals.append(self._compare(before, self._before))

    def columns(self) -> dict[str, object]:
        """Return the intervals, the oldest first, as a list for each field; ``ended_at`` is in Unix seconds."""
        columns = {
            name: [interval[index] for interval in self._intervals] for index, name in enumerate(Interval._fields)
        }
        return {"interval_seconds": INTERVAL_SECONDS, "ended_at": round(self._ended_at, 3), **columns}

    def _totals(self) -> _Totals:
        metrics = self._metrics
        return _Totals(
            at=asyncio.get_running_loop().time(),
            ttft=metrics.time_to_first_token.counts,
            itl=metrics.inter_token_latency.counts,
            output_tokens=metrics.generation_tokens.value,
            prompt_tokens=metrics.prompt_tokens.value,
            finished_prompt_tokens=metrics.kv_flow.num_prompt_tokens,
            cached_tokens=metrics.kv_flow.num_cached_tokens,
            missed=dict(metrics.missed_tokens),
            refused=self._counts.refused(),
        )

    def _compare(self, before: _Totals, after: _Totals) -> Interval:
        seconds = max(after.at - before.at, 1e-9)
        finished = after.finished_prompt_tokens - before.finished_prompt_tokens
        cached = after.cached_tokens - before.cached_tokens
        load, metrics = self._load(), self._metrics
        return Interval(
            *_quantiles(metrics.time_to_first_token, before.ttft, after.ttft),
            *_quantiles(metrics.inter_token_latency, before.itl, after.itl),
            output_tokens_per_second=round((after.output_tokens - before.output_tokens) / seconds, 2),
            prompt_tokens_per_second=round((after.prompt_tokens - before.prompt_tokens) / seconds, 2),
            hit_share=round(cached / finished, 4) if finished else None,
            missed=_gained(before.missed, after.missed),
            refused=_gained(before.refused, after.refused),
            running=load.num_running,
            waiting=load.num_waiting,
            kv_usage=round(load.kv_usage, 4),
        )


class Traffics:
    """Holds the traffic of every model. Refused requests are those of all models: some name none."""

    def __init__(self, meshes: ServedMeshes, counts: ResponseCounts) -> None:
        self._meshes = meshes
        self._counts = counts
        self._by_model = {mesh.model: self._of(mesh) for mesh in meshes}

    def of(self, mesh: ServedMesh) -> Traffic:
        """Return the traffic of a model, which begins now if its mesh has just been connected."""
        if mesh.model not in self._by_model:
            self._by_model[mesh.model] = self._of(mesh)
        return self._by_model[mesh.model]

    async def run(self) -> NoReturn:
        """End an interval every :data:`INTERVAL_SECONDS`, until cancelled."""
        while True:
            await asyncio.sleep(INTERVAL_SECONDS)
            for mesh in self._meshes:
                self.of(mesh).end_interval()

    def _of(self, mesh: ServedMesh) -> Traffic:
        return Traffic(mesh.metrics, self._counts, mesh.view.load)


def _gained(before: dict[str, int], after: dict[str, int]) -> dict[str, int]:
    return {name: gained for name, count in after.items() if (gained := count - before.get(name, 0)) > 0}


def _quantiles(
    histogram: Histogram, before: tuple[int, ...], after: tuple[int, ...]
) -> tuple[float | None, float | None]:
    """Return the median and the 95th percentile of what was observed in between, in milliseconds."""
    gained = accumulate(new - old for old, new in zip(before, after, strict=True))
    buckets = dict(zip((*histogram.bounds, float("inf")), gained, strict=True))
    return _milliseconds(quantile(buckets, _HALF)), _milliseconds(quantile(buckets, _MOST))


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else round(1e3 * seconds, 2)
