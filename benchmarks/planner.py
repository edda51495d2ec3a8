"""Simulates a mesh whose load changes, with the real planner and with fixed splits of the same engines.

    python -m tokenloom.bench.planner [--seed 1]

Each engine is that of a large model on one node: it prefills 12,000 tokens/s, a step takes 20 ms and 0.15 ms for each
running request, and its KV cache holds 600,000 tokens. A new engine serves after 120 s, a change of role takes 2 s, and
an engine that is removed finishes what it has. Prefill is first come, first served; a decode engine shares its steps.
The planner looks every 10 s at what the engines' own measurements say. A request attains its objective if its first
token came within 2 s and its later ones took at most 50 ms on average.
The fixed splits have, for the whole time, as many engines as the planner had on average, rounded up, in the shares that
the mean load needs.
"""

import argparse
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from tokenloom.engine_core.data.messages import SchedulerStats
from tokenloom.planner.demand import EngineLoad, Goals, PlannedRole
from tokenloom.planner.planner import Limits, Plan, Planner
from tokenloom.services.engine.records.load import QueueRates, StepRates

GOALS = Goals(ttft_seconds=2.0, itl_seconds=0.05)
PREFILL_RATE, STEP_BASE, STEP_SLOPE = 12_000.0, 0.020, 0.00015
KV_TOKENS, SEATS = 600_000, 256
TICK, LOOK = 0.5, 10.0
START_SECONDS, CHANGE_SECONDS = 120.0, 2.0
SETTLED_SECONDS = 600.0
"""A decision that is taken back within so long counts as an oscillation."""


@dataclass(frozen=True, slots=True)
class Load:
    """Describes the requests of one moment.

    Attributes:
        rate: Requests per second.
        prompt, output: Mean tokens; both are log-normal.
    """

    rate: float
    prompt: float = 1500.0
    output: float = 250.0

    def engines(self) -> tuple[float, float]:
        """Return how many engines the load keeps busy: prefilling, and decoding at the goal."""
        batch = (GOALS.itl_seconds - STEP_BASE) / STEP_SLOPE
        return self.rate * self.prompt / PREFILL_RATE, self.rate * self.output * GOALS.itl_seconds / batch


@dataclass(frozen=True, slots=True)
class Scenario:
    """Names a course of load. ``most`` bounds the planner's engines."""

    name: str
    seconds: float
    load_at: Callable[[float], Load]
    most: int = 64


def _step(now: float) -> Load:
    return Load(60.0 if 900 <= now < 1800 else 16.0)


def _ramp(now: float) -> Load:
    return Load(5.0 + 85.0 * max(1 - abs(now - 1800) / 1500, 0.0))


def _day(now: float) -> Load:
    """A day in two hours: few requests at night, long prompts by day, long answers in the evening."""
    hour = now / 300
    rate = 12.0 + 48.0 * max(math.sin(math.pi * (hour - 5) / 19), 0.0) ** 1.5 if hour >= 5 else 12.0
    evening = 1 / (1 + math.exp(-(hour - 17)))
    return Load(rate, 1900 - 1100 * evening, 180 + 220 * evening)


def _shift(now: float) -> Load:
    """The same rate, but the work moves from prompts to answers and back."""
    return Load(48.0, 2000, 180) if now < 1200 or now >= 2700 else Load(48.0, 700, 480)


SCENARIOS = (
    Scenario("step", 3600, _step),
    Scenario("ramp", 3600, _ramp),
    Scenario("day in 2 h", 7200, _day),
    Scenario("mix shifts, 14 engines", 4200, _shift, most=14),
)


@dataclass(slots=True)
class Request:
    """A request on its way. Times are seconds of the simulation."""

    at: float
    prompt: int
    output: int
    first: float = math.inf
    end: float = math.inf

    def attains(self) -> bool:
        """Return whether it kept to both goals."""
        itl = (self.end - self.first) / max(self.output - 1, 1) if math.isfinite(self.end) else math.inf
        return self.first - self.at <= GOALS.ttft_seconds and itl <= GOALS.itl_seconds


