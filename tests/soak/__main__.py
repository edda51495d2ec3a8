"""``python -m tests.soak``: many schedules, and what happened in them."""

import argparse
import asyncio
import logging
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.soak.run import soak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--schedules", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0, help="of the first one; the others follow")
    parser.add_argument("--worker", choices=("hash", "model"), default="hash", help="model: the demo model")
    parser.add_argument("--executor", choices=("uni", "mp"), default="uni", help="mp: workers in own processes")
    parser.add_argument("--async-scheduling", action="store_true", help="overlap the steps of every engine")
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)  # of which there are many: every fault is told
    with tempfile.TemporaryDirectory(prefix="tl-", dir="/tmp") as directory:
        seeds = range(arguments.seed, arguments.seed + arguments.schedules)
        asyncio.run(_run(Path(directory), seeds, arguments))


async def _run(directory: Path, seeds: range, arguments: argparse.Namespace) -> None:
    seen: Counter[str] = Counter()
    started = time.monotonic()
    is_async = arguments.async_scheduling
    async for plan, happened in soak(directory, seeds, arguments.worker, arguments.executor, async_scheduling=is_async):
        seen += happened
        if (plan.seed + 1) % 100 == 0:
            print(f"{plan.seed + 1 - seeds.start} schedules, {time.monotonic() - started:.0f} s", flush=True)
    print(f"{len(seeds)} schedules: no wrong token, no leaked block, no hang")
    for name, count in sorted(seen.items()):
        print(f"{count:8} {name}")


if __name__ == "__main__":
    main()
