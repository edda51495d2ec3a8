"""Measures layers that keep a state between tokens: one layer of the sizes of published models, without projections.

    python -m tokenloom.bench.engine.states --threads 1

prints a line for each kind of layer: the milliseconds of a prompt, and for decode steps of several requests the bytes
of states that are read and written in a second, as a share of what copying as many bytes reaches in the same turns. One
thread is measured by its CPU time, which other programs disturb less, several by the time that passes.

    tokenloom bench model qwen3.5-4b-part /tmp/part
    python -m tokenloom.bench.engine.states --model /tmp/part --tokens 2048 --threads 1

prints what share of a prompt's time these layers take without their projections, in a whole model.
"""

import argparse
import functools
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tokenloom.gpu_worker.attention.states import StatePlan
from tokenloom.gpu_worker.checkpoint.load_config import load_model_config
from tokenloom.gpu_worker.ops.state_ops import Convolution, CPUStateOps, Mamba2Weights

from .prefill_step import PrefillOptions, prompt_core, timed_prompt

Call = Callable[[Tensor, StatePlan, int], object]
"""Computes the layer for the first tokens of its inputs, so many as the number says, over these states."""

_DELTA = (32, 16, 128, 128)
"""Heads, heads of keys, and the sizes of keys and values of Qwen3-Next and Qwen3.5-4B."""
_MAMBA2 = (128, 1, 64, 128)
"""Heads, groups, head size and state size of Granite-4-H-Small."""
_CHANNELS = 8192
"""Of the convolution before the gated delta rule of Qwen3-Next."""


def _delta(ops: CPUStateOps, dtype: torch.dtype, tokens: int) -> tuple[tuple[int, ...], torch.dtype, Call]:
    heads, key_heads, key_size, value_size = _DELTA
    query, key = torch.randn(2, tokens, key_heads, key_size).to(dtype)
    value, decay = torch.randn(tokens, heads, value_size).to(dtype), -torch.rand(tokens, heads) * 0.3
    beta = torch.rand(tokens, heads)

    def call(states: Tensor, plan: StatePlan, count: int) -> None:
        ops.gated_delta(query[:count], key[:count], value[:count], (decay[:count], beta[:count]), states, plan)

    return (heads, key_size, value_size), torch.float32, call


def _mamba2(ops: CPUStateOps, dtype: torch.dtype, tokens: int) -> tuple[tuple[int, ...], torch.dtype, Call]:
    heads, groups, head_size, state_size = _MAMBA2
    widths = [heads * head_size, groups * state_size, groups * state_size]
    x, b, c = torch.split(torch.randn(tokens, sum(widths)).to(dtype), widths, dim=1)
    x = x.view(tokens, heads, head_size)
    b, c = (each.view(tokens, groups, state_size) for each in (b, c))
    dt, weights = torch.randn(tokens, heads).to(dtype), Mamba2Weights(-torch.rand(heads), *torch.randn(2, heads))

    def call(states: Tensor, plan: StatePlan, count: int) -> None:
        ops.mamba2(x[:count], b[:count], c[:count], dt[:count], weights, states, plan)

    return (heads, head_size, state_size), torch.float32, call


def _conv(ops: CPUStateOps, dtype: torch.dtype, tokens: int) -> tuple[tuple[int, ...], torch.dtype, Call]:
    x, convolution = (
        torch.randn(tokens, _CHANNELS).to(dtype),
        Convolution(torch.randn(4, _CHANNELS).to(dtype), None, True),
    )

    def call(states: Tensor, plan: StatePlan, count: int) -> None:
        ops.short_conv(x[:count], convolution, states, plan)

    return (3, _CHANNELS), dtype, call


_KINDS = {"gated delta": _delta, "mamba-2": _mamba2, "convolution": _conv}