class Engine:
    """Prefills or decodes, and measures itself as a real engine does."""

    def __init__(self, name: str, role: PlannedRole, ready_at: float) -> None:
        self.name, self.role, self.ready_at = name, role, ready_at
        self.is_leaving = False
        self.prompts: deque[Request] = deque()  # to prefill
        self.queue: deque[Request] = deque()  # prefilled, and waiting for a place in the batch
        self.running: list[Request] = []
        self.waiting_tokens = 0.0
        self._computed = 0.0  # tokens of the first prompt
        self._left: npt.NDArray[np.float64] = np.zeros(0)  # tokens of each running request
        self._kv_tokens = self._steps = self._now = 0.0
        self._stats = SchedulerStats()
        self._queue_rates, self._step_rates = QueueRates(SEATS), StepRates()

    @property
    def num_requests(self) -> int:
        return len(self.prompts) + len(self.queue) + len(self.running)

    def add_prompt(self, request: Request) -> None:
        self.prompts.append(request)
        self.waiting_tokens += request.prompt

    def prefill(self, now: float, seconds: float) -> list[Request]:
        """Compute prompts for a while; return the requests that have their first token."""
        budget, done = PREFILL_RATE * seconds, []
        while self.prompts and (left := self.prompts[0].prompt - self._computed) <= budget:
            request = self.prompts.popleft()
            budget -= left
            self.waiting_tokens -= left
            self._computed = 0.0
            request.first = max(now + seconds - budget / PREFILL_RATE, request.at + request.prompt / PREFILL_RATE)
            done.append(request)
        if self.prompts:
            self._computed += budget
            self.waiting_tokens -= budget
        self._observe(now + seconds, seconds / STEP_BASE, done, num_running=min(len(self.prompts), 1))
        return done

    def decode(self, now: float, seconds: float) -> None:
        """Let the batch take its steps for a while."""
        while self.queue and len(self.running) < SEATS and self._kv_tokens < KV_TOKENS:
            request = self.queue.popleft()
            self.running.append(request)
            self._left = np.append(self._left, request.output - 1.0)
            self._kv_tokens += request.prompt + request.output
        step = STEP_BASE + STEP_SLOPE * len(self.running)
        self._left -= seconds / step
        over = np.flatnonzero(self._left <= 0)
        for index in reversed(over):
            request = self.running.pop(index)
            request.end = now + seconds + float(self._left[index]) * step
            self._kv_tokens -= request.prompt + request.output
        self._left = np.delete(self._left, over)
        self._observe(now + seconds, seconds / step, (), num_running=len(self.running))

    def report(self) -> EngineLoad:
        """Return what the planner sees."""
        return EngineLoad(
            name=self.name,
            role=self.role,
            waiting=self._stats.num_waiting,
            running=self._stats.num_running,
            waiting_tokens=round(self.waiting_tokens) if self.role == PlannedRole.PREFILL else 0,
            kv_usage=self._kv_tokens / KV_TOKENS,
            seats=self._queue_rates.seats,
            step_seconds=self._step_rates.step_seconds,
            step_requests=self._step_rates.step_requests,
            starts_per_second=self._queue_rates.starts_per_second,
            prompt_tokens_per_second=self._step_rates.prompt_tokens_per_second(self._now),
            prefill_tokens_per_second=self._queue_rates.prefill_tokens_per_second,
        )

    def _observe(self, now: float, num_steps: float, done: Sequence[Request], *, num_running: int) -> None:
        self._now = now
        self._steps += num_steps
        self._stats = SchedulerStats(
            num_waiting=len(self.queue) + max(len(self.prompts) - 1, 0),
            num_running=num_running,
            kv_usage=self._kv_tokens / KV_TOKENS,
            num_prefilled_requests=self._stats.num_prefilled_requests + len(done),
            num_prefilled_tokens=self._stats.num_prefilled_tokens + sum(each.prompt for each in done),
        )
        self._queue_rates.observe(self._stats, now)
        self._step_rates.observe(self._stats, round(self._steps), now)


class Mesh:
    """Holds the engines, places requests on the least loaded one, and carries out plans."""

    def __init__(self, prefill: int, decode: int) -> None:
        self._count = 0
        self.engines: list[Engine] = []
        self._start(PlannedRole.PREFILL, prefill, 0.0)
        self._start(PlannedRole.DECODE, decode, 0.0)
        self.engine_seconds = 0.0

    def serving(self, now: float) -> list[Engine]:
        return [each for each in self.engines if each.ready_at <= now and not each.is_leaving]

    def tick(self, arrived: Sequence[Request], now: float) -> None:
        """Place what arrived, and let all engines work for one tick."""
        ready = self.serving(now)
        prefilling = [each for each in ready if each.role == PlannedRole.PREFILL]
        decoding = [each for each in ready if each.role == PlannedRole.DECODE]
        for request in arrived:
            min(prefilling, key=lambda each: each.waiting_tokens).add_prompt(request)
        for engine in self.engines:  # an engine whose role changed finishes what it has
            if engine.ready_at <= now or engine.num_requests:
                if engine.role == PlannedRole.PREFILL or engine.prompts:
                    for request in engine.prefill(now, TICK):
                        min(decoding, key=lambda each: each.num_requests).queue.append(request)
                if engine.role == PlannedRole.DECODE or engine.queue or engine.running:
                    engine.decode(now, TICK)
        self.engines = [each for each in self.engines if not each.is_leaving or each.num_requests]
        self.engine_seconds += TICK * len(self.engines)

    def apply(self, plan: Plan, now: float) -> None:
        """Change roles, start and remove engines."""
        for flip in plan.flips:
            engine = next(each for each in self.engines if each.name == flip.engine)
            engine.role, engine.ready_at = flip.role, now + CHANGE_SECONDS
        for role, wanted in plan.wanted.items():
            present = [each for each in self.engines if each.role == role and not each.is_leaving]
            self._start(role, max(wanted - len(present), 0), now + START_SECONDS)
            present.sort(key=lambda each: (-each.ready_at, each.num_requests))  # those that still start go first
            for engine in present[: max(len(present) - wanted, 0)]:
                engine.is_leaving = True

    def _start(self, role: PlannedRole, count: int, ready_at: float) -> None:
        for _ in range(count):
            self.engines.append(Engine(f"{role}-{self._count}", role, ready_at))
            self._count += 1


