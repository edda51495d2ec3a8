"""Compares placement without the coordinator with the coordinator's own, on the real rules, in virtual time.

``python -m tokenloom.bench.scale.without_coordinator`` prints a table. Requests arrive at random (Poisson) and go
through one of the output processors. At some moment the coordinator dies; each output processor continues by its last
snapshot and its own picks. Times to the first token are compared with those of the same requests while it lives.
"""

import argparse
import heapq
import itertools
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

import numpy as np

from tokenloom.services.coordinator.engines.defaults import PD_THRESHOLD, PLACEMENT
from tokenloom.services.coordinator.engines.engine_placement import Policy
from tokenloom.services.coordinator.engines.engine_registry import Registry
from tokenloom.services.coordinator.feed.snapshot_feed import SnapshotFeed
from tokenloom.services.output_processor.placement.last_snapshot import EngineKey, LastSnapshot
from tokenloom.services.runtime.placement.rules import RULES
from tokenloom.services.runtime.registry.registry_view import RegistryView
from tokenloom.v1.coordinator_pb2 import (
    EngineIdentity,
    EngineReport,
    EngineState,
    PickRequest,
    Snapshot,
    Subset,
    WatchRequest,
)
from tokenloom.v1.engine_pb2 import PickId
from tokenloom.v1.types_pb2 import EngineRole, Fingerprint, ModelLimits

BLOCK_SIZE = 16
MAX_BLOCKS = 256
SEATS = 128
REPORT_SECONDS = 0.2
SNAPSHOT_SECONDS = 0.1
_BOTH, _SERVING = EngineRole.ENGINE_ROLE_BOTH, EngineState.ENGINE_STATE_SERVING
_MODEL = Fingerprint(model="m", tokenizer=b"t", block_size=BLOCK_SIZE)


@dataclass(frozen=True, slots=True)
class Trace:
    """Describes the load: rates are per second, lengths in tokens, drawn uniformly from a range.

    Attributes:
        prefixes: Number of different prefixes; their popularity falls with the rank (Zipf, exponent 1).
        prefill_rate: Prompt tokens that an engine computes in a second.
        step_seconds: Between two tokens of a request.
        num_blocks: Blocks of an engine's KV cache.
    """

    prefixes: int = 1000
    prefix_tokens: tuple[int, int] = (512, 4096)
    suffix_tokens: tuple[int, int] = (64, 512)
    output_tokens: tuple[int, int] = (32, 256)
    prefill_rate: float = 8000.0
    step_seconds: float = 0.02
    num_blocks: int = 8192


@dataclass(slots=True)
class Request:
    """A request of the trace, and when its first token came."""

    at: float
    processor: int
    hashes: Sequence[int]
    prompt_tokens: int
    output_tokens: int
    first_token_at: float = 0.0