def measure(kind: str, dtype: torch.dtype, tokens: int, requests: Sequence[int], pairs: int) -> dict[str, Any]:
    """Return the median milliseconds of a prompt of ``tokens``, and for each number of ``requests`` those of a decode
    step, the GB/s of states, read and written, and the share of the rate of copies that take turns with it."""
    ops, threads = CPUStateOps(), torch.get_num_threads()
    shape, state_dtype, call = _KINDS[kind](ops, dtype, max(tokens, *requests))
    clock = time.process_time if threads == 1 else time.perf_counter
    states = torch.zeros(2, *shape, dtype=state_dtype)
    (prompt,) = _turns([partial(call, states, StatePlan.make([tokens], [0], [1], []), tokens)], pairs, clock)
    row = {"layer": kind, "dtype": str(dtype).removeprefix("torch."), "threads": threads, "prompt_ms": _ms(prompt)}
    decoded = []
    for count in requests:
        states, slots = torch.zeros(2 * count, *shape, dtype=state_dtype), range(count)
        step = partial(call, states, StatePlan.make([1] * count, slots, slots, []), count)
        taken, copied = _turns([step, partial(states[count:].copy_, states[:count])], pairs, clock)
        decoded.append(
            {
                "requests": count,
                "ms": _ms(taken),
                "gb_s": round(states.nbytes / taken / 1e9, 1),
                "share_of_copies": round(copied / taken, 3),
            }
        )
    return row | {"decode": decoded}


def _turns(calls: Sequence[Callable[[], object]], pairs: int, clock: Callable[[], float]) -> list[float]:
    """Return the median seconds of each call; they take turns, so that what slows the machine slows all of them."""
    taken: list[list[float]] = [[] for _ in calls]
    for _ in range(pairs + 1):  # the first one warms up
        for call, seconds in zip(calls, taken, strict=True):
            started = clock()
            call()
            seconds.append(clock() - started)
    return [statistics.median(seconds[1:]) for seconds in taken]


_PARTS = {
    "short_conv": "convolution",
    "gated_delta": "recurrence",
    "mamba2": "recurrence",
    "delta_gates": "gates",
    "gated_norm": "norm",
}
"""Operations of a layer without its projections, and the share that each counts for."""


def measure_share(model: Path, tokens: int, repeats: int) -> dict[str, Any]:
    """Return the median milliseconds of a prompt of ``tokens`` in a whole model, and the shares of it that the
    convolution, the recurrence, and what lies between them take."""
    config, threads = load_model_config(model, "auto"), torch.get_num_threads()
    core = prompt_core(PrefillOptions(model, threads=threads), tokens, threads)
    wholes, parts = list[float](), dict[str, list[float]]()
    try:
        with _timed_parts() as taken:
            for repeat in range(repeats + 1):  # the first one warms up
                taken.update(dict.fromkeys(_PARTS.values(), 0.0))
                wholes.append(timed_prompt(core, config, tokens, repeat))
                for part, seconds in taken.items():
                    parts.setdefault(part, []).append(seconds / wholes[-1])
    finally:
        core.shutdown()
    shares = {part: round(statistics.median(found[1:]), 4) for part, found in parts.items()}
    row = {"model": model.name, "dtype": config.dtype_name, "threads": threads, "tokens": tokens}
    return row | {"prompt_ms": _ms(statistics.median(wholes[1:])), "shares": shares}


@contextmanager
def _timed_parts() -> Iterator[dict[str, float]]:
    """Add up the seconds of each kind of operation meanwhile."""
    taken: dict[str, float] = {}

    def timed(name: str, call: Callable[..., object]) -> Callable[..., object]:
        @functools.wraps(call)
        def measured(*args: Any, **kwargs: Any) -> object:
            started = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                taken[_PARTS[name]] = taken.get(_PARTS[name], 0.0) + time.perf_counter() - started

        return measured

    own = {name: getattr(CPUStateOps, name) for name in _PARTS}
    for name, call in own.items():
        setattr(CPUStateOps, name, timed(name, call))
    try:
        yield taken
    finally:
        for name, call in own.items():
            setattr(CPUStateOps, name, call)


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)


def main() -> None:
    """Measure every kind of layer, or a model's share of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=512, help="of the prompt")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--model", type=Path, help="a checkpoint of which the share of a prompt's time is measured")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.model is not None:
        print(json.dumps(measure_share(arguments.model, arguments.tokens, arguments.pairs)))
        return
    for kind in _KINDS:
        dtype = getattr(torch, arguments.dtype)
        print(json.dumps(measure(kind, dtype, arguments.tokens, arguments.requests, arguments.pairs)))


if __name__ == "__main__":
    main()
