"""Decoding at batch 64 beside ``transformers``, with a trace of ours and its longest kernels."""

import importlib.util
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from tests.gpu_check import llama_8b
from tests.gpu_check.rows import Rows
from tests.gpu_check.target import GPU, Target
from tests.gpu_check.traces import add_longest, idle_share, keep, profiled


def run(rows: Rows, target: Target = GPU) -> None:
    count, length, num_tokens = target.pick((64, 128, 32), (2, 8, 4))
    with tempfile.TemporaryDirectory(prefix="tl-8b-") as folder:
        config = llama_8b.write_config(Path(folder), target)
        own = _own(rows, target, Path(folder), count, length, num_tokens)
        others = _transformers(rows, target, config, count, length, num_tokens)
    if others:
        rows.add(f"{count} requests of {length} + {num_tokens}: ours by transformers", ratio=own / others)


def _own(rows: Rows, target: Target, folder: Path, count: int, length: int, num_tokens: int) -> float:
    """Return the tokens of a second of ours, prompts included in the time."""
    options: dict[str, Any] = {"max_num_seqs": count, "max_model_len": length + 512}
    with llama_8b.loaded(folder, target, pool_tokens=count * (length + 128), **options) as driver:
        names = list(llama_8b.requests(count, length))
        for _ in range(2):  # the first one warms up
            started = time.perf_counter()
            names = llama_8b.begin(driver, count, length)
            for _ in range(num_tokens - 1):
                driver.decode(names)
            seconds = time.perf_counter() - started
            driver.end(names)
        speed = count * num_tokens / seconds
        rows.add(f"ours, {count} requests of {length} + {num_tokens}", tokens_per_s=speed)
        names = llama_8b.begin(driver, count, length)
        profile = profiled(target, lambda: driver.decode(names), target.pick(4, 1))
        driver.end(names)
    rows.add("decode, traced", gpu_idle=idle_share(profile))
    add_longest(rows, profile)
    keep(rows, profile, "decode.json.gz")
    return speed


def _transformers(
    rows: Rows, target: Target, config: dict[str, Any], count: int, length: int, num_tokens: int
) -> float:
    """Return the tokens of a second of ``transformers``; 0: it is not installed."""
    if importlib.util.find_spec("transformers") is None:
        rows.skip("transformers", "is not installed")
        return 0.0
    import transformers

    dtype = target.pick(torch.bfloat16, torch.float32)
    shape = transformers.AutoConfig.for_model(**config)
    with torch.device(target.device):
        model = transformers.AutoModelForCausalLM.from_config(shape, dtype=dtype, attn_implementation="sdpa").eval()
    prompts = torch.randint(1, 4000, (count, length), device=target.device)
    options = {"do_sample": False, "use_cache": True, "pad_token_id": 0, "eos_token_id": None}
    seconds = 0.0
    for tokens in (2, num_tokens):  # the first call warms up
        started = time.perf_counter()
        with torch.inference_mode():
            found = model.generate(
                prompts,
                attention_mask=torch.ones_like(prompts),
                min_new_tokens=tokens,
                max_new_tokens=tokens,
                **options,
            )
        target.synchronize()
        seconds = time.perf_counter() - started
        assert found.shape == (count, length + tokens)
    speed = count * num_tokens / seconds
    rows.add(
        f"transformers {transformers.__version__}, {count} requests of {length} + {num_tokens}", tokens_per_s=speed
    )
    return speed
