"""Steps of a random 8B model: time, share of the ceiling, and a trace of decoding."""

import gzip
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from tests.gpu_check.driver import Driver, Requests
from tests.gpu_check.rows import Rows
from tokenloom.bench.random_model import write_zero_model
from tokenloom.engine_core.wire.core_sampling_params import SamplingParams
from tokenloom.gpu_worker.models.on_host import tensors_of

_STEPS = 20
_GREEDY = SamplingParams(max_tokens=1000, seed=0, temperature=0.0)
_LARGEST_TRACE = 16 << 20


def run(rows: Rows) -> None:
    with tempfile.TemporaryDirectory(prefix="tl-8b-") as folder:
        write_zero_model("llama-8b", Path(folder))
        driver = Driver(Path(folder), device="cuda", max_num_seqs=128, max_model_len=2560)
        _fill(driver)
        driver.start()
    weights = sum(tensor.nbytes for tensor in tensors_of(driver.worker._model))
    speed = _ceiling(rows, "read (sum)", "gb_per_s")
    for length in (512, 2048):
        for count in (1, 8, 32, 128):
            names = _begin(driver, count, length)
            ms = _ms_of(lambda names=names: driver.decode(names))
            nbytes = weights + count * (length + _STEPS // 2) * driver.info.kv_bytes_per_token
            share = nbytes / ms / 1e6 / speed if speed else 0.0
            rows.add(f"8B, {count} decodes of {length}", ms=ms, gb_per_s=nbytes / ms / 1e6, share_of_ceiling=share)
            if (count, length) == (1, 512):
                _trace(rows, driver, names)
            driver.end(names)
    prompts = _requests(4, 2048)
    started = time.perf_counter()
    driver.begin(prompts)
    ms = (time.perf_counter() - started) * 1e3
    driver.end(list(prompts))
    rows.add("8B, prefill of 4 x 2048", ms=ms, tflop_per_s=weights / 2 * 2 * 8192 / ms / 1e9)


@torch.inference_mode()
def _fill(driver: Driver) -> None:
    """Make the weights random: zeros would be multiplied faster."""
    generator = torch.Generator("cuda").manual_seed(1)
    for tensor in tensors_of(driver.worker._model):
        if tensor.dim() > 1:
            tensor.normal_(0.0, 0.02, generator=generator)
        elif tensor.dtype == torch.bfloat16:  # norms; others are frequencies
            tensor.fill_(1.0)


def _requests(count: int, length: int) -> Requests:
    rng = np.random.default_rng(count)
    return {f"{count}-{length}-{index}": (rng.integers(1, 128_000, length).tolist(), _GREEDY) for index in range(count)}


def _begin(driver: Driver, count: int, length: int) -> list[str]:
    """Begin the requests a few at a time: a step computes 8,192 tokens at most."""
    everything = _requests(count, length)
    driver.begin_in_parts(everything, 8192 // length)
    return list(everything)


def _ms_of(step: Callable[[], object]) -> float:
    for _ in range(3):
        step()
    started = time.perf_counter()
    for _ in range(_STEPS):
        step()  # each waits for its tokens
    return (time.perf_counter() - started) / _STEPS * 1e3


def _ceiling(rows: Rows, name: str, column: str) -> float:
    """Return what an earlier section measured; 0: it did not."""
    try:
        found = [json.loads(line) for line in rows.file.read_text().splitlines()]
    except FileNotFoundError:
        return 0.0
    return next((float(row[column]) for row in reversed(found) if row["name"] == name), 0.0)


def _trace(rows: Rows, driver: Driver, names: list[str]) -> None:
    with torch.profiler.profile() as profile:
        for _ in range(4):
            driver.decode(names)
    events = [event for event in profile.key_averages() if event.device_time_total > 0]
    for event in sorted(events, key=lambda event: -event.self_device_time_total)[:20]:
        rows.add(f"kernel {event.key[:60]}", us_in_all=float(event.self_device_time_total), calls=event.count)
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        profile.export_chrome_trace(file.name)
        packed = gzip.compress(Path(file.name).read_bytes())
    if len(packed) <= _LARGEST_TRACE:
        (rows.file.parent / "decode.json.gz").write_bytes(packed)
