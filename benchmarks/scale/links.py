"""Compares subsets with all-to-all: streams, rows of a frame, and what placement loses. A simulation on the real rule.

``python -m tokenloom.bench.scale.links`` runs the coordinator's registry in virtual time. Requests come by a Poisson
process and in turn to the output processors; each engine prefills one prompt after the other at a constant rate,
decodes all its streams in steps of constant length, and reports every 200 ms. Runs of one seed have the same requests.
"""

import argparse
import heapq
import itertools
import math
from collections import Counter, OrderedDict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import TypeAlias

from rich.console import Console
from rich.table import Table

from tokenloom.services.coordinator.engines.defaults import PD_THRESHOLD, PLACEMENT
from tokenloom.services.coordinator.engines.engine_placement import Policy
from tokenloom.services.coordinator.engines.engine_record import EngineRecord
from tokenloom.services.coordinator.engines.engine_registry import Registry
from tokenloom.services.runtime.peers import subset
from tokenloom.services.runtime.placement.rules import RULES
from tokenloom.v1.coordinator_pb2 import EngineIdentity, EngineReport, EngineState, PickRequest, Subset
from tokenloom.v1.engine_pb2 import PickId
from tokenloom.v1.types_pb2 import EngineRole, Fingerprint, ModelLimits

from ..report.stats import percentile

MEAN_PROMPT_TOKENS = 1000
PROMPT_SPREAD = 1.0
"""Standard deviation of the logarithm of prompts' lengths: one of a hundred has more than 6,000 tokens."""
MEAN_OUTPUT_TOKENS = 256
STEP_SECONDS = 0.02
REPORT_SECONDS = 0.2
REFRESH_SECONDS = 0.1
BLOCK_SIZE = 16
NUM_BLOCKS = 1 << 15
STREAMS_PER_ENGINE = 64
PREFIX_BLOCKS = 64
"""Blocks of a prefix that requests share, before the prompt of their own."""
CACHED_PREFIXES = 64
"""Prefixes that an engine keeps, a sixteenth of its KV cache."""
WARM_SECONDS = 1.0
_EPOCH = 1
_MODEL = Fingerprint(model="m", block_size=BLOCK_SIZE)

Pair: TypeAlias = tuple[int, int]
"""Numbers of an output processor and an engine."""


@dataclass(frozen=True, slots=True)
class Case:
    """Describes a mesh and its load.

    Attributes:
        size: Of a subset; None: all-to-all.
        load: Share of the time for which an engine prefills, shared prefixes not counted.
        prefixes: That requests begin with, by Zipf's law; 0: they share none.
        seconds: That are measured.
    """

    engines: int
    output_processors: int
    size: int | None
    load: float
    seconds: float
    seed: int
    prefixes: int = 0


@dataclass(frozen=True, slots=True)
class Result:
    """Holds what one run showed.

    Attributes:
        links: Streams that carried a request while it was measured, those left out at the start included.
        rows_per_frame: Streams of an engine that share a frame to one output processor, on average.
        ttfts: Seconds to the first token, of each request.
    """

    links: int
    rows_per_frame: float
    ttfts: Sequence[float]

    @property
    def p99(self) -> float:
        return percentile(self.ttfts, 99)


@dataclass(slots=True)
class FakeEngine:
    """Prefills in order and decodes all at once."""

    record: EngineRecord
    free_at: float = 0.0
    running: int = 0
    tokens: int = 0  # of its live requests
    prompts: deque[int] = field(default_factory=deque)  # lengths of those that wait or are computed
    arrived: list[PickId] = field(default_factory=list)
    prefixes: OrderedDict[int, None] = field(default_factory=OrderedDict)  # that it keeps, the last used at the end

    def uncached(self, prefix: int | None) -> int:
        """Return how many tokens of a prefix are not kept, and keep it from now on."""
        if prefix is None:
            return 0
        tokens = 0 if prefix in self.prefixes else PREFIX_BLOCKS * BLOCK_SIZE
        self.prefixes[prefix] = None
        self.prefixes.move_to_end(prefix)
        if len(self.prefixes) > CACHED_PREFIXES:
            self.prefixes.popitem(last=False)
        return tokens


