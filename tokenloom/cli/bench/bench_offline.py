"""Benchmarks of an engine without a mesh: ``throughput``, ``step``, ``speculation``, ``shared`` and ``kv``."""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from tokenloom.bench.engine.step_tables import (
    attention_table,
    decode_table,
    memory_table,
    overhead_table,
    prefill_table,
)
from tokenloom.bench.engine.throughput import ThroughputOptions, run_throughput, table
from tokenloom.bench.load.datasets import DatasetOptions
from tokenloom.bench.report import machine
from tokenloom.model_files.model_path import DEMO_MODEL_NAME
from tokenloom.services.runtime.host.options import options_of

from ..model_directory import model_directory
from ..options import built, engine_options, offers, parsed
from .bench_output import AsJson, OutputJson, failures, progress, show

_BATCH = DatasetOptions(num_prompts=32)
Model = Annotated[str, typer.Option(help="Checkpoint directory, GGUF file or hub id.")]


@offers(engine_options())
@offers(options_of(_BATCH).values())
def throughput(
    model: Model = DEMO_MODEL_NAME, output_json: OutputJson = None, as_json: AsJson = False, **chosen: Any
) -> None:
    """Measure the requests/s and tokens/s of the offline API on one batch of prompts."""
    with failures():
        options = ThroughputOptions(model, built(_BATCH, chosen), llm=parsed(chosen), progress=sys.stderr.isatty())
        report = run_throughput(options)
    show(report, [table(report)], as_json=as_json, path=output_json)


@offers(engine_options("dtype", "attention_backend", "processor_level"))
def step(
    model: Model = DEMO_MODEL_NAME,
    batch: Annotated[
        list[int] | None, typer.Option(min=1, help="Requests in a decode step. [default: 1, 8, 32]")
    ] = None,
    context: Annotated[int, typer.Option(min=1, help="Tokens of each request before the measured steps.")] = 128,
    steps: Annotated[int, typer.Option(min=1, help="Steps to measure.")] = 64,
    threads: Annotated[int, typer.Option(min=0, help="Compute threads; 0: the library decides.")] = 0,
    prefill: Annotated[
        list[int] | None, typer.Option(min=1, help="Lengths of the prompts to time. [default: 512, 2048]")
    ] = None,
    vllm: Annotated[
        Path | None, typer.Option(help="Environment with vLLM's CPU build, to compare its attention.")
    ] = None,
    requests: Annotated[int, typer.Option(min=1, help="Requests in the measurement of Python's share.")] = 256,
    overhead_context: Annotated[
        list[int] | None, typer.Option(min=1, help="Lengths of their prompts. [default: 128, 2048, 8192]")
    ] = None,
    output_json: OutputJson = None,
    as_json: AsJson = False,
    **engine: Any,
) -> None:
    """Measure decode steps, prefill, Python's share of a step, and memory, against what the hardware allows."""
    # Imported here because they import torch.
    from tokenloom.bench.engine.attention_decode import AttentionOptions, run_attention
    from tokenloom.bench.engine.decode_step import DecodeOptions, run_decode
    from tokenloom.bench.engine.prefill_step import PrefillOptions, run_prefill
    from tokenloom.bench.engine.step_overhead import OverheadOptions, run_overhead
    from tokenloom.gpu_worker.kernels.levels import limit_level

    path, name = model_directory(model, None)
    chosen = {"dtype": "auto", "attention_backend": "auto", "processor_level": "auto", **parsed(engine)}
    dtype, backend = chosen["dtype"], chosen["attention_backend"]
    with failures():
        if (level := chosen["processor_level"]) != "auto":
            limit_level(level)
        decode = run_decode(DecodeOptions(path, tuple(batch or (1, 8, 32)), context, steps, dtype, threads, backend))
        prompts = run_prefill(PrefillOptions(path, tuple(prefill or (512, 2048)), 3, dtype, threads, backend))
        attention = run_attention(AttentionOptions(path, vllm, threads=threads)) if vllm is not None else []
        lengths = overhead_context or (128, 2048, 8192)
        overhead = [run_overhead(OverheadOptions(requests, length)) for length in lengths]
    report = {
        "machine": machine.describe(),
        "model": name,
        "decode": decode.rows,
        "memory": decode.memory,
        "prefill": prompts,
        "attention": attention,
        "overhead": overhead,
    }
    shown = [decode_table(decode.rows), memory_table(decode.memory), prefill_table(prompts), overhead_table(overhead)]
    if attention:
        shown.append(attention_table(attention))
    show(report, shown, as_json=as_json, path=output_json)


