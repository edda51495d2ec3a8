"""Draws what happens in one run from its seed."""

from dataclasses import dataclass, field
from random import Random


@dataclass(frozen=True)
class Ask:
    """Describes one request of a client.

    Attributes:
        at: Seconds after the mesh is whole.
        timeout: Seconds; every request has a deadline.
        cancel_after: Seconds after which the client goes away; None: it stays.
        stop: Stop strings.
    """

    at: float
    prompt: list[int]
    max_tokens: int
    num_samples: int = 1
    timeout: float = 30.0
    cancel_after: float | None = None
    stop: tuple[str, ...] = ()
    seed: int = 0


@dataclass(frozen=True)
class Fault:
    """Describes one fault.

    Attributes:
        kind: One of :data:`tests.simulation.faults.KINDS`.
        at: Seconds after the mesh is whole.
        lasts: Seconds until the part is started again, thawed, or the link healed.
        target: The part, or the sender's end of the link.
        other: The receiver's end of the link.
    """

    kind: str
    at: float
    lasts: float
    target: str
    other: str = ""


@dataclass(frozen=True)
class Plan:
    """Describes a run: the mesh, what clients ask, and what goes wrong."""

    seed: int
    roles: tuple[str, ...]
    num_output_processors: int
    mean_delay: float
    step_seconds: float
    num_blocks: int
    asks: list[Ask] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)

    @property
    def engines(self) -> list[str]:
        return [f"engine-{index}" for index in range(len(self.roles))]

    @property
    def output_processors(self) -> list[str]:
        return [f"output_processor-{index}" for index in range(self.num_output_processors)]

    @property
    def is_split(self) -> bool:
        return "prefill" in self.roles


ROLES = (("both", "both"), ("both", "both"), ("both", "both", "both"))
SECONDS = 2.5
"""Requests and faults begin within so many seconds."""


def make_plan(seed: int, kinds: tuple[str, ...]) -> Plan:
    """Return the plan of a seed, with faults of these kinds."""
    random = Random(f"plan {seed}")
    plan = Plan(
        seed=seed,
        roles=random.choice(ROLES),
        num_output_processors=2,
        mean_delay=random.choice((0.0003, 0.001, 0.004)),
        step_seconds=random.choice((0.01, 0.02, 0.03)),
        num_blocks=random.choice((24, 64)),
    )
    prefixes = [[random.randrange(2, 400) for _ in range(16)] for _ in range(2)]
    plan.asks.extend(_draw_ask(random, prefixes) for _ in range(random.randrange(8, 16)))
    plan.asks.sort(key=lambda ask: ask.at)
    plan.faults.extend(_draw_fault(random, plan, kinds) for _ in range(random.randrange(1, 4)))
    plan.faults.sort(key=lambda fault: fault.at)
    return plan


def _draw_ask(random: Random, prefixes: list[list[int]]) -> Ask:
    own = [random.randrange(2, 400) for _ in range(random.randrange(1, 24))]
    prefix = random.choice(prefixes) if random.random() < 0.3 else []
    return Ask(
        at=random.uniform(0.0, SECONDS),
        prompt=prefix + own,
        max_tokens=random.randrange(1, 30),
        num_samples=2 if random.random() < 0.15 else 1,
        timeout=random.choice((1.0, 20.0, 20.0, 20.0)),
        cancel_after=random.uniform(0.0, 0.6) if random.random() < 0.1 else None,
        seed=random.getrandbits(32),
    )


def _draw_fault(random: Random, plan: Plan, kinds: tuple[str, ...]) -> Fault:
    kind = random.choice(kinds)
    at, lasts = random.uniform(0.0, SECONDS), random.uniform(0.1, 1.5)
    target = random.choice(["coordinator-0", *plan.output_processors, *plan.engines])
    return Fault(kind, at, lasts, target)
