"""Compares decode steps of engines with several workers: run from recordings with those computed operation by
operation, or with the steps of one worker.

``python -m tokenloom.bench.engine.rank_step`` runs both engines in turns (A B B A), over processes of one thread each,
and prints a JSON line for each way to divide the model and each batch size: the processor time of all workers for a
step, which other programs on the machine change little, and its time. With ``--base eager`` the tokens of both engines
must be equal; with ``--base one`` the line also says which share of them is, since sums of ranks are rounded elsewhere,
and what weights and KV take of the memory of one worker, and of the largest of several.
"""

import argparse
import json
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import psutil

from tokenloom.engine_core.core import EngineCore
from tokenloom.engine_core.data.config import CacheConfig, EngineConfig, ParallelConfig, SchedulerConfig, WorkerConfig
from tokenloom.engine_core.data.core_params import CoreSamplingParams
from tokenloom.engine_core.data.messages import EngineCoreRequest
from tokenloom.engine_core.data.model_info import FreedMemory
from tokenloom.engine_core.executor.multiproc import MultiprocExecutor
from tokenloom.model_files.model_path import DEMO_MODEL
from tokenloom.services.engine.core.workers import WORKER_COMMAND

_TURNS = 6
_WARM_STEPS = 8
_SHAPES = ("tp2", "pp2")
_ONE = "tp1"


@dataclass(slots=True)
class _Engine:
    core: EngineCore
    workers: list[psutil.Process]
    cpu_seconds: list[float] = field(default_factory=list)
    """Of all workers, for a step: the mean of each turn."""
    step_seconds: list[float] = field(default_factory=list)
    """The mean of each turn."""
    bytes_of_worker: int = 0
    """What weights and KV take of the memory of the largest worker."""


@contextmanager
def _engine(options: argparse.Namespace, shape: str, rows: int, *, eager: bool) -> Iterator[_Engine]:
    size = int(shape[2:])
    parallel = ParallelConfig(
        tensor_parallel_size=size if shape.startswith("tp") else 1,
        pipeline_parallel_size=size if shape.startswith("pp") else 1,
    )
    config = EngineConfig(
        worker=WorkerConfig(
            model=str(options.model),
            device="cpu",
            num_threads=size,
            enforce_eager=eager,
            quantization=options.quantization,
            load_format=options.load_format,
        ),
        cache=CacheConfig(num_blocks=64 * rows, enable_prefix_caching=False),
        scheduler=SchedulerConfig(max_num_seqs=max(rows, size)),
        parallel=parallel,
        max_model_len=1000,
    )
    executor = MultiprocExecutor(config, WORKER_COMMAND)
    core = EngineCore(config, executor)
    try:
        engine = _Engine(core, [psutil.Process(worker.pid) for worker in executor.workers])
        yield engine
        freed = msgspec.convert(executor.collective_rpc("sleep", 2), list[FreedMemory])
        engine.bytes_of_worker = max(each.weights + each.kv_cache for each in freed)
    finally:
        core.shutdown()


def _turn(engine: _Engine, rows: int, steps: int, turn: int) -> list[int]:
    """Decode ``rows`` requests for so many tokens each. Returns the tokens."""
    core, tokens = engine.core, dict[str, list[int]]()
    params = CoreSamplingParams(max_tokens=_WARM_STEPS + steps, seed=0, temperature=0.0)
    for row in range(rows):
        tokens[name := f"{turn}-{row}"] = []
        core.add_request(EngineCoreRequest(name, [5 + row, 6, 7], params))
    began, started, count = 0.0, 0.0, 0
    while core.has_work():
        if count == 0 and all(len(each) >= _WARM_STEPS for each in tokens.values()):
            began, started = _cpu_seconds(engine), time.perf_counter()
            count = 1
        for output in core.step().outputs:
            tokens[output.request_id] += output.new_token_ids
    engine.cpu_seconds.append((_cpu_seconds(engine) - began) / steps)
    engine.step_seconds.append((time.perf_counter() - started) / steps)
    return [token for each in tokens.values() for token in each]


def _cpu_seconds(engine: _Engine) -> float:
    times = [process.cpu_times() for process in engine.workers]
    return sum(each.user + each.system for each in times)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a JSON line for each case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=DEMO_MODEL, help="checkpoint directory [the demo model]")
    parser.add_argument("--base", choices=("eager", "one"), default="eager", help="what is compared with [eager]")
    parser.add_argument("--quantization", choices=("int8-dynamic", "int4"), help="of the weights, at load")
    parser.add_argument("--load-format", choices=("auto", "dummy"), default="auto", help="dummy: random weights [auto]")
    parser.add_argument("--shapes", nargs="+", default=_SHAPES, help="tpN or ppN, N workers [tp2 pp2]")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--steps", type=int, default=300, help="steps of a turn [300]")
    parser.add_argument("--turns", type=int, default=_TURNS, help=f"turns of each engine [{_TURNS}]")
    options = parser.parse_args(arguments)
    for shape in options.shapes:
        for rows in options.rows:
            print(json.dumps(_compare(options, shape, rows)), flush=True)


def _compare(options: argparse.Namespace, shape: str, rows: int) -> dict[str, object]:
    is_eager = options.base == "eager"
    with (
        _engine(options, shape if is_eager else _ONE, rows, eager=is_eager) as base,
        _engine(options, shape, rows, eager=False) as recorded,
    ):
        equal, total = 0, 0
        for turn in range(options.turns):
            order = (base, recorded) if turn % 2 == 0 else (recorded, base)
            first, second = (_turn(each, rows, options.steps, turn) for each in order)
            equal, total = equal + sum(map(int.__eq__, first, second)), total + len(first)
            assert not is_eager or first == second, "a recording changed a token"
    result: dict[str, object] = {"workers": shape, "rows": rows, **_result(base, recorded, options.base)}
    if not is_eager:
        result |= {
            "one_bytes": base.bytes_of_worker,
            "bytes_of_worker": recorded.bytes_of_worker,
            "bytes_ratio": round(recorded.bytes_of_worker / base.bytes_of_worker, 4),
            "equal_tokens": round(equal / total, 4),
        }
    return result


def _result(base: _Engine, recorded: _Engine, name: str) -> dict[str, float]:
    cpu = [statistics.median(each.cpu_seconds) * 1e6 for each in (base, recorded)]
    step = [statistics.median(each.step_seconds) * 1e6 for each in (base, recorded)]
    return {
        f"{name}_cpu_us": round(cpu[0]),
        "recorded_cpu_us": round(cpu[1]),
        "cpu_ratio": round(cpu[1] / cpu[0], 3),
        f"{name}_step_us": round(step[0]),
        "recorded_step_us": round(step[1]),
        "step_ratio": round(step[1] / step[0], 3),
    }


if __name__ == "__main__":
    main()
