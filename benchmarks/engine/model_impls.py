"""Measures how much less CPU the built-in code takes than transformers' modules, for each built-in architecture.

``python -m benchmarks.engine.model_impls`` writes a random checkpoint of each model type and decodes with both engines
in this process, on one thread and in turns. It prints the CPU milliseconds of a step of each, and their ratio.
"""

import argparse
import gc
import statistics
import tempfile
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import transformers

from tokenloom.engine_core.core import EngineCore
from tokenloom.engine_core.data.config import CacheConfig, EngineConfig, SchedulerConfig, WorkerConfig
from tokenloom.engine_core.data.core_sampling_params import SamplingParams
from tokenloom.engine_core.data.messages import EngineCoreRequest
from tokenloom.engine_core.executor.uniproc import UniProcExecutor
from tokenloom.gpu_worker.devices import CPUWorker

_VOCAB_SIZE = 8192
_LENGTH = 1024
_PROMPT = 64
_SHAPES: dict[str, Any] = {
    "vocab_size": _VOCAB_SIZE,
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 8,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": _LENGTH,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 512}
KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "gemma2": {"sliding_window": 512},
    "gemma3_text": {"sliding_window": 512},
    "phi3": {},
    "olmo2": {},
    "smollm3": {},
    "mixtral": {"num_local_experts": 8, "intermediate_size": 512},
    "qwen2_moe": {**_EXPERTS, "shared_expert_intermediate_size": 512},
    "qwen3_moe": _EXPERTS,
}
"""Model types and what their configurations have beyond ``_SHAPES``."""


class Turns(NamedTuple):
    """Says how much is measured."""

    pairs: int
    """Measurements of each engine."""
    steps: int
    """Steps of a measurement."""


def write_checkpoint(kind: str, directory: Path) -> Path:
    """Write a random bfloat16 checkpoint of this model type."""
    config = transformers.AutoConfig.for_model(kind, **{**_SHAPES, **KINDS[kind]})
    torch.manual_seed(0)
    make: Any = transformers.AutoModelForCausalLM.from_config
    model = make(config, dtype=torch.bfloat16)
    path = directory / kind
    model.save_pretrained(path)
    return path


class _Side:
    """Decodes with one of the two."""

    def __init__(self, path: Path, model_impl: Literal["native", "transformers"], most_rows: int) -> None:
        config = EngineConfig(
            worker=WorkerConfig(model=str(path), num_threads=1, model_impl=model_impl),
            cache=CacheConfig(num_blocks=4 * most_rows * _LENGTH // 16),  # 4: layers may be in groups
            scheduler=SchedulerConfig(max_num_seqs=most_rows, max_num_batched_tokens=most_rows * _PROMPT),
            max_model_len=_LENGTH,
        )
        self.core = EngineCore(config, UniProcExecutor(CPUWorker(config)))

    def begin(self, rows: int) -> None:
        """Compute the prompts of ``rows`` requests, which then decode."""
        self.core.abort_requests([request.request_id for request in self.core.scheduler.running])
        params = SamplingParams(max_tokens=_LENGTH - _PROMPT - 1, seed=0, temperature=0.0)
        for row in range(rows):
            prompt = [(row * 31 + position * 7) % _VOCAB_SIZE for position in range(_PROMPT)]
            self.core.add_request(EngineCoreRequest(f"{rows}-{row}", prompt, params))
        for _ in range(3):
            self.core.step()

    def measure(self, steps: int) -> float:
        """Return the CPU milliseconds of a step."""
        began = time.process_time()
        for _ in range(steps):
            self.core.step()
        return (time.process_time() - began) * 1e3 / steps


def compare(path: Path, rows: Sequence[int], turns: Turns) -> list[tuple[float, float, float]]:
    """Return for each number of rows: milliseconds of native, of transformers, and the median of their ratios."""
    native, library = (_Side(path, name, max(rows)) for name in ("native", "transformers"))
    results = []
    for count in rows:
        for side in (native, library):
            side.begin(count)
        pairs = [(native.measure(turns.steps), library.measure(turns.steps)) for _ in range(turns.pairs)]
        medians = [statistics.median(column) for column in zip(*pairs, strict=True)]
        results.append((medians[0], medians[1], statistics.median(there / ours for ours, there in pairs)))
    for side in (native, library):
        side.core.shutdown()
    return results


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a row of a table for each model type."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", help="model types; by default all")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--steps", type=int, default=6, help="steps of each measurement [6]")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    library_log: Any = transformers.logging
    library_log.set_verbosity_error()
    library_log.disable_progress_bar()
    warnings.simplefilter("ignore")
    turns = Turns(options.pairs, options.steps)
    heads = "".join(f" {count} rows: native, transformers (ratio) |" for count in options.rows)
    print(f"| model type |{heads}\n|---|{'---|' * len(options.rows)}")
    with tempfile.TemporaryDirectory(prefix="tl-") as directory:
        for kind in options.kinds or KINDS:
            results = compare(write_checkpoint(kind, Path(directory)), options.rows, turns)
            cells = "".join(f" {ours:.1f}, {there:.1f} ms ({ratio:.2f}) |" for ours, there, ratio in results)
            print(f"| {kind} |{cells}", flush=True)
            gc.collect()


if __name__ == "__main__":
    main()
