"""``python -m tests.soak.shards``: thousands of requests over a lossy and slow network while parts are killed.

The campaign ``kill`` in shards, each with a mesh, a seed and a plan of its own: what has run is in a file, a later call
runs the shards that are missing, and prints the sum of all. The mesh runs in a network namespace whose loopback device
loses packets (``nft numgen``), and behind proxies that delay what passes. Gateways hold their connections, so that
plain clients have no excuse. Needs root, ``ip`` and ``unshare``, and ``nft`` unless ``--loss 0``.
"""

import argparse
import asyncio
import faulthandler
import gc
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from msgspec.structs import replace

from benchmarks.chaos.campaign.options import CAMPAIGNS, ChaosOptions
from benchmarks.chaos.campaign.run import run_campaign

ROOT = Path(__file__).parents[2]
_CAMPAIGN = "kill"
_RULES = "flush ruleset\ntable inet t {{\n chain c {{\n type filter hook input priority 0;\n {rule}\n }}\n}}\n"
_RULE = "meta iifname lo meta l4proto tcp numgen random mod 1000000 < {share} counter drop"
_TOOLS = ("ip", "unshare", "nft")
_TOO_LARGE = 3
"""Exit status where this process takes more memory than it may."""
_COUNTS = (
    "faults",
    "requests",
    "failed",
    "wrong",
    "lost_with_their_gateway",
    "outlived_their_gateway",
    "expired",
    "refused_connections",
    "streams_cut",
    "resumed",
)
"""What is added up, as it is named in a report."""
_WORKERS: Mapping[str, Mapping[str, Any]] = {
    "hash": {"worker": "hash", "layout": "split"},
    "model": {"worker": "model", "layout": "split", "bfloat16": True, "drafts": 3},
}


def options_of(arguments: argparse.Namespace, shard: int) -> ChaosOptions:
    """Return the options of a shard, whose number is its seed."""
    chosen = {name: getattr(arguments, name) for name in ("requests", "each", "concurrency", "timeout", "cases")}
    return replace(
        CAMPAIGNS[_CAMPAIGN].options,
        **_WORKERS[arguments.worker],
        **chosen,
        seed=shard,
        step_seconds=arguments.step_seconds,
        min_tokens=arguments.min_tokens,
        max_tokens=arguments.max_tokens,
        hold_connections=True,
        link_delay=arguments.delay,
        max_added_p99=None,
    )


def total(shards: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, int]]:
    """Return the counts of all shards together, by kind of fault."""
    sums: dict[str, dict[str, int]] = {}
    for shard in shards:
        for layout in shard["report"]["layouts"]:
            for row in layout["rows"]:
                kind = sums.setdefault(row["kind"], dict.fromkeys(_COUNTS, 0))
                for name in _COUNTS:
                    kind[name] += row[name]
    last = sums.pop("all", None)
    return {name: sums[name] for name in sorted(sums)} | ({} if last is None else {"all": last})


def as_table(shards: Sequence[Mapping[str, Any]]) -> str:
    """Return the counts as Markdown, then the shards with their commits, and what was not as it should be."""
    heads = [name.replace("_", " ") for name in _COUNTS]
    lines = [f"| fault | {' | '.join(heads)} |", f"|---|{'---:|' * len(heads)}"]
    for kind, counts in total(shards).items():
        lines.append(f"| {kind} | {' | '.join(str(counts[name]) for name in _COUNTS)} |")
    lines.append("")
    for shard in shards:
        report = shard["report"]
        lines.append(
            f"shard {shard['shard']}: commit {shard['commit']}, {report['date']}, load {shard['load']}, "
            f"{shard['dropped']} packets lost, {sum(layout['seconds'] for layout in report['layouts']):.0f} s of faults"
        )
        lines += [f"  ! {each}" for each in report["violations"]]
        lines += [f"  ! {each}" for layout in report["layouts"] for each in layout["examples"]]
    return "\n".join(lines)


def read(results: Path) -> list[dict[str, Any]]:
    """Return the shards that have run, in the order of their numbers."""
    lines = results.read_text().splitlines() if results.exists() else []
    return sorted((json.loads(line) for line in lines), key=lambda shard: int(shard["shard"]))


def _lose(share: float) -> None:
    """Lose a share of the packets of the namespace's loopback device from now on."""
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    if share:
        rules = _RULES.format(rule=_RULE.format(share=max(round(share * 1_000_000), 1)))
        subprocess.run(["nft", "-f", "-"], input=rules, text=True, check=True)


