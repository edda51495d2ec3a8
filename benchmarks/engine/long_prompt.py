"""Compares how long an engine of one worker and one of several prefill context parallel workers read a long prompt.

``python -m tokenloom.bench.engine.long_prompt`` starts both with one thread a worker, gives them the same prompts in
turns (A B B A), and prints a JSON line: the median seconds from a prompt to its first token, and the load of the
machine. The tokens of both engines must be equal.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tokenloom.engine_core.core import EngineCore
from tokenloom.engine_core.data.config import CacheConfig, EngineConfig, ParallelConfig, SchedulerConfig, WorkerConfig
from tokenloom.engine_core.data.core_params import CoreSamplingParams
from tokenloom.engine_core.data.messages import EngineCoreRequest
from tokenloom.engine_core.executor.multiproc import MultiprocExecutor
from tokenloom.services.engine.core.workers import WORKER_COMMAND

_VOCAB = 4096
_CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 16384,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "vocab_size": _VOCAB,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "torch_dtype": "float32",
}
"""A small model, whose weights are drawn."""


@contextmanager
def _engine(model: Path, size: int, tokens: int) -> Iterator[EngineCore]:
    config = EngineConfig(
        worker=WorkerConfig(model=str(model), device="cpu", num_threads=size, load_format="dummy", dtype="float32"),
        cache=CacheConfig(num_blocks=tokens // 16 + 64, enable_prefix_caching=False),
        scheduler=SchedulerConfig(max_num_seqs=4),
        parallel=ParallelConfig(prefill_context_parallel_size=size),
        max_model_len=tokens + 64,
    )
    core = EngineCore(config, MultiprocExecutor(config, WORKER_COMMAND))
    try:
        yield core
    finally:
        core.shutdown()


def _first_tokens(core: EngineCore, prompt: list[int], name: str, count: int) -> tuple[float, list[int]]:
    """Return the seconds to the first token, and the first tokens."""
    began, seconds, found = time.perf_counter(), 0.0, list[int]()
    core.add_request(EngineCoreRequest(name, prompt, CoreSamplingParams(max_tokens=count, seed=0, temperature=0.0)))
    while core.has_work():
        for output in core.step().outputs:
            found += output.new_token_ids
            seconds = seconds or time.perf_counter() - began
    return seconds, found


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096, help="of a prompt [4096]")
    parser.add_argument("--workers", type=int, default=2, help="of the second engine [2]")
    parser.add_argument("--turns", type=int, default=2, help="how often A B B A is repeated [2]")
    options = parser.parse_args(arguments)
    sizes, tokens = (1, options.workers), options.tokens
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(_CONFIG))
        seconds: list[list[float]] = [[], []]
        with _engine(Path(folder), sizes[0], tokens) as alone, _engine(Path(folder), sizes[1], tokens) as divided:
            for turn in range(options.turns):
                prompt = [(turn * 31 + i * i * 7) % (_VOCAB - 5) + 5 for i in range(tokens)]
                answers = []
                for number, which in enumerate((0, 1, 1, 0)):
                    core = (alone, divided)[which]
                    taken, answer = _first_tokens(core, prompt, f"{turn}-{number}", 8)
                    seconds[which].append(taken)
                    answers.append(answer)
                assert all(answer == answers[0] for answer in answers), "dividing the prompt changed a token"
    alone_seconds, divided_seconds = map(statistics.median, seconds)
    result = {
        "tokens": tokens,
        "workers": sizes[1],
        "alone_s": round(alone_seconds, 3),
        "divided_s": round(divided_seconds, 3),
        "speed_up": round(alone_seconds / divided_seconds, 2),
        "load": round(os.getloadavg()[0], 2),
    }
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
