"""``python -m tests.soak.elastic``: data-parallel groups grow, shrink and lose ranks while they serve.

Each shard starts a group of two ranks, which grows to four and shrinks to three; in every fourth shard one core is
killed with SIGKILL, and another takes its place. No request may be lost, and each is answered with the right tokens.
With ``--experts`` the ranks compute a small Qwen3-MoE whose experts are spread over them.

Finished shards are lines of ``--results``: a command that was interrupted goes on with the others.
"""

import argparse
import json
import random
import sys
import tempfile
import time
from pathlib import Path

from tests.engine_core.data_parallel.cores import Group
from tests.engine_core.helpers import make_request
from tests.soak.waves import Draw, draw_hash, with_experts

_MOST_LIVE = 48
_SIZES = (4, 3)
"""To which a group of two ranks changes, one after the other."""


class ElasticRun:
    """Serves the requests of one shard."""

    def __init__(self, group: Group, draw: Draw, seed: int) -> None:
        self._group, self._draw, self._rng = group, draw, random.Random(seed)
        self._expected: dict[str, list[int]] = {}
        self.num_resizes = self.num_deaths = 0

    def run(self, num_requests: int, *, kills: bool) -> None:
        """Raises ``AssertionError`` for a wrong token, a lost request or a hang."""
        part = num_requests // 4
        self._serve(part, range(2))
        self._resize(_SIZES[0])
        self._serve(part, range(4))
        if kills:
            self._group.lose(self._rng.randrange(4))
            self.num_deaths += 1
        self._serve(part, range(3))  # the last rank is to leave, and gets no more
        self._group.finish()
        self._resize(_SIZES[1])
        self._group.close_last()
        self._serve(num_requests - 3 * part, range(3))
        self._group.finish()
        self._group.pump(self._group.is_resting)
        assert self._group.tokens == self._expected

    def _serve(self, count: int, ranks: range) -> None:
        for _ in range(count):
            name, (prompt, tokens) = f"r{len(self._expected)}", self._draw(self._rng)
            self._expected[name] = tokens
            self._group.add(self._rng.choice(ranks), make_request(name, prompt, max_tokens=len(tokens)))
            self._group.pump(lambda: len(self._group.tokens) - len(self._group.ended) < _MOST_LIVE)

    def _resize(self, size: int) -> None:
        group = self._group
        for rank in range(len(group.ranks), size):
            group.start_rank(rank, size)
        for rank in range(len(group.ranks)):
            group.call(rank, "resize_group", size)
        group.pump(lambda: all(state is not None and state.size == size for state in group.states))
        self.num_resizes += 1


def run_shard(number: int, num_requests: int, *, experts: bool) -> dict[str, int]:
    """Run a shard in a directory of its own. Returns what it did."""
    with tempfile.TemporaryDirectory(prefix="tl-") as directory:
        draw: Draw = draw_hash
        if experts:
            group, draw = with_experts(Path(directory), 2)
        else:
            group = Group(Path(directory), 2, num_blocks=1024)
        try:
            run = ElasticRun(group, draw, number)
            run.run(num_requests, kills=number % 4 == 0)
        finally:
            group.close()
    return {"shard": number, "requests": num_requests, "resizes": run.num_resizes, "deaths": run.num_deaths}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak.elastic", description=__doc__)
    parser.add_argument("--shards", type=int, default=20, help="how many (20)")
    parser.add_argument("--requests", type=int, default=500, help="of each shard (500)")
    parser.add_argument("--experts", action="store_true", help="compute a model whose experts are spread")
    parser.add_argument("--results", type=Path, default=Path("build/elastic.jsonl"), help="finished shards")
    arguments = parser.parse_args()
    arguments.results.parent.mkdir(parents=True, exist_ok=True)
    lines = arguments.results.read_text().splitlines() if arguments.results.exists() else []
    done = [json.loads(line) for line in lines]
    for number in sorted({*range(arguments.shards)} - {each["shard"] for each in done}):
        started = time.monotonic()
        done.append(run_shard(number, arguments.requests, experts=arguments.experts))
        with arguments.results.open("a") as file:
            file.write(json.dumps(done[-1]) + "\n")
        print(f"shard {number}: {done[-1]} in {time.monotonic() - started:.0f} s", flush=True)
    totals = {name: sum(each[name] for each in done) for name in ("requests", "resizes", "deaths")}
    print(f"{totals['requests']} requests over {totals['resizes']} resizes and {totals['deaths']} deaths: 0 lost")
    return 0


if __name__ == "__main__":
    sys.exit(main())
