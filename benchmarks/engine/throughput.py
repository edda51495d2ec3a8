"""Runs ``bench throughput``: the offline API on one batch of prompts."""

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec
from rich.table import Table

from ..load.datasets import DatasetOptions, make_prompts
from ..report import machine

if TYPE_CHECKING:  # it imports torch
    from tokenloom.offline.prompts import TokensPrompt


@dataclass(frozen=True)
class ThroughputOptions:
    """Says which model to load, and with which prompts."""

    model: str
    dataset: DatasetOptions
    llm: dict[str, Any] = field(default_factory=dict)
    """More arguments of `tokenloom.LLM`."""
    progress: bool = True


def run_throughput(options: ThroughputOptions) -> dict[str, Any]:
    """Load the model, compute one short prompt, then time the batch, greedily and ignoring end-of-sequence."""
    # Imported here, because only this command needs torch.
    from tokenloom import LLM, SamplingParams

    llm = LLM(options.model, **options.llm)
    try:
        vocab_size = llm.get_tokenizer().get_vocab_size(with_added_tokens=True)
        prompts = make_prompts(options.dataset, vocab_size)
        warm = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
        llm.generate({"prompt_token_ids": prompts[0].token_ids[:8]}, warm, use_tqdm=False)
        sampling = [SamplingParams(temperature=0.0, max_tokens=p.max_tokens, ignore_eos=True) for p in prompts]
        inputs: list[TokensPrompt] = [{"prompt_token_ids": prompt.token_ids} for prompt in prompts]
        load, started = machine.Load(), time.perf_counter()
        outputs = llm.generate(inputs, sampling, use_tqdm=options.progress)
        seconds = time.perf_counter() - started
    finally:
        llm.close()
    num_input = sum(len(prompt.token_ids) for prompt in prompts)
    num_output = sum(len(output.outputs[0].token_ids) for output in outputs)
    return {
        "machine": machine.describe(),
        "model": options.model,
        "dataset": msgspec.structs.asdict(options.dataset),
        "elapsed_time": round(seconds, 4),
        "num_requests": len(prompts),
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "requests_per_second": round(len(prompts) / seconds, 4),
        "tokens_per_second": round((num_input + num_output) / seconds, 3),
        "output_tokens_per_second": round(num_output / seconds, 3),
        **load.cores(),
    }


def table(report: dict[str, Any]) -> Table:
    """Return the figures in words."""
    shown = Table(title=f"Throughput of {report['model']}", title_justify="left", title_style="bold", show_header=False)
    shown.add_column()
    shown.add_column(justify="right")
    shown.add_row("requests", f"{report['num_requests']} in {report['elapsed_time']:.2f} s")
    shown.add_row("requests/s", f"{report['requests_per_second']:,.2f}")
    shown.add_row("output tokens/s", f"{report['output_tokens_per_second']:,.1f}")
    shown.add_row("tokens/s in all", f"{report['tokens_per_second']:,.1f}")
    return shown