def _num_lost(share: float) -> int:
    if not share:
        return 0
    listed = subprocess.run(["nft", "list", "ruleset"], capture_output=True, text=True, check=True).stdout
    found = re.search(r"counter packets (\d+)", listed)
    return int(found[1]) if found else 0


def _commit() -> str:
    command = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def watch_memory(most_bytes: int, log: TextIO, end: Callable[[int], object] = os._exit) -> threading.Thread:
    """End this process once it takes so much memory, and say with what: a shard once took all of the machine's, and the
    kernel ended other processes too. ``end``: gets the exit status."""

    def watch() -> None:
        while (size := _resident_bytes()) <= most_bytes:
            time.sleep(1.0)
        kinds = Counter(type(each).__qualname__ for each in gc.get_objects()).most_common(20)
        print(f"the process takes {size >> 20} MiB, the most are {kinds}; its threads:", file=log, flush=True)
        faulthandler.dump_traceback(log, all_threads=True)
        end(_TOO_LARGE)

    thread = threading.Thread(target=watch, name="watch memory", daemon=True)
    thread.start()
    return thread


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _run_shard(arguments: argparse.Namespace, shard: int) -> dict[str, Any]:
    options, before = options_of(arguments, shard), _num_lost(arguments.loss)
    with open(f"{arguments.results}.{shard}.log", "w", buffering=1) as log:
        campaign = run_campaign(
            _CAMPAIGN,
            CAMPAIGNS[_CAMPAIGN],
            options,
            lambda part, line: print(f"{part:<18} | {line}", file=log),
            lambda line: print(line, flush=True),
        )
        report = asyncio.run(campaign)
    return {
        "shard": shard,
        "commit": _commit(),
        "load": f"{os.getloadavg()[2]:.0f}",
        "dropped": _num_lost(arguments.loss) - before,
        "report": report,
    }


def run(arguments: argparse.Namespace) -> int:
    """Run the shards that are missing. Returns 1 if a limit was violated in any."""
    done = {int(shard["shard"]) for shard in read(arguments.results)}
    missing = [shard for shard in range(arguments.first, arguments.first + arguments.shards) if shard not in done]
    if missing:
        _lose(arguments.loss)
        watch_memory(arguments.most_memory << 20, sys.stderr)
    for shard in missing:
        found = _run_shard(arguments, shard)
        with arguments.results.open("a") as file:
            file.write(json.dumps(found) + "\n")
        print(f"shard {shard}: {found['report']['violations'] or 'no limit was violated'}", flush=True)
    shards = read(arguments.results)
    print(as_table(shards))
    return 1 if any(shard["report"]["violations"] for shard in shards) else 0


def parser() -> argparse.ArgumentParser:
    """Return what reads the command line."""
    made = argparse.ArgumentParser(
        prog="python -m tests.soak.shards", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--results", type=Path, required=True, help="file of the shards that have run")
    made.add_argument("--worker", choices=_WORKERS, default="hash", help="model: the demo model, bfloat16, drafts")
    made.add_argument("--shards", type=int, default=10)
    made.add_argument("--first", type=int, default=0, help="number of the first shard, which is its seed")
    made.add_argument("--requests", type=int, default=2000, help="of a shard, at least (2000)")
    made.add_argument("--each", type=int, default=5, help="kills of each kind of process in a shard (5)")
    made.add_argument("--loss", type=float, default=0.01, help="share of the packets (0.01)")
    made.add_argument("--delay", type=float, default=0.02, help="seconds, of each link in each direction (0.02)")
    made.add_argument("--concurrency", type=int, default=64)
    made.add_argument("--timeout", type=float, default=300.0, help="of a request, in seconds; machines may be busy")
    made.add_argument("--cases", type=int, default=44)
    made.add_argument("--step-seconds", type=float, default=0.01)
    made.add_argument("--min-tokens", type=int, default=100)
    made.add_argument("--max-tokens", type=int, default=400)
    made.add_argument("--most-memory", type=int, default=2048, help="MiB that the clients may take (2048)")
    made.add_argument("--in-namespace", action="store_true", help=argparse.SUPPRESS)
    return made


def main() -> int:
    arguments = parser().parse_args()
    if arguments.in_namespace:
        return run(arguments)
    needed = _TOOLS if arguments.loss else _TOOLS[:-1]  # the last one loses packets
    if missing := [tool for tool in needed if shutil.which(tool) is None]:
        print(f"needs {' and '.join(missing)} (Debian: iproute2, util-linux, nftables)")
        return 2
    command = ["unshare", "--net", sys.executable, "-m", "tests.soak.shards", "--in-namespace", *sys.argv[1:]]
    return subprocess.run(command, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
