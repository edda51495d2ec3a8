"""Measures what LoRA adapters cost a decode step: ``python -m benchmarks.engine.lora_step MODEL``.

Three engines decode the same rows in turns, so that what slows the machine slows all of them: one without adapters, one
with ``enable_lora`` and no request that names an adapter, and one whose rows name several random adapters. What counts
is the median over the turns of their ratios to the first.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from tokenloom.engine_core.core import EngineCore
from tokenloom.engine_core.data.config import CacheConfig, EngineConfig, LoraConfig, SchedulerConfig, WorkerConfig
from tokenloom.engine_core.data.core_params import CoreSamplingParams
from tokenloom.engine_core.data.messages import EngineCoreRequest
from tokenloom.engine_core.executor.uniproc import UniProcExecutor
from tokenloom.gpu_worker.devices import make_worker
from tokenloom.model_files.model_path import resolve
from tokenloom.request.adapter_names import adapter_salt

from ..random_adapter import write_adapter

_CONTEXT = 32
_WARM_STEPS = 8


class Engine:
    """Decodes rows that never end."""

    def __init__(self, model: Path, options: argparse.Namespace, lora: LoraConfig, *, uses_adapters: bool) -> None:
        num_tokens = _CONTEXT + _WARM_STEPS + options.turns * options.steps + 16
        config = EngineConfig(
            worker=WorkerConfig(model=str(model), num_threads=options.threads, dtype=options.dtype),
            cache=CacheConfig(num_blocks=options.rows * (num_tokens // 16 + 2), enable_prefix_caching=False),
            scheduler=SchedulerConfig(max_num_seqs=options.rows),
            max_model_len=num_tokens,
            lora=lora,
        )
        self._core = EngineCore(config, UniProcExecutor(make_worker(config)))
        self.close = self._core.shutdown
        loaded = self._core.adapters.answer().adapters if self._core.adapters is not None and uses_adapters else []
        for row in range(options.rows):
            digest = loaded[row % len(loaded)].digest if loaded else b""
            params = CoreSamplingParams(max_tokens=num_tokens, temperature=0.0, seed=0, stop_token_ids=())
            prompt = [(7 * row + position) % 100 + 3 for position in range(_CONTEXT)]
            salt = adapter_salt(b"", digest)
            self._core.add_request(EngineCoreRequest(str(row), prompt, params, cache_salt=salt, adapter=digest))
        self.seconds(_WARM_STEPS, time.perf_counter)

    def seconds(self, steps: int, clock: Callable[[], float]) -> float:
        """Return the mean seconds of a step."""
        started = clock()
        for _ in range(steps):
            self._core.step()
        return (clock() - started) / steps


def measure(options: argparse.Namespace, folder: Path) -> dict[str, object]:
    """Return the milliseconds of a step and the ratios."""
    model = resolve(options.model)
    for number in range(options.adapters):
        write_adapter(folder / str(number), model, options.rank, number)
    modules = tuple(f"{number}={folder / str(number)}" for number in range(options.adapters))
    lora = LoraConfig(enable=True, max_loras=options.adapters, max_lora_rank=options.rank, modules=modules)
    with ExitStack() as stack:
        engines = {
            "off": Engine(model, options, LoraConfig(), uses_adapters=False),
            "unused": Engine(model, options, lora, uses_adapters=False),
            "adapters": Engine(model, options, lora, uses_adapters=True),
        }
        for engine in engines.values():
            stack.callback(engine.close)
        clock = time.process_time if options.cpu_time else time.perf_counter
        taken = [
            {name: engine.seconds(options.steps, clock) for name, engine in engines.items()}
            for _ in range(options.turns)
        ]
    report: dict[str, object] = {key: value for key, value in vars(options).items() if key != "model"}
    for name in engines:
        report[f"{name}_ms"] = round(1e3 * statistics.median(each[name] for each in taken), 3)
    for name in ("unused", "adapters"):
        report[f"{name}_ratio"] = round(statistics.median(each[name] / each["off"] for each in taken), 4)
    return report


def main(arguments: Sequence[str] | None = None) -> None:
    """Print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="checkpoint directory, or tokenloom-demo")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--adapters", type=int, default=4)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--steps", type=int, default=20, help="steps of an engine in a turn [20]")
    parser.add_argument("--cpu-time", action="store_true", help="count the process's CPU time instead of time")
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(measure(parser.parse_args(arguments), Path(folder))), flush=True)


if __name__ == "__main__":
    main()
