"""``python -m tests.soak.replayed``: random requests of a mesh, with prefix hits, preemption, moved blocks and drafts,
are recorded and then computed again, one by one, by an engine that runs nothing else. None may differ.

In rounds of 200 requests: what has run is in a file, and a later call runs what is missing.
"""

import argparse
import asyncio
import json
import logging
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from tests.mesh.recorded import OPTIONS, record, records
from tokenloom.offline.replay import Replayer, options_of

ROUND = 200
"""Random requests of a round; eight long ones with a common beginning come first."""
FIRST_SEED = 1_000_000
DRAFTS = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}
KINDS: Sequence[dict[str, Any]] = (
    {"dtype": "float32"},
    {"dtype": "float32", "batch_invariant": True},
    {"dtype": "bfloat16", "batch_invariant": True},
    {"dtype": "float32", **DRAFTS},
)
"""The engines' options, in turns."""
_WITHOUT_TOKENS = "it has generated no token"


@dataclass
class Round:
    """What became of the requests of one round."""

    number: int
    kind: str
    load: float = 0.0
    requests: int = 0
    replayed: int = 0
    """Requests that were computed again; the others have no token: they were refused, or gave none."""
    tokens: int = 0
    different: list[str] = field(default_factory=list)


async def run_round(number: int, directory: Path, size: int = ROUND) -> Round:
    """Record the requests of a round, and replay each."""
    options = KINDS[number % len(KINDS)]
    found = Round(number, ", ".join(str(value) for value in options.values()), os.getloadavg()[2])
    folder = directory / "records"
    seeds = range(FIRST_SEED + number * size, FIRST_SEED + (number + 1) * size)
    await record(directory, folder, seeds, **options)
    await asyncio.to_thread(_replay, folder, found)
    return found


def _replay(folder: Path, found: Round) -> None:
    recorded = records(folder)
    found.requests = len(recorded)
    replayer = Replayer(recorded[0].path, {**options_of(recorded[0]), **OPTIONS})
    try:
        for each in recorded:
            (result,) = replayer.replay([each])
            if result.refusal and result.refusal != _WITHOUT_TOKENS:
                found.different.append(f"{each.id}: {result.refusal}")
            found.different += [f"{each.id}: {difference}" for difference in result.differences]
            found.replayed += not result.refusal
            found.tokens += result.num_tokens
    finally:
        replayer.close()


def report(done: Sequence[Round]) -> int:
    """Print the sum of all rounds. Returns 1 if a request differs."""
    kinds = sorted({each.kind for each in done})
    for kind in kinds:
        some = [each for each in done if each.kind == kind]
        requests, replayed = sum(each.requests for each in some), sum(each.replayed for each in some)
        print(f"{kind}: {requests} requests, {replayed} computed again, {sum(each.tokens for each in some)} tokens")
    different = [text for each in done for text in each.different]
    total = sum(each.replayed for each in done)
    print(f"{sum(each.requests for each in done)} requests, {total} computed again one by one, {len(different)} differ")
    for text in different:
        print(f"  ! {text}")
    return 1 if different else 0


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.soak.replayed", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--results", type=Path, required=True, help="file of the rounds that have run")
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    lines = arguments.results.read_text().splitlines() if arguments.results.exists() else []
    done = [Round(**json.loads(line)) for line in lines]
    for number in sorted({*range(-(-arguments.requests // ROUND))} - {each.number for each in done}):
        began = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="tl-", dir="/tmp") as directory:
            found = asyncio.run(run_round(number, Path(directory)))
        done.append(found)
        with arguments.results.open("a") as file:
            file.write(json.dumps(asdict(found)) + "\n")
        seconds = time.monotonic() - began
        print(f"round {number}: {found.replayed} of {found.requests} computed again, {seconds:.0f} s", flush=True)
    return report(done)


if __name__ == "__main__":
    sys.exit(main())
