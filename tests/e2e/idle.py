"""How many cores the processes of a mesh use while no request runs.

``python -m tests.e2e.idle`` measures every shape of mesh for 30 seconds.
"""

import argparse
import json
import threading
import time
import urllib.request

import psutil

from tests.e2e.conftest import Served, serving
from tokenloom.gpu_worker.kv_connector import nixl

MOST_CORES = 0.1
"""For all processes of a mesh together."""
_SPLIT = ("--prefill", "1", "--decode", "1", "--pd-threshold", "16", "--kv-transports")
SHAPES = {"unsplit": ("--engines", "2"), "split, every transport": (*_SPLIT, "auto")}
if nixl.is_available():
    SHAPES["split, nixl alone"] = (*_SPLIT, "nixl")
_PROMPT = list(range(100, 400))


def ask(served: Served) -> None:
    """Have one request answered, so that whatever begins with the first transfer has begun."""
    body = {"model": "tokenloom-demo", "prompt": _PROMPT, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{served.url}/v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert json.load(answer)["usage"]["completion_tokens"] == 4


def cpu_seconds(processes: list[psutil.Process]) -> dict[int, float]:
    """Return the processor time of each process since its start, by pid."""
    times = {process.pid: process.cpu_times() for process in processes}
    return {pid: found.user + found.system for pid, found in times.items()}


def idle_cores(served: Served, seconds: float) -> dict[str, float]:
    """Return the cores that each process of a mesh uses during the next ``seconds``, by name."""
    processes = served.family()
    began, before = time.monotonic(), cpu_seconds(processes)
    threading.Event().wait(seconds)
    after = cpu_seconds(processes)
    window = time.monotonic() - began
    names = {process.pid: f"{process.pid} {' '.join(process.cmdline()[1:4])}" for process in processes}
    return {names[pid]: (after[pid] - before[pid]) / window for pid in before}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=30.0, help="the length of a measurement (default 30)")
    parser.add_argument("--settle", type=float, default=10.0, help="the time before it, for start-up work (default 10)")
    parser.add_argument("--worker", default="model", choices=("model", "hash"))
    arguments = parser.parse_args()
    failed = False
    for shape, flags in SHAPES.items():
        with serving() as serve:
            served = serve("--worker", arguments.worker, *flags)
            ask(served)
            threading.Event().wait(arguments.settle)
            cores = idle_cores(served, arguments.seconds)
        print(f"{shape}: {sum(cores.values()):.3f} cores")
        for name, share in sorted(cores.items(), key=lambda item: -item[1]):
            print(f"  {share:.4f}  {name}")
        failed |= sum(cores.values()) >= MOST_CORES
    if failed:
        raise SystemExit(f"an idle mesh uses {MOST_CORES} cores or more")


if __name__ == "__main__":
    main()