def speculation(
    model: Annotated[str, typer.Option(help="Checkpoint directory, GGUF file or hub id.")] = DEMO_MODEL_NAME,
    drafts: Annotated[int, typer.Option(min=1, max=32, help="Most drafts of a request in a step.")] = 6,
    tokens: Annotated[int, typer.Option(min=8, max=300, help="Tokens of each answer.")] = 96,
    rounds: Annotated[int, typer.Option(min=1, help="Answers of each case, with drafts and without in turns.")] = 3,
    threads: Annotated[int, typer.Option(min=0, help="Compute threads; 0: the library decides.")] = 0,
    output_json: OutputJson = None,
    as_json: AsJson = False,
) -> None:
    """Measure scripted answers with drafts and without, in turns: drafts of which 70 % are right, n-grams on text that
    repeats its prompt and on random text, and 32 streams at once."""
    # Imported here because it imports torch.
    from tokenloom.bench.engine.speculation import SpeculationOptions, run_speculation, table

    path, name = model_directory(model, None)
    with failures():
        rows = run_speculation(SpeculationOptions(path, drafts, tokens, rounds, threads))
    report = {"machine": machine.describe(), "model": name, "speculation": rows}
    show(report, [table(rows)], as_json=as_json, path=output_json)


@offers(engine_options("dtype", "quantization", "num_threads"))
def shared(
    model: Annotated[str, typer.Option(help="Checkpoint directory, GGUF file or hub id.")] = DEMO_MODEL_NAME,
    requests: Annotated[list[int] | None, typer.Option(min=1, help="Requests at once. [default: 1, 32]")] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens that each request generates.")] = 64,
    hogs: Annotated[int, typer.Option(min=0, help="Busy loops next to the engine; 0: do not measure this.")] = 2,
    quota: Annotated[float, typer.Option(min=0, help="Cores of a CPU limit; 0: do not measure this.")] = 0.0,
    seconds: Annotated[float, typer.Option(min=0.1, help="Shortest time of a measurement.")] = 4.0,
    turns: Annotated[int, typer.Option(min=1, help="Measurements of each case, in turns.")] = 3,
    output_json: OutputJson = None,
    as_json: AsJson = False,
    **engine: Any,
) -> None:
    """Measure which share of its tokens/s an engine keeps next to busy loops, and under the CPU limit of a control
    group, which this machine must let the command make."""
    from tokenloom.bench.shared_machine.run import SharedOptions, run_shared, table

    sizes = tuple(requests or (1, 32))
    with failures():
        report = run_shared(SharedOptions(model, sizes, tokens, hogs, quota, seconds, turns, parsed(engine)))
    show(report, [table(report)], as_json=as_json, path=output_json)


def kv(
    ways: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[WAY]...", help="shm, socket, nixl or offload; by default all that work on this machine."
        ),
    ] = None,
    seconds: Annotated[float, typer.Option(min=0.01, help="Seconds for each way and shape.")] = 1.0,
    pool_mib: Annotated[int, typer.Option(min=4, help="Size of each pool in MiB; a quarter of it moves.")] = 256,
    output_json: OutputJson = None,
    as_json: AsJson = False,
) -> None:
    """Move KV blocks between processes by every transport, in turns, and compare with a copy in one process."""
    from tokenloom.bench.kv import kv_transfer as kv_bench  # torch, seconds
    from tokenloom.bench.kv.kv_shape import SHAPES

    with failures(), progress() as bars:
        task = bars.add_task("shapes", total=len(SHAPES))
        report = kv_bench.run(ways or [], pool_mib << 20, seconds, lambda: bars.advance(task))
    show(report, kv_bench.tables(report), as_json=as_json, path=output_json)
