"""How much of the prompts of coding agents a scheduler finds in its cache, at the sizes of published models, without a
worker: for models that keep a state, and for models of the same KV without one.

    python -m tests.engine_core.kv_cache.agent_hits --gib 48

24 sessions of 100 requests share a system prompt. A tool's result follows each answer; after 4 to 14 of them the user
speaks, and the template drops what the model thought since the last time. Requests follow each other in the order of
their times; what waits for what is not simulated.
"""

import argparse
import json
import random
from collections.abc import Iterator
from typing import Any, NamedTuple

from tests.engine_core.planned_steps import Clock
from tokenloom.engine_core.data.config import CacheConfig, EngineConfig, SchedulerConfig, WorkerConfig
from tokenloom.engine_core.data.core_params import CoreSamplingParams
from tokenloom.engine_core.data.messages import EngineCoreRequest
from tokenloom.engine_core.data.model_info import ModelInfo
from tokenloom.engine_core.data.scheduler_output import ModelRunnerOutput
from tokenloom.engine_core.kv_cache.kv_cache_size import size_kv_cache
from tokenloom.engine_core.scheduling.scheduler import Scheduler

MODELS = {
    "Qwen3-Next-80B": (12 * 2 * 2 * 256 * 2, 36 * (32 * 128 * 128 * 4 + 8192 * 3 * 2)),
    "Granite-4-H-Small": (4 * 2 * 8 * 128 * 2, 36 * (128 * 64 * 128 * 4 + 8448 * 3 * 2)),
    "LFM2-2.6B": (8 * 2 * 8 * 64 * 2, 22 * 2048 * 2 * 2),
}
"""Bytes of a token's KV, and of a state."""
_END = 2
"""The token that ends a message."""
_OPENING = [7, 8, 9]
"""What a template writes in front of an answer."""
_LONGEST = 1 << 18
_SEATS = 24


class Turn(NamedTuple):
    """A request of a session."""

    at: float
    prompt: list[int]
    answer: list[int]


class _Texts:
    """Makes texts that have no beginning in common."""

    def __init__(self) -> None:
        self._count = 0

    def make(self, length: int, *, ends: bool = True) -> list[int]:
        self._count += 1
        head = [10 + self._count // 1000, 10 + self._count % 1000]
        body = [1010 + (self._count + 31 * index) % 50_000 for index in range(max(0, length - 3))]
        return [*head, *body, *[_END] * ends]


def turns(kind: str, num_sessions: int, num_turns: int, scale: float, seed: int = 1) -> list[Turn]:
    """Return the requests of all sessions by their times. ``kind``: ``agent`` or ``code``, whose texts are longer.
    ``scale``: of the lengths of texts."""
    texts, found = _Texts(), list[Turn]()
    shared = texts.make(int((20_000 if kind == "code" else 6_000) * scale))
    for session in range(num_sessions):
        found += _session(texts, shared, kind, num_turns, scale, random.Random(f"{seed}/{session}"))
    return sorted(found, key=lambda turn: turn.at)


def _session(
    texts: _Texts, shared: list[int], kind: str, num_turns: int, scale: float, rng: random.Random
) -> Iterator[Turn]:
    def drawn(mean: float, deviation: float, least: int) -> int:
        return int((rng.lognormvariate(mean, deviation) + least) * scale) + 4

    at, left = rng.uniform(0, 600), rng.randint(4, 14)
    told = shared + texts.make(drawn(7.6, 0.5, 0))  # all but what the loop has added since the user spoke
    loop, without = list[int](), list[int]()  # that, as it is and without thinking
    for _ in range(num_turns):
        thought, answer = texts.make(drawn(5.0, 0.8, 0), ends=False), texts.make(drawn(4.8, 0.7, 16))
        yield Turn(at, told + loop + _OPENING, thought + answer)
        at += (len(thought) + len(answer)) / 60 / scale
        at += rng.expovariate(1 / 120) if rng.random() < 0.1 else rng.expovariate(1 / 6)
        loop, without = loop + _OPENING + thought + answer, without + _OPENING + answer
        left -= 1
        if left > 0:
            result = texts.make(drawn(6.6 if kind == "code" else 6.0, 0.9, 20))
            loop, without = loop + result, without + result
        else:
            told, loop, without = told + without + texts.make(drawn(4.5, 1.0, 10)), [], []
            left = rng.randint(4, 14)


def run(asked: list[Turn], kv_bytes: int, state_bytes: int, memory: int) -> dict[str, Any]:
    """Return what a scheduler with so many bytes of memory finds of these requests."""
    config = EngineConfig(
        worker=WorkerConfig(model=""),
        cache=CacheConfig(memory_bytes=memory),
        scheduler=SchedulerConfig(max_num_seqs=_SEATS, max_num_batched_tokens=8192),
    )
    info = ModelInfo(1 << 17, _LONGEST, kv_bytes, "", "", state_bytes=state_bytes)
    sizes = size_kv_cache(config, info, lambda: memory)
    scheduler = Scheduler(config, sizes, Clock())
    for number, turn in enumerate(asked):
        _answer(scheduler, str(number), turn)
    stats, num_tokens = scheduler.stats(), sum(len(turn.prompt) for turn in asked)
    return {
        "share": round(stats.prefix_cache_hits / num_tokens, 4),
        "computed_per_request": round((num_tokens - stats.prefix_cache_hits) / len(asked)),
        "states": sizes.num_state_slots,
        "blocks": sizes.num_blocks,
    }


def _answer(scheduler: Scheduler, name: str, turn: Turn) -> None:
    params = CoreSamplingParams(max_tokens=len(turn.answer), seed=0, stop_token_ids=(_END,))
    scheduler.add_request(EngineCoreRequest(name, turn.prompt, params))
    tokens = iter(turn.answer)
    while name in scheduler.requests:
        scheduled = scheduler.schedule()
        sampled = list[list[int]]()
        for request_id in scheduled.num_scheduled_tokens:
            request = scheduler.requests[request_id]
            sampled.append([next(tokens)] if request.kv.num_computed_tokens == request.num_tokens else [])
        result = ModelRunnerOutput(list(scheduled.num_scheduled_tokens), sampled)
        for output in scheduler.results.apply(scheduled, result):
            assert not output.error, output.error


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=int, nargs="+", default=[16, 48], help="memory for KV and states [16 48]")
    parser.add_argument("--kinds", nargs="+", choices=("agent", "code"), default=["agent", "code"])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--sessions", type=int, default=24)
    parser.add_argument("--turns", type=int, default=100)
    arguments = parser.parse_args()
    for kind in arguments.kinds:
        asked = turns(kind, arguments.sessions, arguments.turns, 1.0)
        lengths = [len(turn.prompt) for turn in asked]
        about = {"kind": kind, "requests": len(asked), "mean": sum(lengths) // len(lengths), "longest": max(lengths)}
        print(json.dumps(about), flush=True)
        for name in arguments.models:
            kv_bytes, state_bytes = MODELS[name]
            for gib in arguments.gib:
                found = {
                    "with states": run(asked, kv_bytes, state_bytes, gib << 30),
                    "attention only": run(asked, kv_bytes, 0, gib << 30),
                }
                print(json.dumps({"model": name, "gib": gib, **found}), flush=True)


if __name__ == "__main__":
    main()
