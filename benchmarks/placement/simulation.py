"""Runs a trace through engines under a virtual clock."""

import heapq
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from .engine import NET_SECONDS, REPORT_SECONDS, Engine, Request
from .placers import MakePlacer, Placer
from .traces import Trace


@dataclass(frozen=True, slots=True)
class Result:
    """Says how the requests fared. Times to the first token are milliseconds; ``imbalance`` is the mean over time of
    the largest number of requests of an engine over the mean; ``cached`` is the share of prompt tokens."""

    p50: float
    p99: float
    imbalance: float
    cached: float


def simulate(trace: Trace, make: MakePlacer, seed: int, seconds: float, num_engines: int = 16) -> Result:
    """Run a trace; its first 30 % warm the caches up and are not counted."""
    requests = trace.requests(seconds, seed)
    engines = [Engine(index) for index in range(num_engines)]
    run = _Run(engines, make(engines, random.Random(seed)), seconds * 0.3, requests)
    run.run()
    counted = [each for each in requests if each.at >= seconds * 0.3]
    p50, p99 = np.percentile([each.ttft * 1e3 for each in counted], [50, 99])
    cached = sum(each.cached for each in counted) / sum(each.prompt for each in counted)
    return Result(float(p50), float(p99), float(np.mean(run.imbalances)), cached)


class _Run:
    """Holds the queue of events: each is a time, a number that orders equals, and what happens."""

    def __init__(self, engines: Sequence[Engine], placer: Placer, warm: float, requests: Sequence[Request]) -> None:
        self.imbalances: list[float] = []
        self._engines, self._placer, self._end = engines, placer, requests[-1].at
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._count = 0
        for request in requests:
            self._at(request.at, partial(self._place, request))
        for number in range(int((self._end - warm) / 0.25)):
            self._at(warm + 0.25 * number, self._sample)
        for engine in engines:
            self._heartbeat(engine, engine.index / len(engines))

    def run(self) -> None:
        """Let everything happen, until 20 s after the last request."""
        while self._events and self._events[0][0] <= self._end + 20:
            now, _, happen = heapq.heappop(self._events)
            happen(now)

    def _at(self, time: float, happen: Callable[[float], None]) -> None:
        self._count += 1
        heapq.heappush(self._events, (time, self._count, happen))

    def _place(self, request: Request, now: float) -> None:
        engine = self._engines[self._placer.pick(request, now)]
        self._at(now + 2 * NET_SECONDS, lambda now: self._arrive(engine, request, now))

    def _arrive(self, engine: Engine, request: Request, now: float) -> None:
        engine.waiting.append(request)
        if request.pick is not None:
            engine.arrived.append(request.pick)
        self._changed(engine, now)
        if not engine.is_busy:
            engine.is_busy = True
            self._step(engine, now)

    def _step(self, engine: Engine, now: float) -> None:
        self._at(now + engine.begin_step(), lambda now: self._end_step(engine, now))

    def _end_step(self, engine: Engine, now: float) -> None:
        before = engine.requests
        engine.end_step(now)
        if engine.requests != before or engine.waiting:
            self._changed(engine, now)
        engine.is_busy = engine.requests > 0
        if engine.is_busy:
            self._step(engine, now)

    def _changed(self, engine: Engine, now: float) -> None:
        if not engine.is_reporting:
            engine.is_reporting = True
            self._at(max(now, engine.reported_at + REPORT_SECONDS) + NET_SECONDS, lambda now: self._report(engine, now))

    def _report(self, engine: Engine, now: float) -> None:
        engine.is_reporting, engine.reported_at = False, now
        self._placer.report(engine)

    def _heartbeat(self, engine: Engine, now: float) -> None:
        self._changed(engine, now)
        self._at(now + 1.0, lambda now: self._heartbeat(engine, now))

    def _sample(self, now: float) -> None:
        loads = [each.requests for each in self._engines]
        self.imbalances.append(max(loads) * len(loads) / max(sum(loads), 1))
