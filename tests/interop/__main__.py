"""``python -m tests.interop``: prints which parts of others ours work with, in both directions.

A peer that is installed runs as a process of its own; for the rest tests repeat exchanges as the peers publish them.
What is not installed has no result, which is not a pass.
"""

import argparse
import os
import signal
import sys
import tempfile
from pathlib import Path

from .rows import ROWS, Result, Row, run_row


def main() -> int:
    """Print the table, and return 1 if a row that ran has failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("peers", nargs="*", help="only the rows of these peers, such as vllm")
    parser.add_argument("--requests", type=int, default=1000, help="requests of the mesh with vLLM that is killed")
    parser.add_argument(
        "--roots",
        default=os.environ.get("PEERS_ROOT", str(Path.home() / ".cache/tokenloom-peers")),
        help="folders with the peers' environments, separated by colons: ROOT/vllm/bin/vllm",
    )
    given = parser.parse_args()
    for number in (signal.SIGINT, signal.SIGTERM):  # either ends what was started, too
        signal.signal(number, signal.default_int_handler)
    results: list[tuple[Row, Result]] = []
    with tempfile.TemporaryDirectory(prefix="tl-interop-", dir="/tmp") as directory:
        for row in ROWS:
            if given.peers and row.peer.lower() not in {name.lower() for name in given.peers}:
                continue
            print(f"{row.peer}: {row.subject}", file=sys.stderr, flush=True)
            result = run_row(row, tuple(given.roots.split(":")), Path(directory), given.requests)
            results.append((row, result))
    print("| peer | version | direction | what | how | result |\n|---|---|---|---|---|---|")
    for row, result in results:
        print(f"| {row.peer} | {result.version} | {row.direction} | {row.subject} | {row.how} | {result.text} |")
    return int(any(result.is_failure for _, result in results))


if __name__ == "__main__":
    sys.exit(main())
