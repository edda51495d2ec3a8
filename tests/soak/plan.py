"""What one schedule does, drawn from its seed: a mesh, faults, requests, and what happens to them meanwhile."""

import random
from dataclasses import dataclass, field, replace
from typing import Any

from tests.mesh.harness import VOCAB_SIZE

BLOCK = 16
MAX_PROMPT = 400
MAX_OUTPUT = 24
TENANTS = ("a", "b", "c")
OWNER_FAULTS = ("lease_expires", "blocks_reused", "wrong_layout")
READER_FAULTS = ("copy_fails", "torn_copy", "slow_copy", "verify_twice", "verdict_lost")
_SHORT = {
    "max_model_len": MAX_PROMPT + 2 * MAX_OUTPUT,
    "kv_lease_seconds": 0.3,
    "kv_load_timeout": 0.3,
}
"""Every wait of the protocol ends soon."""


@dataclass(frozen=True)
class Ask:
    """One request."""

    delay: float
    """Seconds after the beginning."""
    prompt: list[int]
    max_tokens: int
    leaves_after: float | None = None
    """Seconds after which the client goes away; None: it stays."""
    budget: int | None = None
    """Tokens of reasoning; None: no limit. Without a model only."""
    tenant: str = "a"
    """Whose request it is. All tenants share prefixes."""


@dataclass(frozen=True)
class Event:
    """Something happens to an engine."""

    delay: float
    kind: str
    """``kill`` or ``cut`` (of the owner's KV port)."""
    engine: int
    replaced: bool
    """Whether another one of its role comes."""


@dataclass(frozen=True)
class Plan:
    """All of it; equal seeds give equal plans, whatever the worker and whether steps overlap."""

    seed: int
    roles: list[str]
    settings: list[dict[str, Any]] = field(repr=False)
    """Of each engine."""
    asks: list[Ask] = field(repr=False)
    events: list[Event]

    @property
    def may_fail(self) -> bool:
        """Whether a request may end with an error, one that says to try again."""
        return bool(self.events) or any(values.get("kv_policy") == "fail" for values in self.settings)

    @classmethod
    def draw(cls, seed: int, worker: str = "hash", *, async_scheduling: bool = False) -> "Plan":
        rng = random.Random(seed)
        roles = ["prefill"] * rng.choice((1, 1, 2)) + ["decode"] * rng.choice((1, 1, 2))
        roles += ["both"] * (rng.random() < 0.1)
        shared = {"worker": worker, "kv_transports": (rng.choice(("shm", "socket")),), **_SHORT}
        shared["async_scheduling"] = async_scheduling
        if rng.random() < 0.1:
            shared["kv_policy"] = "fail"
        engines = [_engine(rng, role) for role in roles]
        trunks = [_tokens(rng, MAX_PROMPT) for _ in range(3)]
        asks = [_ask(rng, trunks) for _ in range(rng.randint(3, 10))]
        if worker == "hash":
            shared["reasoning_parser"] = "deepseek_r1"  # every output begins with reasoning
            budgets = random.Random(f"budgets of {seed}")
            asks = [replace(ask, budget=budgets.choice((None, None, 0, 1, 2, 5, 11))) for ask in asks]
        seats = random.Random(f"seats of {seed}")
        asks = [replace(ask, tenant=seats.choice(TENANTS)) for ask in asks]
        settings = [shared | engine | {"max_num_seqs": seats.choice((1, 2, 4, 48))} for engine in engines]
        drafts = random.Random(f"drafts of {seed}")
        settings = [each | _drafts(drafts) for each in settings]
        return cls(seed, roles, settings, asks, _events(rng, len(roles)))


def _engine(rng: random.Random, role: str) -> dict[str, Any]:
    faults = {"prefill": OWNER_FAULTS, "decode": READER_FAULTS}.get(role, OWNER_FAULTS + READER_FAULTS)
    chosen = rng.sample(faults, rng.choice((0, 1, 1, 2)))
    return {
        "failpoints": tuple(f"{name}={rng.choice((0.2, 0.5, 1.0))}" for name in chosen),
        "num_kv_blocks": rng.choice((32, 48, 256)),
        "max_num_batched_tokens": rng.choice((48, 128, 512)),
        "hash_step_seconds": rng.choice((0.0, 0.001, 0.004)),
    }


def _drafts(rng: random.Random) -> dict[str, Any]:
    if rng.random() < 0.5:
        return {}
    config = {"method": "ngram", "num_speculative_tokens": rng.choice((1, 3, 6))}
    return {"speculative_config": config, "hash_draft_accuracy": rng.choice((0.0, 0.3, 0.7, 1.0))}


def _ask(rng: random.Random, trunks: list[list[int]]) -> Ask:
    length = rng.choice((rng.randint(1, 40), rng.randint(1, MAX_PROMPT), rng.randint(1, MAX_PROMPT // BLOCK) * BLOCK))
    shared = rng.choice((0, length // 2, length))
    return Ask(
        delay=rng.uniform(0, 0.05),
        prompt=rng.choice(trunks)[:shared] + _tokens(rng, length - shared),
        max_tokens=rng.randint(1, MAX_OUTPUT),
        leaves_after=rng.uniform(0, 0.08) if rng.random() < 0.25 else None,
    )


def _events(rng: random.Random, num_engines: int) -> list[Event]:
    if rng.random() < 0.6:
        return []
    kind = rng.choice(("kill", "kill", "cut"))
    return [Event(rng.uniform(0, 0.1), kind, rng.randrange(num_engines), replaced=rng.random() < 0.5)]


def _tokens(rng: random.Random, count: int) -> list[int]:
    return rng.choices(range(VOCAB_SIZE), k=count)