def requests(trace: Trace, rate: float, seconds: float, processors: int, seed: int) -> list[Request]:
    """Draw the requests of a run."""
    random = Random(f"requests {seed}")
    weights = list(itertools.accumulate(1 / rank for rank in range(1, trace.prefixes + 1)))
    lengths = [random.randint(*trace.prefix_tokens) for _ in range(trace.prefixes)]
    chains = [[random.getrandbits(64) for _ in range(length // BLOCK_SIZE)] for length in lengths]
    drawn, now = [], random.expovariate(rate)
    while now < seconds:
        (prefix,) = random.choices(range(trace.prefixes), cum_weights=weights)
        suffix = random.randint(*trace.suffix_tokens)
        own = [random.getrandbits(64) for _ in range(suffix // BLOCK_SIZE)]
        hashes = (chains[prefix] + own)[:MAX_BLOCKS]
        tokens = lengths[prefix] + suffix
        drawn.append(Request(now, random.randrange(processors), hashes, tokens, random.randint(*trace.output_tokens)))
        now += random.expovariate(rate)
    return drawn


class Cache:
    """Remembers the blocks of recent prompts, least recently used first. The last block of a prompt is forgotten first:
    it is of no use without the others."""

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._hashes: OrderedDict[int, None] = OrderedDict()

    def match(self, hashes: Sequence[int]) -> int:
        """Return how many blocks at the beginning of a prompt are held."""
        return sum(1 for _ in itertools.takewhile(self._hashes.__contains__, hashes))

    def add(self, hashes: Sequence[int]) -> None:
        for each in reversed(hashes):
            self._hashes[each] = None
            self._hashes.move_to_end(each)
        while len(self._hashes) > self._num_blocks:
            self._hashes.popitem(last=False)


class Engine:
    """Computes one prompt after the other, less what its cache holds, while earlier requests decode."""

    def __init__(self, name: str, trace: Trace) -> None:
        self.identity = EngineIdentity(
            engine_id=name,
            epoch=1,
            fingerprint=_MODEL,
            num_kv_blocks=trace.num_blocks,
            limits=ModelLimits(max_model_len=1 << 20),
        )
        self._trace = trace
        self.cache = Cache(trace.num_blocks)
        self.waiting: deque[Request] = deque()
        self.running = 0
        self.picks: list[PickId] = []
        self.is_busy = False

    def report(self) -> EngineReport:
        picks, self.picks = self.picks, []
        return EngineReport(
            role=_BOTH,
            state=_SERVING,
            waiting=len(self.waiting),
            running=self.running,
            waiting_tokens=sum(request.prompt_tokens for request in self.waiting),
            free_kv_blocks=self.identity.num_kv_blocks,
            picks_arrived=picks,
            seats=SEATS,
            computed_tokens_per_second=self._trace.prefill_rate,
            step_seconds=self._trace.step_seconds,
        )


class Run:
    """Runs a trace in virtual time. ``dies_at``: when the coordinator dies; None: it lives."""

    def __init__(self, trace: Trace, drawn: Sequence[Request], case: "Case", dies_at: float | None):
        engines, processors = case.engines, case.processors
        self._subset = case.subset
        self._trace = trace
        self._now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._releases: dict[int, Callable[[], None]] = {}  # by the ids of live requests
        self._dies_at = float("inf") if dies_at is None else dies_at
        policy = Policy(PD_THRESHOLD, RULES[case.rule])
        self._registry = Registry(1, lambda: self._now, policy=policy, settle_seconds=0.0)
        self._feed = SnapshotFeed(self._registry)
        self.engines = {f"engine-{index}": Engine(f"engine-{index}", trace) for index in range(engines)}
        self._records = {
            name: self._registry.join(engine.identity, engine.report()) for name, engine in self.engines.items()
        }
        self._processors = [LastSnapshot(_MODEL, lambda: self._now, seed=seed * 7919) for seed in range(processors)]
        for request in drawn:
            self._at(request.at, lambda request=request: self._arrive(request))  # type: ignore[misc]
        for index, name in enumerate(self.engines):
            self._at(REPORT_SECONDS * index / engines, lambda name=name: self._report(name))  # type: ignore[misc]
        self._at(0.0, self._publish)

    def run(self, seconds: float) -> None:
        """Run until all requests have ended that arrived within ``seconds``."""
        self._ends_at = seconds
        while self._events:
            self._now, _, happen = heapq.heappop(self._events)
            happen()

    def _at(self, time: float, happen: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time, next(self._order), happen))

    @property
    def _has_coordinator(self) -> bool:
        return self._now < self._dies_at

    def _report(self, name: str) -> None:
        if self._has_coordinator and self._now < self._ends_at:
            self._registry.report(self._records[name], self.engines[name].report())
            self._at(self._now + REPORT_SECONDS, lambda: self._report(name))

    def _publish(self) -> None:
        """Send a snapshot to all output processors. Before the coordinator dies, only the last one matters."""
        if not self._has_coordinator or self._now >= self._ends_at:
            return
        self._registry.refresh()
        if self._now + 2 * SNAPSHOT_SECONDS >= self._dies_at:
            view = RegistryView()
            self._feed.publish(self._now)
            (whole,) = self._feed.log(WatchRequest(changes=True)).after(None)
            view.take(Snapshot.FromString(whole.data))
            for processor in self._processors:
                processor.update(view)
        self._at(self._now + SNAPSHOT_SECONDS, self._publish)

    def _arrive(self, request: Request) -> None:
        pick = PickRequest(
            fingerprint=_MODEL,
            role=EngineRole.ENGINE_ROLE_PREFILL,
            prompt_tokens=request.prompt_tokens,
            block_hash_prefixes=request.hashes,
        )
        if self._subset:
            subset = Subset(index=request.processor, count=len(self._processors), size=self._subset)
            pick.subset.CopyFrom(subset)
        if self._has_coordinator:
            picked = self._registry.pick(pick).response()
            engine, release = self.engines[picked.engine.engine_id], _nothing
            engine.picks.append(picked.pick)
        else:
            processor = self._processors[request.processor]
            picked = processor.pick(pick)
            engine, key = self.engines[picked.engine.engine_id], EngineKey(picked.engine.engine_id, 1)
            release = lambda: processor.release(key)  # noqa: E731
        engine.waiting.append(request)
        self._releases[id(request)] = release
        self._prefill(engine)

    def _prefill(self, engine: Engine) -> None:
        if engine.is_busy or not engine.waiting:
            return
        engine.is_busy = True
        request = engine.waiting[0]
        cached = min(engine.cache.match(request.hashes) * BLOCK_SIZE, request.prompt_tokens - 1)
        self._at(
            self._now + (request.prompt_tokens - cached) / self._trace.prefill_rate + self._trace.step_seconds,
            lambda: self._begin(engine),
        )

    def _begin(self, engine: Engine) -> None:
        """Send the first token of the oldest request."""
        request = engine.waiting.popleft()
        request.first_token_at = self._now
        engine.cache.add(request.hashes)
        engine.running += 1
        engine.is_busy = False
        self._at(self._now + request.output_tokens * self._trace.step_seconds, lambda: self._end(engine, request))
        self._prefill(engine)

    def _end(self, engine: Engine, request: Request) -> None:
        engine.running -= 1
        self._releases.pop(id(request))()


def _nothing() -> None:
    """Release nothing: the coordinator counts by the engines' reports."""


@dataclass(frozen=True, slots=True)
class Case:
    """Describes one comparison; times are in seconds. ``subset``: engines of each output processor; 0: all."""

    rate: float = 120.0
    engines: int = 32
    processors: int = 64
    dies_at: float = 20.0
    settles_at: float = 24.0
    ends_at: float = 44.0
    rule: str = PLACEMENT
    subset: int = 0


def measure(trace: Trace, case: Case, seed: int, *, has_coordinator: bool) -> list[tuple[float, float]]:
    """Return p50 and p99 of the time to the first token: right after the coordinator's death, and later."""
    drawn = requests(trace, case.rate, case.ends_at, case.processors, seed)
    Run(trace, drawn, case, None if has_coordinator else case.dies_at).run(case.ends_at)
    windows = (case.dies_at, case.settles_at), (case.settles_at, case.ends_at)
    late = [[each.first_token_at - each.at for each in drawn if begin <= each.at < end] for begin, end in windows]
    return [(float(np.percentile(each, 50)), float(np.percentile(each, 99))) for each in late]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rates", type=float, nargs="+", default=[60.0, 120.0])
    parser.add_argument("--rule", choices=RULES, default=PLACEMENT, help="of the coordinator")
    parser.add_argument("--subset", type=int, default=0, help="engines of each output processor; 0: all")
    arguments = parser.parse_args()
    print("| requests/s | seed | window | coordinator p50, p99 (s) | without p50, p99 (s) | p99 |")
    print("|---:|---:|---|---:|---:|---:|")
    for rate, seed in itertools.product(arguments.rates, range(arguments.seeds)):
        case = Case(rate=rate, rule=arguments.rule, subset=arguments.subset)
        alive, dead = (measure(Trace(), case, seed, has_coordinator=has) for has in (True, False))
        for window, one, other in zip(("first 4 s", "after"), alive, dead, strict=True):
            print(
                f"| {rate:g} | {seed} | {window} | {one[0]:.2f}, {one[1]:.2f} | {other[0]:.2f}, {other[1]:.2f} "
                f"| {other[1] / one[1]:.2f}x |",
                flush=True,
            )


if __name__ == "__main__":
    main()
