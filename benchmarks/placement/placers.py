"""Chooses engines: by our rules, on the real registry, and by those of others."""

import random
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

from tokenloom.services.coordinator.engines.defaults import PD_THRESHOLD
from tokenloom.services.coordinator.engines.engine_placement import Policy
from tokenloom.services.coordinator.engines.engine_registry import Registry
from tokenloom.services.runtime.placement.rules import Rule, cost, score
from tokenloom.v1.coordinator_pb2 import EngineIdentity, PickRequest
from tokenloom.v1.types_pb2 import EngineRole

from .engine import BLOCK, FINGERPRINT, KV_BLOCKS, SCRAPE_SECONDS, Engine, Request


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
        policy = Policy(PD_THRESHOLD, rule)
        self._registry = Registry(1, lambda: self._now, policy=policy, settle_seconds=0)
        self._records = [
            self._registry.join(
                EngineIdentity(engine_id=f"e{each.index}", epoch=1, num_kv_blocks=KV_BLOCKS, fingerprint=FINGERPRINT),
                each.report(),
            )
            for each in engines
        ]

    def pick(self, request: Request, now: float) -> int:
        self._now = now
        picked = self._registry.pick(
            PickRequest(
                fingerprint=FINGERPRINT,
                role=EngineRole.ENGINE_ROLE_PREFILL,
                prompt_tokens=request.prompt,
                block_hash_prefixes=request.prefix[: self._max_hashes],
            )
        )
        request.pick = picked.pick
        return int(picked.engine.engine_id[1:])

    def report(self, engine: Engine) -> None:
        record = self._records[engine.index]
        self._registry.report(record, engine.report())
        evicted, engine.evicted = engine.evicted, []
        if gone := [block for block in evicted if block not in engine.cache]:
            self._registry.prefixes.remove(gone, record.row)


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
