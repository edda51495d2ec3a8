"""Measures how long the garbage collector delays a core's steps, with and without freezing the heap of its start.

``python -m tokenloom.bench.engine.gc_pauses`` runs a core of the hash worker under load, each way in its own process
with a core's imports. Requests come in bursts, because the collector does not run if as many requests come as end.
"""

import argparse
import gc
import json
import subprocess
import sys
import time
from typing import Any

from tokenloom.engine_core.client.core_client import InprocClient
from tokenloom.engine_core.data.config import CacheConfig, EngineConfig, SchedulerConfig, WorkerConfig
from tokenloom.engine_core.data.core_params import CoreSamplingParams
from tokenloom.engine_core.data.messages import EngineCoreRequest
from tokenloom.engine_core.executor.make_executor import make_executor
from tokenloom.engine_core.wire.frames import encode
from tokenloom.services.engine.core import core_main  # noqa: F401  # for its imports, which are part of the heap
from tokenloom.services.engine.core.workers import make_worker

_REQUESTS = 128
_BURST = 1000
_INPUT_LEN, _OUTPUT_LEN = 64, 64


def run_steps(num_steps: int, *, freeze: bool) -> dict[str, Any]:
    """Holds the milliseconds of the median and the longest step, and of the collections during them."""
    num_blocks = _REQUESTS * ((_INPUT_LEN + _OUTPUT_LEN) // 16 + 2)
    config = EngineConfig(
        worker=WorkerConfig(model="", worker="hash"),
        cache=CacheConfig(num_blocks=num_blocks),
        scheduler=SchedulerConfig(max_num_seqs=_REQUESTS),
    )
    client = InprocClient(config, make_executor(config, make_worker))
    load = _Load(client)
    for _ in range(_OUTPUT_LEN):
        load.step()
    gc.collect()
    if freeze:
        gc.freeze()
    pauses = _Pauses()
    gaps = []
    with pauses:
        for _ in range(num_steps):
            started = time.perf_counter()
            load.step()
            gaps.append((time.perf_counter() - started) * 1e3)
    started = time.perf_counter()
    gc.collect()
    full = (time.perf_counter() - started) * 1e3
    client.close()
    gaps.sort()
    return {
        "median_step_ms": round(gaps[num_steps // 2], 3),
        "longest_step_ms": round(gaps[-1], 3),
        "longest_collection_ms": round(max(max(each, default=0.0) for each in pauses.of_generation), 3),
        "collections": [len(each) for each in pauses.of_generation],
        "full_collection_ms": round(full, 3),
        "all_collections_ms": round(sum(map(sum, pauses.of_generation)), 3),
    }


class _Load:
    """Keep the batch full; waiting requests came in a burst."""

    def __init__(self, client: InprocClient) -> None:
        self._client = client
        self._num_added = self._num_live = 0

    def step(self) -> None:
        if self._num_live < _REQUESTS:
            for _ in range(_BURST):
                self._add()
        outputs = self._client.get_output()
        encode(outputs)
        self._num_live -= sum(output.finish_reason is not None for output in outputs.outputs)

    def _add(self) -> None:
        self._num_live += 1
        self._num_added += 1
        length = _OUTPUT_LEN - self._num_added % 32  # different lengths, so that they do not end together
        prompt = [(self._num_added * 31 + i) % 30_000 for i in range(_INPUT_LEN)]
        params = CoreSamplingParams(max_tokens=length, seed=0)
        self._client.add_request(EngineCoreRequest(f"{self._num_added}", prompt, params))


class _Pauses:
    """Records the milliseconds of every collection inside its context, by generation."""

    def __init__(self) -> None:
        self.of_generation: tuple[list[float], list[float], list[float]] = ([], [], [])
        self._started = 0.0

    def __enter__(self) -> None:
        gc.callbacks.append(self._note)

    def __exit__(self, *_: object) -> None:
        gc.callbacks.remove(self._note)

    def _note(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._started = time.perf_counter()
        else:
            self.of_generation[info["generation"]].append((time.perf_counter() - self._started) * 1e3)


def main() -> None:
    """Print a line for each way."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=("default", "frozen"), help="in this process")
    arguments = parser.parse_args()
    if arguments.only:
        print(json.dumps(run_steps(arguments.steps, freeze=arguments.only == "frozen")))
        return
    command = [sys.executable, "-m", "tokenloom.bench.engine.gc_pauses", "--steps", str(arguments.steps), "--only"]
    for _ in range(arguments.rounds):
        for way in ("default", "frozen"):
            print(
                f"{way}: {subprocess.run([*command, way], check=True, capture_output=True, text=True).stdout.strip()}"
            )


if __name__ == "__main__":
    main()
