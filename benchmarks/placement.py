"""Compares rules of placement in a simulation of engines with continuous batching and prefix caches.

    python -m tokenloom.bench.placement [--seeds 1 2 3] [--seconds 30]

Tokenloom's rules run as the coordinator runs them: the real registry under a virtual clock, which sees picks at once
and reports 30 ms apart, with the rates that the engines' own code measures. The others see the engines exactly.

- llm-d: the sum of three parts of the prompt that is cached there and two of the rank between the longest and the
  shortest queue (weights of the default profile, per Red Hat OpenShift AI 3.4, "Configuring scheduler settings for LLM
  inference services"), with queues scraped every 50 ms.
- Dynamo: blocks to prefill, waiting ones and own, plus active blocks ("Router Design", docs.nvidia.com/dynamo).

The engine is that of an 8B model on an H100: a step takes 6 ms, 0.05 ms for each running request and 0.03 ms for each
prompt token, of at most 2,048 tokens. Blocks have 256 tokens here, so that the lists of hashes stay short; "4 k" shows
a rule that sees only the first 4,096 tokens of a prompt, as the coordinator did before.
"""

import argparse
import heapq
import random
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeAlias

import numpy as np

from tokenloom.engine_core.wire.messages import SchedulerStats
from tokenloom.services.coordinator.engine_placement import Policy
from tokenloom.services.coordinator.engine_registry import Registry
from tokenloom.services.engine.queue_rates import QueueRates
from tokenloom.services.engine.step_rates import StepRates
from tokenloom.services.runtime.placement.rules import Rule, cost, score
from tokenloom.v1.coordinator_pb2 import EngineIdentity, EngineReport, EngineState, PickRequest
from tokenloom.v1.engine_pb2 import PickId
from tokenloom.v1.types_pb2 import EngineRole, Fingerprint

BLOCK, KV_BLOCKS, SEATS, BUDGET = 256, 1500, 128, 2048
STEP_SECONDS, SECONDS_PER_REQUEST, SECONDS_PER_TOKEN = 0.006, 0.00005, 0.00003
REPORT_SECONDS, NET_SECONDS, SCRAPE_SECONDS = 0.03, 0.001, 0.05
_FINGERPRINT = Fingerprint(model="m", weights=b"w", tokenizer=b"t", block_size=BLOCK, kv_layout="l", numerics="n")


