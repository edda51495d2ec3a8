"""A model of the shape of Llama 3.1 8B with random weights, and what is measured with it."""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.gpu_check.driver import MOST_TOKENS, Driver, Requests
from tests.gpu_check.target import Target
from tokenloom.bench.random_model import SHAPES
from tokenloom.engine_core.data.core_params import CoreSamplingParams
from tokenloom.gpu_worker.model_slot import tensors_of

GREEDY = CoreSamplingParams(max_tokens=4000, seed=0, temperature=0.0)


def write_config(folder: Path, target: Target, num_layers: int = 0) -> dict[str, Any]:
    """Write and return ``config.json``: of the 8B, with ``num_layers`` unless 0, or of a tiny model on a CPU."""
    config = SHAPES[target.pick("llama-8b", "tiny-fp32")]
    if num_layers:
        config = config | {"num_hidden_layers": num_layers}
    (folder / "config.json").write_text(json.dumps(config))
    return config


@contextmanager
def loaded(folder: Path, target: Target, *, num_layers: int = 0, **options: Any) -> Iterator[Driver]:
    """Provide a driver whose worker has computed its warm-up."""
    write_config(folder, target, num_layers)
    # A test may have put Triton's interpreter in the place of the device; PyTorch computes its model.
    own = {} if target.has_gpu else {"attention_backend": "torch", "num_threads": 1}
    driver = Driver(folder, device=target.device.type, load_format="dummy", **own, **options)
    driver.start()
    try:
        yield driver
    finally:
        driver.worker.shutdown()
        if target.has_gpu:
            torch.cuda.empty_cache()


def weight_bytes(driver: Driver) -> int:
    return sum(tensor.nbytes for tensor in tensors_of(driver.worker._model))


def requests(count: int, length: int) -> Requests:
    rng = np.random.default_rng(count)
    return {f"{count}-{length}-{index}": (rng.integers(1, 4000, length).tolist(), GREEDY) for index in range(count)}


def begin(driver: Driver, count: int, length: int) -> list[str]:
    """Begin the requests a few at a time: a step computes 8,192 tokens at most."""
    everything = requests(count, length)
    driver.begin_in_parts(everything, max(1, MOST_TOKENS // length))
    return list(everything)


def step_ms(step: Callable[[], object], num_steps: int) -> float:
    """Return the milliseconds of a step, of which each waits for its tokens."""
    for _ in range(3):
        step()
    started = time.perf_counter()
    for _ in range(num_steps):
        step()
    return (time.perf_counter() - started) / num_steps * 1e3