@dataclass(slots=True)
class Outcome:
    """Says how a run went.

    Attributes:
        attained: Share of the requests that kept to both goals.
        engines: How many there were on average.
        flips, changes: Changes of roles, and of the number of engines.
        reversals: Decisions that were taken back within :data:`SETTLED_SECONDS`.
    """

    attained: float
    engines: float
    flips: int = 0
    changes: int = 0
    reversals: int = 0


@dataclass(slots=True)
class _Decisions:
    """Counts decisions and those that were taken back."""

    wanted: dict[PlannedRole, int] = field(default_factory=dict)
    flips: int = 0
    changes: int = 0
    reversals: int = 0
    _last: dict[str, tuple[float, int]] = field(default_factory=dict)

    def note(self, plan: Plan, now: float) -> None:
        for flip in plan.flips:
            self.flips += 1
            self._direction("flip", now, 1 if flip.role == PlannedRole.PREFILL else -1)
        if not plan.flips:
            for role, wanted in plan.wanted.items():
                if wanted != self.wanted.get(role, wanted):
                    self.changes += 1
                    self._direction(role, now, 1 if wanted > self.wanted[role] else -1)
        self.wanted = dict(plan.wanted)

    def _direction(self, what: str, now: float, direction: int) -> None:
        at, before = self._last.get(what, (-math.inf, direction))
        self.reversals += before != direction and now - at < SETTLED_SECONDS
        self._last[what] = now, direction


def simulate(scenario: Scenario, seed: int, fixed: tuple[int, int] | None = None) -> Outcome:
    """Run a scenario with the planner, or with so many prefill and decode engines."""
    rng = np.random.default_rng(seed)
    start = tuple(max(math.ceil(each / GOALS.busy), 1) for each in scenario.load_at(0.0).engines())
    mesh = Mesh(*(fixed or start))
    planner, decisions = Planner(GOALS, Limits(most=scenario.most)), _Decisions()
    requests: list[Request] = []
    next_look = LOOK
    for tick in range(int(scenario.seconds / TICK)):
        now = tick * TICK
        load = scenario.load_at(now)
        arrived = [
            Request(now, max(int(prompt), 16), max(int(output), 2))
            for prompt, output in zip(
                *(
                    _log_normal(rng, mean, count)
                    for count in (rng.poisson(load.rate * TICK),)
                    for mean in (load.prompt, load.output)
                ),
                strict=True,
            )
        ]
        requests += arrived
        mesh.tick(arrived, now)
        if fixed is None and now >= next_look:
            next_look += LOOK
            plan = planner.plan([each.report() for each in mesh.serving(now)], now)
            decisions.note(plan, now)
            mesh.apply(plan, now)
    over = [each for each in requests if each.at < scenario.seconds - 60]
    attained = sum(each.attains() for each in over) / len(over)
    return Outcome(
        attained, mesh.engine_seconds / scenario.seconds, decisions.flips, decisions.changes, decisions.reversals
    )


def _log_normal(rng: np.random.Generator, mean: float, count: int) -> npt.NDArray[np.float64]:
    sigma = 0.8
    return rng.lognormal(math.log(mean) - sigma * sigma / 2, sigma, count)


def fixed_split(scenario: Scenario, engines: float) -> tuple[int, int]:
    """Divide so many engines, rounded up, in the shares of the mean load."""
    loads = [scenario.load_at(now).engines() for now in np.arange(0, scenario.seconds, 10.0)]
    prefill, decode = (sum(each) for each in zip(*loads, strict=True))
    total = max(math.ceil(engines), 2)
    share = min(max(round(total * prefill / (prefill + decode)), 1), total - 1)
    return share, total - share


def main() -> None:
    """Print a line for each scenario and way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    seed = parser.parse_args().seed
    print("| load | engines | SLO attained | mean engines | role changes | scalings | taken back within 10 min |")
    print("|---|---|---|---|---|---|---|")
    for scenario in SCENARIOS:
        planned = simulate(scenario, seed)
        split = fixed_split(scenario, planned.engines)
        for name, outcome in (
            ("planner", planned),
            (f"fixed {split[0]} + {split[1]}", simulate(scenario, seed, split)),
        ):
            print(
                f"| {scenario.name} | {name} | {outcome.attained:.1%} | {outcome.engines:.1f} | {outcome.flips} "
                f"| {outcome.changes} | {outcome.reversals} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