class Simulation:
    """Runs one case in virtual time."""

    def __init__(self, case: Case) -> None:
        self._case = case
        self._random = Random(case.seed)
        self._requests = Random(f"requests {case.seed}")
        self._prefix_weights = list(itertools.accumulate(1 / rank for rank in range(1, case.prefixes + 1)))
        self._now = 0.0
        policy = Policy(PD_THRESHOLD, RULES[PLACEMENT])
        self._registry = Registry(_EPOCH, lambda: self._now, policy=policy, settle_seconds=0)
        self._engines = [FakeEngine(self._registry.join(_identity(n), _report())) for n in range(case.engines)]
        self._numbers = {each.record.identity.engine_id: number for number, each in enumerate(self._engines)}
        self._events: list[tuple[float, int, Iterator[float]]] = []
        self._count = itertools.count()
        self._live: Counter[Pair] = Counter()
        self._links: set[Pair] = set()
        self._ttfts: list[float] = []
        names = [f"output-processor-{number}" for number in range(case.output_processors)]
        places = subset.positions(names)
        size = case.size or case.engines
        self._subsets = [Subset(index=places[name].index, count=places[name].count, size=size) for name in names]
        # The output processors of each engine.
        self._owners: list[list[int]] = [[] for _ in self._engines]
        for owner, name in enumerate(names):
            for engine_id in subset.choose(self._numbers, places[name], size):
                self._owners[self._numbers[engine_id]].append(owner)

    def run(self) -> Result:
        """Return what the case shows."""
        end = WARM_SECONDS + self._case.seconds
        self._start(self._arrivals())
        self._start(self._refreshes())
        for number, engine in enumerate(self._engines):
            self._start(self._reports(engine))
            for _ in range(STREAMS_PER_ENGINE):
                self._start(self._old_stream(number))
        samples: list[float] = []
        while self._events[0][0] < end:
            before, (self._now, _, process) = self._now, heapq.heappop(self._events)
            if int(before / REPORT_SECONDS) < int(self._now / REPORT_SECONDS) and self._now > WARM_SECONDS:
                samples.append(self._live.total() / len(self._live))
            if (wait := next(process, None)) is not None:
                heapq.heappush(self._events, (self._now + wait, next(self._count), process))
        return Result(len(self._links), sum(samples) / len(samples), self._ttfts)

    def _start(self, process: Iterator[float]) -> None:
        heapq.heappush(self._events, (self._now, next(self._count), process))

    def _arrivals(self) -> Iterator[float]:
        # As many as keep each engine's streams at their number.
        rate = self._case.engines * STREAMS_PER_ENGINE / (MEAN_OUTPUT_TOKENS * STEP_SECONDS)
        for number in itertools.count():
            yield self._requests.expovariate(rate)
            lengths, prefix = _lengths(self._requests), self._prefix()
            self._start(self._request(number % self._case.output_processors, prefix, *lengths))

    def _prefix(self) -> int | None:
        if not self._case.prefixes:
            return None
        return self._requests.choices(range(self._case.prefixes), cum_weights=self._prefix_weights)[0]

    def _request(
        self, output_processor: int, prefix: int | None, own_tokens: int, output_tokens: int
    ) -> Iterator[float]:
        hashes = () if prefix is None else range(prefix << 16, (prefix << 16) + PREFIX_BLOCKS)
        prompt_tokens = own_tokens + len(hashes) * BLOCK_SIZE
        response = self._registry.pick(
            PickRequest(
                fingerprint=_MODEL,
                role=EngineRole.ENGINE_ROLE_BOTH,
                prompt_tokens=prompt_tokens,
                block_hash_prefixes=hashes,
                subset=self._subsets[output_processor],
            )
        )
        number, arrived_at = self._numbers[response.engine.engine_id], self._now
        engine, pair = self._engines[number], (output_processor, number)
        self._links.add(pair)
        engine.arrived.append(response.pick)
        engine.prompts.append(prompt_tokens)
        engine.tokens += prompt_tokens
        computed_tokens = own_tokens + engine.uncached(prefix)
        engine.free_at = max(engine.free_at, self._now) + computed_tokens / self._prefill_rate()
        yield engine.free_at - self._now
        engine.prompts.popleft()
        if arrived_at >= WARM_SECONDS:
            self._ttfts.append(self._now - arrived_at)
        yield from self._decode(pair, prompt_tokens, output_tokens)

    def _old_stream(self, number: int) -> Iterator[float]:
        """Run what is left of a stream that began before: with exponential lengths, as much as of a new one."""
        pair = self._random.choice(self._owners[number]), number
        prompt_tokens, output_tokens = _lengths(self._random)
        self._engines[number].tokens += prompt_tokens
        yield from self._decode(pair, prompt_tokens, output_tokens)

    def _decode(self, pair: Pair, prompt_tokens: int, output_tokens: int) -> Iterator[float]:
        engine = self._engines[pair[1]]
        engine.running += 1
        self._live[pair] += 1
        yield output_tokens * STEP_SECONDS
        engine.running -= 1
        engine.tokens -= prompt_tokens
        self._live[pair] -= 1
        if not self._live[pair]:
            del self._live[pair]

    def _reports(self, engine: FakeEngine) -> Iterator[float]:
        yield self._random.uniform(0, REPORT_SECONDS)
        while True:
            arrived, engine.arrived = engine.arrived, []
            report = _report(
                waiting=len(engine.prompts),
                running=engine.running,
                waiting_tokens=sum(engine.prompts),
                free_kv_blocks=max(NUM_BLOCKS - engine.tokens // BLOCK_SIZE, 0),
                picks_arrived=arrived,
                step=round(self._now / STEP_SECONDS),
            )
            self._registry.report(engine.record, report)
            yield REPORT_SECONDS

    def _refreshes(self) -> Iterator[float]:
        while True:
            self._registry.refresh()
            yield REFRESH_SECONDS

    def _prefill_rate(self) -> float:
        """Return an engine's prompt tokens per second, of which the load uses the share that the case asks for."""
        arrivals = STREAMS_PER_ENGINE / (MEAN_OUTPUT_TOKENS * STEP_SECONDS)
        return arrivals * MEAN_PROMPT_TOKENS / self._case.load


def _lengths(random: Random) -> tuple[int, int]:
    """Draw the lengths of a prompt and of its output."""
    shift = math.log(MEAN_PROMPT_TOKENS) - PROMPT_SPREAD**2 / 2
    prompt = min(max(round(random.lognormvariate(shift, PROMPT_SPREAD)), 1), 32_768)
    return prompt, math.ceil(random.expovariate(1 / MEAN_OUTPUT_TOKENS))


def _identity(number: int) -> EngineIdentity:
    return EngineIdentity(
        engine_id=f"engine-{number}",
        epoch=1,
        address=f"unix:/{number}",
        fingerprint=_MODEL,
        num_kv_blocks=NUM_BLOCKS,
        limits=ModelLimits(max_model_len=1 << 17, vocab_size=1 << 17),
    )


def _report(**fields: object) -> EngineReport:
    values = {
        "role": EngineRole.ENGINE_ROLE_BOTH,
        "state": EngineState.ENGINE_STATE_SERVING,
        "free_kv_blocks": NUM_BLOCKS,
    }
    return EngineReport(**{**values, **fields})  # type: ignore[arg-type]


def show(cases: Sequence[tuple[Case, Result]]) -> Table:
    """Return a table of the results; each TTFT is also given relative to the run before without a subset."""
    table = Table("subset", "load", "seed", "links", "rows a frame", "TTFT p50 ms", "TTFT p99 ms", "p99 to all-to-all")
    base = math.nan
    for case, result in cases:
        base = result.p99 if case.size is None else base
        table.add_row(
            "all" if case.size is None else str(case.size),
            f"{case.load:.2f}",
            str(case.seed),
            f"{result.links:,}",
            f"{result.rows_per_frame:.1f}",
            f"{1000 * percentile(result.ttfts, 50):.1f}",
            f"{1000 * result.p99:.1f}",
            f"{result.p99 / base:.3f}",
        )
    return table


def main() -> int:
    """Run the cases that the arguments name, and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--engines", type=int, default=1000)
    parser.add_argument("--output-processors", type=int, default=100)
    parser.add_argument("--subset", type=int, default=32)
    parser.add_argument("--loads", type=float, nargs="+", default=[0.7])
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--prefixes", type=int, default=0)
    asked = parser.parse_args()
    cases = [
        Case(asked.engines, asked.output_processors, size, load, asked.seconds, seed, asked.prefixes)
        for load in asked.loads
        for seed in range(1, asked.seeds + 1)
        for size in (None, asked.subset)
    ]
    Console(width=120).print(show([(case, Simulation(case).run()) for case in cases]))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
