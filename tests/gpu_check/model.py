"""Steps of a random 8B model: time, share of the ceilings, and how long the GPU is idle."""

import tempfile
import time
from pathlib import Path

from tests.gpu_check import llama_8b
from tests.gpu_check.ceilings import PRODUCT, READ
from tests.gpu_check.driver import Driver
from tests.gpu_check.rows import Rows
from tests.gpu_check.target import GPU, Target
from tests.gpu_check.traces import idle_share, profiled
from tests.parity.engine import Engine

_STEPS = 20


def run(rows: Rows, target: Target = GPU) -> None:
    longest = target.pick(8256, 160)
    counts, lengths = target.pick((1, 8, 32, 128), (1, 3)), target.pick((512, 2048), (16, 40))
    pool = counts[-1] * (lengths[-1] + 128)
    with tempfile.TemporaryDirectory(prefix="tl-8b-") as folder:
        started = time.perf_counter()
        with llama_8b.loaded(
            Path(folder), target, max_num_seqs=counts[-1], max_model_len=longest, pool_tokens=pool
        ) as driver:
            rows.add("8B, start", seconds=time.perf_counter() - started)
            for length in lengths:
                for count in counts:
                    _decode(rows, target, driver, count, length)
            _prefill(rows, target, driver, target.pick(8192, 128))
        _decode_ahead(rows, target, Path(folder))
        _decode_fp8(rows, target, Path(folder), longest)


def _decode(rows: Rows, target: Target, driver: Driver, count: int, length: int, name: str = "8B") -> None:
    names, num_steps = llama_8b.begin(driver, count, length), target.pick(_STEPS, 2)
    ms = llama_8b.step_ms(lambda: driver.decode(names), num_steps)
    nbytes = llama_8b.weight_bytes(driver) + count * (length + num_steps // 2) * driver.info.kv_bytes_per_token
    speed, rate = rows.find(READ, "gb_per_s"), nbytes / ms / 1e6
    idle = idle_share(profiled(target, lambda: driver.decode(names), target.pick(5, 1)))
    share = rate / speed if speed else 0.0
    rows.add(f"{name}, {count} decodes of {length}", ms=ms, gb_per_s=rate, share_of_ceiling=share, gpu_idle=idle)
    driver.end(names)


def _prefill(rows: Rows, target: Target, driver: Driver, length: int) -> None:
    times = []
    for _ in range(target.pick(3, 1)):
        prompt = llama_8b.requests(1, length)
        started = time.perf_counter()
        driver.begin(prompt)
        times.append((time.perf_counter() - started) * 1e3)
        driver.end(list(prompt))
    ms = min(times)
    # Two operations a weight and token; the embeddings are read, not multiplied, which 1 % of an 8B's are.
    rate = llama_8b.weight_bytes(driver) * length / ms / 1e9
    ceiling = rows.find(PRODUCT, "tflop_per_s")
    share = rate / ceiling if ceiling else 0.0
    rows.add(f"8B, prefill of {length}", ms=ms, tflop_per_s=rate, share_of_ceiling=share)


def _decode_ahead(rows: Rows, target: Target, folder: Path) -> None:
    """Decodes of an engine whose next step is scheduled while the device computes one: to compare with the steps above,
    which are given to the worker one by one and without a scheduler."""
    count, length, short, long = target.pick((32, 512, 8, 72), (2, 8, 2, 4))
    prompts = [prompt for prompt, _ in llama_8b.requests(count, length).values()]
    own = {} if target.has_gpu else {"attention_backend": "torch"}
    engine = Engine(
        folder,
        device=target.device.type,
        dtype="auto",
        load_format="dummy",
        num_blocks=count * (length + 128) // 16,
        budget=target.pick(8192, 512),
        max_num_seqs=count,
        max_model_len=length + 128,
        async_scheduling=True,
        **own,
    )
    times = []
    for num_tokens in (short, short, long):  # the first call warms up
        started = time.perf_counter()
        engine.generate(prompts, [num_tokens] * count)
        times.append(time.perf_counter() - started)
    engine.core.shutdown()
    ms = (times[2] - times[1]) / (long - short) * 1e3
    rows.add(f"8B, {count} decodes of {length}, scheduled ahead", ms=ms)


def _decode_fp8(rows: Rows, target: Target, folder: Path, longest: int) -> None:
    """One decode with weights and KV of 8 bits, to compare with the same in bfloat16."""
    if not target.has_gpu:
        return
    options = {"quantization": "fp8", "kv_cache_dtype": "fp8"}
    with llama_8b.loaded(folder, target, max_num_seqs=1, max_model_len=longest, pool_tokens=2048, **options) as driver:
        _decode(rows, target, driver, 1, 512, "8B in fp8")
