"""``python -m tests.soak.waves``: a data-parallel group over the hash worker, most of whose requests go to one rank.

With ``--experts`` the ranks compute a small Qwen3-MoE whose experts are spread over them; its prompts come again and
again, and must be answered as one engine answers them.

One rank is busy while another is idle, then both rest for a moment, pause or resume. Each request must be answered with
the right tokens, and the group must come to rest: a hang ends the run with an error. With ``--overlap`` each rank plans
a step while one runs.
"""

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from tests.engine_core.data_parallel.cores import Group
from tests.engine_core.helpers import make_request
from tokenloom.engine_core.data.config import CacheConfig, EngineConfig, ParallelConfig, SchedulerConfig, WorkerConfig
from tokenloom.engine_core.fake_workers.hash_worker import expected_tokens

_MOST_LIVE = 64


Draw = Callable[[random.Random], tuple[list[int], list[int]]]
"""Draws a prompt and the tokens that answer it."""


def draw_hash(rng: random.Random) -> tuple[list[int], list[int]]:
    """Draw what the hash worker answers."""
    prompt, count = [rng.randrange(90) for _ in range(rng.randint(1, 12))], rng.randint(1, 40)
    return prompt, expected_tokens(prompt, count)[-count:]


def soak(group: Group, num_requests: int, seed: int = 0, draw: Draw = draw_hash) -> None:
    """Serve so many requests, and close the group. Raises ``AssertionError`` for a wrong token or a hang."""
    rng, size = random.Random(seed), len(group.ranks)
    expected: dict[str, list[int]] = {}
    try:
        while len(expected) < num_requests:
            busy = rng.randrange(size)  # this rank gets nearly all requests for a while
            for _ in range(min(rng.randint(1, 100), num_requests - len(expected))):
                rank = busy if rng.random() < 0.95 else rng.randrange(size)
                name = f"r{len(expected)}"
                prompt, expected[name] = draw(rng)
                group.add(rank, make_request(name, prompt, max_tokens=len(expected[name])))
                group.pump(lambda: len(group.tokens) - len(group.ended) < _MOST_LIVE)
            _pause_or_rest(group, rng)
        group.finish()
        group.pump(group.is_resting)
        assert group.tokens == expected
    finally:
        group.close()


def _pause_or_rest(group: Group, rng: random.Random) -> None:
    chance = rng.random()
    if chance < 0.2:
        group.finish()
        group.pump(group.is_resting)
    elif chance < 0.4:
        ranks = range(len(group.ranks))
        for rank in rng.sample(ranks, len(ranks)):
            group.call(rank, "pause", "keep")
        group.pump(lambda: not group.num_unanswered and group.is_resting())
        for rank in rng.sample(ranks, len(ranks)):
            group.call(rank, "resume")


def with_experts(directory: Path, size: int, *, overlaps: bool = False) -> tuple[Group, Draw]:
    """Return a group of ranks with spread experts, and what draws its requests. ``overlaps``: whether they schedule
    while they compute."""
    # Here, because they take transformers.
    from tests.parity.ranks.test_data_parallel import EXPERTS, alone
    from tests.parity.reference import save_random

    path = save_random("qwen3_moe", directory, head_dim=24, **EXPERTS)
    config = EngineConfig(
        worker=WorkerConfig(model=str(path), device="cpu", dtype="float32", num_threads=1),
        cache=CacheConfig(num_blocks=400),
        scheduler=SchedulerConfig(max_num_seqs=32, max_num_batched_tokens=256),
    )
    rng = random.Random(1)
    prompts = [[rng.randrange(3, 500) for _ in range(rng.randint(1, 30))] for _ in range(50)]
    requests = [make_request(str(index), prompt, max_tokens=12) for index, prompt in enumerate(prompts)]
    answers = alone(config, requests)
    pairs = [(prompt, answers[str(index)]) for index, prompt in enumerate(prompts)]
    scheduler = msgspec.structs.replace(config.scheduler, async_scheduling=overlaps)
    parallel = ParallelConfig(enable_expert_parallel=True)
    spread = msgspec.structs.replace(config, parallel=parallel, scheduler=scheduler)
    return Group(directory, size, config=spread), lambda rng: rng.choice(pairs)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak.waves", description=__doc__)
    parser.add_argument("--requests", type=int, default=10_000, help="how many (10000)")
    parser.add_argument("--ranks", type=int, default=2, help="size of the group (2)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--experts", action="store_true", help="compute a model whose experts are spread")
    parser.add_argument("--overlap", action="store_true", help="schedule a step while one runs")
    arguments = parser.parse_args()
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="tl-") as directory:
        draw: Draw = draw_hash
        if arguments.experts:
            group, draw = with_experts(Path(directory), arguments.ranks, overlaps=arguments.overlap)
        else:
            group = Group(Path(directory), arguments.ranks, num_blocks=1024, async_scheduling=arguments.overlap)
        soak(group, arguments.requests, arguments.seed, draw)
    print(
        f"{len(group.ended)} requests of {arguments.ranks} ranks answered with the right tokens in "
        f"{time.monotonic() - started:.0f} s, in {group.num_waves} waves"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