@dataclass(slots=True, eq=False)
class Request:
    """A request on its way. ``prefix``: hashes of the blocks that it shares with others. Times are seconds."""

    at: float
    prefix: Sequence[int]
    prompt: int
    output: int
    left: int = 0
    cached: int = 0
    ttft: float = 60.0
    pick: PickId | None = None

    @property
    def blocks(self) -> int:
        return -(-(self.prompt + self.output) // BLOCK)


class Engine:
    """Runs steps of chunked prefills and decodes, first come, first served."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.free = KV_BLOCKS
        self.waiting: deque[Request] = deque()
        self.prefilling: list[Request] = []
        self.decoding: list[tuple[int, int, Request]] = []  # a heap by the step that ends each
        self.cache: OrderedDict[int, None] = OrderedDict()
        self.arrived: list[PickId] = []
        self.step = 0
        self.is_busy = self.is_reporting = False
        self.reported_at = 0.0
        self._num_prefilled = self._prefilled_tokens = self._computed_tokens = 0
        self._queue_rates, self._step_rates = QueueRates(SEATS), StepRates()

    @property
    def running(self) -> int:
        return len(self.prefilling) + len(self.decoding)

    @property
    def requests(self) -> int:
        return len(self.waiting) + self.running

    def tokens_to_compute(self) -> int:
        """Return what is left of the prompts that run, and of those that wait without what is cached now."""
        waiting = sum(each.prompt - BLOCK * self.cached_blocks(each.prefix) for each in self.waiting)
        return waiting + sum(each.left for each in self.prefilling)

    def cached_blocks(self, prefix: Sequence[int]) -> int:
        return next((index for index, each in enumerate(prefix) if each not in self.cache), len(prefix))

    def begin_step(self) -> float:
        """Give the prompts that run, then those that wait, the step's budget; return its seconds."""
        budget = BUDGET - len(self.decoding)
        for request in self.prefilling:
            budget -= self._compute(request, budget)
        while budget and self.waiting and self.running < SEATS and self.free >= self.waiting[0].blocks:
            request = self.waiting.popleft()
            self.free -= request.blocks
            request.cached = min(self.cached_blocks(request.prefix) * BLOCK, request.prompt - 1)
            request.left = request.prompt - request.cached
            self.prefilling.append(request)
            budget -= self._compute(request, budget)
        num_tokens = BUDGET - len(self.decoding) - budget
        self._computed_tokens += num_tokens + len(self.decoding)
        return STEP_SECONDS + SECONDS_PER_REQUEST * self.running + SECONDS_PER_TOKEN * num_tokens

    def end_step(self, now: float) -> None:
        """Give the requests of the step their tokens."""
        self.step += 1
        while self.decoding and self.decoding[0][0] <= self.step:
            self.free += heapq.heappop(self.decoding)[2].blocks
        while self.prefilling and not self.prefilling[0].left:
            request = self.prefilling.pop(0)
            request.ttft = now - request.at
            self._num_prefilled += 1
            self._prefilled_tokens += request.prompt
            heapq.heappush(self.decoding, (self.step + request.output - 1, id(request), request))
        stats = SchedulerStats(
            num_waiting=len(self.waiting),
            num_running=self.running,
            kv_usage=1 - self.free / KV_BLOCKS,
            num_prefilled_requests=self._num_prefilled,
            num_prefilled_tokens=self._prefilled_tokens,
            num_computed_tokens=self._computed_tokens,
        )
        self._queue_rates.observe(stats, now)
        self._step_rates.observe(stats, self.step, now)

    def report(self) -> EngineReport:
        """Return what the engine tells the coordinator."""
        picks, self.arrived = self.arrived, []
        return EngineReport(
            role=EngineRole.ENGINE_ROLE_BOTH,
            state=EngineState.ENGINE_STATE_SERVING,
            waiting=len(self.waiting),
            running=self.running,
            waiting_tokens=sum(each.prompt for each in self.waiting),
            kv_usage=1 - self.free / KV_BLOCKS,
            free_kv_blocks=self.free,
            picks_arrived=picks,
            step=self.step,
            seats=self._queue_rates.seats,
            prefill_tokens_per_second=self._queue_rates.prefill_tokens_per_second,
            computed_tokens_per_second=self._step_rates.computed_tokens_per_second,
            prefilling_tokens=sum(each.left for each in self.prefilling),
            step_seconds=self._step_rates.step_seconds,
        )

    def _compute(self, request: Request, budget: int) -> int:
        """Compute a part of a prompt and return its tokens. Its full blocks can be found from then on."""
        num_tokens = min(budget, request.left)
        request.left -= num_tokens
        self._remember(request.prefix[: (request.prompt - request.left) // BLOCK])
        return num_tokens

    def _remember(self, prefix: Sequence[int]) -> None:
        for each in reversed(prefix):
            self.cache[each] = None
            self.cache.move_to_end(each)
        while len(self.cache) > KV_BLOCKS * 0.6:  # the rest belongs to the requests that run
            self.cache.popitem(last=False)


class Placer(Protocol):
    """Chooses engines."""

    def pick(self, request: Request, now: float) -> int:
        """Return the index of the engine for a request."""

    def report(self, engine: Engine) -> None:
        """Take the report of an engine."""


class Ours:
    """The coordinator's registry with one of its rules."""

    def __init__(self, engines: Sequence[Engine], rule: Rule, max_hashes: int) -> None:
        self._now = 0.0
        self._max_hashes = max_hashes
        self._registry = Registry(1, lambda: self._now, policy=Policy(rule=rule), settle_seconds=0)
        self._records = [
            self._registry.join(
                EngineIdentity(engine_id=f"e{each.index}", epoch=1, num_kv_blocks=KV_BLOCKS, fingerprint=_FINGERPRINT),
                each.report(),
            )
            for each in engines
        ]

    def pick(self, request: Request, now: float) -> int:
        self._now = now
        picked = self._registry.pick(
            PickRequest(
                fingerprint=_FINGERPRINT,
                role=EngineRole.ENGINE_ROLE_PREFILL,
                prompt_tokens=request.prompt,
                block_hash_prefixes=request.prefix[: self._max_hashes],
            )
        )
        request.pick = picked.pick
        return int(picked.engine.engine_id[1:])

    def report(self, engine: Engine) -> None:
        self._registry.report(self._records[engine.index], engine.report())


class Choice:
    """A rule that sees the engines exactly: the least of a key, with ties in turn."""

    def __init__(self, engines: Sequence[Engine], key: Callable[[Engine, Request], Any]) -> None:
        self._engines, self._key, self._turn = engines, key, 0

    def pick(self, request: Request, now: float) -> int:
        self._turn += 1
        turn, count = self._turn, len(self._engines)
        return min(self._engines, key=lambda each: (self._key(each, request), (each.index - turn) % count)).index

    def report(self, engine: Engine) -> None:
        pass


class PowerOfTwo(Choice):
    """Of two engines drawn at random, the one with fewer requests."""

    def __init__(self, engines: Sequence[Engine], rng: random.Random) -> None:
        super().__init__(engines, lambda each, _: each.requests)
        self._all, self._rng = engines, rng

    def pick(self, request: Request, now: float) -> int:
        return min(self._rng.sample(self._all, 2), key=lambda each: each.requests).index


class LlmD(Choice):
    """Three parts prefix, two parts queue, of queues that are 50 ms old at most."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        super().__init__(engines, self._negative_score)
        self._all, self._scraped_at, self._queues = engines, -1.0, [0]

    def pick(self, request: Request, now: float) -> int:
        if now - self._scraped_at >= SCRAPE_SECONDS:
            self._scraped_at, self._queues = now, [len(each.waiting) for each in self._all]
        return super().pick(request, now)

    def _negative_score(self, engine: Engine, request: Request) -> float:
        low, high = min(self._queues), max(self._queues)
        queue = (high - self._queues[engine.index]) / (high - low) if high > low else 1.0
        return -(3 * engine.cached_blocks(request.prefix) * BLOCK / request.prompt + 2 * queue)


def _dynamo(engine: Engine, request: Request) -> float:
    own = request.prompt - BLOCK * engine.cached_blocks(request.prefix)
    return (own + engine.tokens_to_compute()) / BLOCK + KV_BLOCKS - engine.free


MakePlacer: TypeAlias = Callable[[Sequence[Engine], random.Random], Placer]
PLACERS: dict[str, MakePlacer] = {
    "score, 4 k": lambda engines, _: Ours(engines, score, 4096 // BLOCK),
    "score": lambda engines, _: Ours(engines, score, 128),
    "cost": lambda engines, _: Ours(engines, cost, 128),
    "random": lambda engines, rng: Choice(engines, lambda *_: rng.random()),
    "round robin": lambda engines, _: Choice(engines, lambda *_: 0),
    "power of two": PowerOfTwo,
    "least outstanding": lambda engines, _: Choice(engines, lambda each, _: each.requests),
    "llm-d": lambda engines, _: LlmD(engines),
    "Dynamo": lambda engines, _: Choice(engines, _dynamo),
}


@dataclass(frozen=True, slots=True)
class Trace:
    """Describes the requests. Without prefixes, nothing is shared and lengths are mixed."""

    name: str
    rate: float
    num_prefixes: int = 0
    median_tokens: float = 0.0
    sigma: float = 0.0

    def requests(self, seconds: float, seed: int) -> list[Request]:
        """Draw the requests of so many seconds."""
        rng = np.random.default_rng(seed)
        times = np.cumsum(rng.exponential(1 / self.rate, int(self.rate * seconds))).tolist()
        return [self._shared(at, rng, seed) if self.num_prefixes else _mixed(at, rng) for at in times]

    def _shared(self, at: float, rng: np.random.Generator, seed: int) -> Request:
        weights = 1 / np.arange(1, self.num_prefixes + 1)  # Zipf
        number = int(np.searchsorted(np.cumsum(weights / weights.sum()), rng.random()))
        own = random.Random(f"{seed}.{number}")
        tokens = min(max(own.lognormvariate(np.log(self.median_tokens), self.sigma), BLOCK), 24_000)
        prefix = [own.getrandbits(63) for _ in range(int(tokens) // BLOCK)]
        prompt = len(prefix) * BLOCK + max(int(rng.lognormal(5.5, 0.8)), 16)
        return Request(at, prefix, prompt, int(min(max(rng.lognormal(5.0, 0.8), 4), 3000)))


def _mixed(at: float, rng: np.random.Generator) -> Request:
    """Return a request of its own; 15 % have long answers."""
    output = rng.lognormal(4.6, 1.0) if rng.random() < 0.85 else rng.lognormal(7.0, 0.5)
    return Request(at, (), int(min(max(rng.lognormal(6.2, 1.0), 16), 16_000)), int(min(max(output, 4), 4000)))


TRACES = (
    Trace("mixed lengths", 190.0),
    Trace("1,000 prefixes of 5 k", 112.0, 1000, 3640.0, 0.8),
    Trace("200 prefixes of 18 k", 52.0, 200, 17_200.0, 0.3),
)


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


def main() -> None:
    """Print a table for each trace: means over the seeds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--seconds", type=float, default=30.0)
    options = parser.parse_args()
    for trace in TRACES:
        print(f"\n{trace.name}, {trace.rate:g} requests/s on 16 engines\n")
        print("| rule | TTFT p50 ms | p99 ms | p99 / today's | max / mean load | cached |")
        print("|---|---|---|---|---|---|")
        today = 0.0
        for name, make in PLACERS.items():
            results = [simulate(trace, make, seed, options.seconds) for seed in options.seeds]
            p50, p99, imbalance, cached = (
                float(np.mean([getattr(each, field) for each in results]))
                for field in ("p50", "p99", "imbalance", "cached")
            )
            today = today or p99
            print(
                f"| {name} | {p50:.0f} | {p99:.0f} | {p99 / today:.2f} | {imbalance:.2f} | {cached:.2f} |", flush=True
            )


if __name__ == "__main__":
    main()
