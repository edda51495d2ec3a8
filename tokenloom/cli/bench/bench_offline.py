"""``tokenloom bench throughput`` and ``step``: the engine without a mesh."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from tokenloom.bench.engine.step_tables import (
    attention_table,
    decode_table,
    memory_table,
    overhead_table,
    prefill_table,
)
from tokenloom.bench.engine.throughput import ThroughputOptions, run_throughput, table
from tokenloom.bench.load.datasets import DatasetName, DatasetOptions
from tokenloom.bench.report import machine
from tokenloom.checkpoint import DEMO_MODEL_NAME

from ..mesh.engine_choices import Dtype, Quantization
from ..mesh.flags import model_directory
from .bench_load import AsJson, Dataset, InputLen, NumPrefixes, OutputLen, PrefixLen, RangeRatio, Seed
from .bench_output import failures, show

OutputJson = Annotated[Path | None, typer.Option(help="Write the JSON to this file.")]
Model = Annotated[str, typer.Option(help="Checkpoint directory or Hugging Face hub id.")]


def throughput(
    model: Model = DEMO_MODEL_NAME,
    dataset_name: Dataset = DatasetName.RANDOM,
    num_prompts: Annotated[int, typer.Option(min=1, help="Prompts in the batch.")] = 32,
    input_len: InputLen = 128,
    output_len: OutputLen = 128,
    range_ratio: RangeRatio = 0.0,
    prefix_len: PrefixLen = 512,
    num_prefixes: NumPrefixes = 1,
    seed: Seed = 0,
    dtype: Annotated[Dtype, typer.Option(help="Number format.")] = Dtype.AUTO,
    quantization: Annotated[Quantization | None, typer.Option(help="Round the layers' weights at load.")] = None,
    max_num_seqs: Annotated[int | None, typer.Option(min=1, help="Requests in a step.")] = None,
    max_num_batched_tokens: Annotated[int, typer.Option(min=1, help="Token budget of a step.")] = 2048,
    max_model_len: Annotated[int | None, typer.Option(min=1, help="Prompt and output together, tokens.")] = None,
    output_json: OutputJson = None,
    as_json: AsJson = False,
) -> None:
    """Time the offline API on one batch of prompts: requests/s and tokens/s."""
    with failures():
        options = ThroughputOptions(
            model=model,
            dataset=DatasetOptions(
                name=dataset_name,
                num_prompts=num_prompts,
                input_len=input_len,
                output_len=output_len,
                range_ratio=range_ratio,
                prefix_len=prefix_len,
                num_prefixes=num_prefixes,
                seed=seed,
            ),
            llm={
                "dtype": dtype.value,
                "quantization": quantization,
                "max_num_seqs": max_num_seqs,
                "max_num_batched_tokens": max_num_batched_tokens,
                "max_model_len": max_model_len,
            },
            progress=sys.stderr.isatty(),
        )
        report = run_throughput(options)
    show(report, [table(report)], as_json=as_json, path=output_json)


def step(
    model: Model = DEMO_MODEL_NAME,
    batch: Annotated[
        list[int] | None, typer.Option(min=1, help="Requests that decode at once. [default: 1, 8, 32]")
    ] = None,
    context: Annotated[int, typer.Option(min=1, help="Tokens of each request before the measured steps.")] = 128,
    steps: Annotated[int, typer.Option(min=1, help="Steps to measure.")] = 64,
    threads: Annotated[int, typer.Option(min=0, help="Compute threads; 0: the library's choice.")] = 0,
    dtype: Annotated[Dtype, typer.Option(help="Number format.")] = Dtype.AUTO,
    attention_backend: Annotated[str, typer.Option(help="By default the engine's own choice.")] = "",
    prefill: Annotated[
        list[int] | None, typer.Option(min=1, help="Tokens of prompts to time. [default: 512, 2048]")
    ] = None,
    vllm: Annotated[
        Path | None, typer.Option(help="Environment with vLLM's CPU build: compare its attention with ours.")
    ] = None,
    requests: Annotated[int, typer.Option(min=1, help="Requests that run where Python's share is measured.")] = 256,
    overhead_context: Annotated[
        list[int] | None, typer.Option(min=1, help="Their prompts' lengths there. [default: 128, 2048, 8192]")
    ] = None,
    output_json: OutputJson = None,
    as_json: AsJson = False,
) -> None:
    """Measure decode steps against the memory bandwidth, prompts against matrix products, Python's share, memory."""
    # Here: these import torch.
    from tokenloom.bench.engine.attention_decode import AttentionOptions, run_attention
    from tokenloom.bench.engine.decode_step import DecodeOptions, run_decode
    from tokenloom.bench.engine.prefill_step import PrefillOptions, run_prefill
    from tokenloom.bench.engine.step_overhead import OverheadOptions, run_overhead

    path, name = model_directory(model, None)
    with failures():
        decode = run_decode(
            DecodeOptions(path, tuple(batch or (1, 8, 32)), context, steps, dtype.value, threads, attention_backend)
        )
        prompts = run_prefill(
            PrefillOptions(path, tuple(prefill or (512, 2048)), 3, dtype.value, threads, attention_backend)
        )
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
