"""``python -m tests.soak.waves``: a data-parallel group over the hash worker, most of whose requests go to one rank.

One rank is busy while another is idle, then both rest for a moment, pause or resume. Each request must be answered with
the right tokens, and the group must come to rest: a hang ends the run with an error.
"""

import argparse
import random
import sys
import tempfile
import time
from pathlib import Path

from tests.engine_core.data_parallel.cores import Group
from tests.engine_core.helpers import make_request
from tokenloom.engine_core.fake_workers.hash_worker import expected_tokens

_MOST_LIVE = 64


def soak(directory: Path, num_requests: int, seed: int = 0, size: int = 2) -> Group:
    """Serve so many requests, and return the group, closed. Raises ``AssertionError`` for a wrong token or a hang."""
    rng = random.Random(seed)
    group = Group(directory, size, num_blocks=1024)
    expected: dict[str, list[int]] = {}
    try:
        while len(expected) < num_requests:
            busy = rng.randrange(size)  # this rank gets nearly all requests for a while
            for _ in range(min(rng.randint(1, 100), num_requests - len(expected))):
                rank = busy if rng.random() < 0.95 else rng.randrange(size)
                prompt, count = [rng.randrange(90) for _ in range(rng.randint(1, 12))], rng.randint(1, 40)
                name = f"r{len(expected)}"
                expected[name] = expected_tokens(prompt, count)[-count:]
                group.add(rank, make_request(name, prompt, max_tokens=count))
                group.pump(lambda: len(group.tokens) - len(group.ended) < _MOST_LIVE)
            _pause_or_rest(group, rng)
        group.finish()
        group.pump(group.is_resting)
        assert group.tokens == expected
    finally:
        group.close()
    return group


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


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak.waves", description=__doc__)
    parser.add_argument("--requests", type=int, default=10_000, help="how many (10000)")
    parser.add_argument("--ranks", type=int, default=2, help="size of the group (2)")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="tl-") as directory:
        group = soak(Path(directory), arguments.requests, arguments.seed, arguments.ranks)
    print(
        f"{len(group.ended)} requests of {arguments.ranks} ranks answered with the right tokens in "
        f"{time.monotonic() - started:.0f} s, in {group.num_waves} waves"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
