"""Runs whole steps in one process with a stub for the model: schedule, batch preparation, sampling, update.

A real model would hide what a change costs. Run as a script, the module measures on demand for :mod:`.step_ab`,
against the ``tokenloom`` that its path names.
"""

import gc
import sys
import time
from types import SimpleNamespace
from typing import Any

import torch

from tokenloom.engine_core.core import EngineCore
from tokenloom.engine_core.data.config import CacheConfig, EngineConfig, SchedulerConfig, WorkerConfig
from tokenloom.engine_core.data.core_params import CoreSamplingParams
from tokenloom.engine_core.data.handshake import WarmUp
from tokenloom.engine_core.data.messages import EngineCoreRequest
from tokenloom.engine_core.data.model_info import ModelInfo
from tokenloom.engine_core.executor.uniproc import UniProcExecutor
from tokenloom.gpu_worker.batch.input_batch import InputBatch
from tokenloom.gpu_worker.model_runner import ModelRunner

_BLOCK = 16
_CONTEXT = 64
_WARM_STEPS = 30
_MAX_MODEL_LEN = 8192
VOCABULARY = 1024
"""Small, because the pass over the logits would hide the rest."""
SAMPLING: dict[str, dict[str, Any]] = {"greedy": {"temperature": 0.0}, "top-p": {"temperature": 1.0, "top_p": 0.9}}


class StepLoop:
    """Runs so many decoding requests, none of which ends."""

    def __init__(self, rows: int, sampling: str) -> None:
        """``sampling`` is one of ``SAMPLING``."""
        budget = max(rows, 2048)
        config = EngineConfig(
            worker=WorkerConfig(model=""),
            cache=CacheConfig(num_blocks=rows * (_MAX_MODEL_LEN // _BLOCK)),
            scheduler=SchedulerConfig(max_num_seqs=rows, max_num_batched_tokens=budget),
        )
        worker: Any = _Worker(rows)
        self._core = EngineCore(config, UniProcExecutor(worker))
        params = CoreSamplingParams(max_tokens=_MAX_MODEL_LEN, seed=0, **SAMPLING[sampling])
        for index in range(rows):
            prompt = [(index * 7 + position) % VOCABULARY for position in range(_CONTEXT)]
            self._core.add_request(EngineCoreRequest(str(index), prompt, params))
        self._num_tokens = 0
        for _ in range(-(-rows * _CONTEXT // budget) + _WARM_STEPS):
            self._num_tokens += 1
            outputs = self._core.step().outputs
        assert len(outputs) == rows

    def measure(self, steps: int) -> float:
        """Return the CPU µs of a step, the median over ``steps``."""
        self._num_tokens += steps
        assert _CONTEXT + self._num_tokens < _MAX_MODEL_LEN, "too many measurements: the contexts are full"
        gc.collect()
        gc.freeze()
        spent = []
        for _ in range(steps):
            started = time.process_time_ns()
            self._core.step()
            spent.append(time.process_time_ns() - started)
        gc.unfreeze()
        spent.sort()
        return spent[steps // 2] / 1e3


class _Worker:
    """Runs the model runner with a model without layers."""

    def __init__(self, rows: int) -> None:
        self._rows = rows

    def load_model(self) -> ModelInfo:
        return ModelInfo(VOCABULARY, _MAX_MODEL_LEN, kv_bytes_per_token=1, kv_layout="", numerics="")

    def determine_available_memory(self) -> int:
        return sys.maxsize

    def initialize_kv_cache(self, kv_cache: Any, memory: Any = None) -> Any:
        """Make the runner."""
        batch = InputBatch(self._rows, _MAX_MODEL_LEN, _BLOCK)
        model: Any = _Model(self._rows)
        backend: Any = _Backend()
        self._runner: Any = ModelRunner(model, backend, batch, kv_cache.num_blocks)
        return WarmUp()

    def execute_model(self, scheduled: Any) -> Any:
        return self._runner.execute(scheduled)  # also after it returned the tokens

    def sample_tokens(self, grammar: Any) -> Any:
        return self._runner.sample(grammar)


class _Backend:
    reads_tails = False

    def allocate(self, *_: Any) -> list[Any]:
        return []

    def plan(self, *_: Any) -> None:
        return None


class _Model:
    config = SimpleNamespace(computes_logits=True, states=None)

    def __init__(self, rows: int) -> None:
        torch.manual_seed(0)
        self._logits = torch.randn(rows, VOCABULARY) * 3

    def forward(self, token_ids: torch.Tensor, *_: Any) -> torch.Tensor:
        return token_ids

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._logits[: len(hidden)]


def main() -> None:
    """Answer each line ``ROWS SAMPLING STEPS`` of standard input with the CPU µs of a step."""
    torch.set_num_threads(1)
    loops: dict[tuple[str, str], StepLoop] = {}
    for line in sys.stdin:
        rows, sampling, steps = line.split()
        if (rows, sampling) not in loops:
            loops[rows, sampling] = StepLoop(int(rows), sampling)
        print(loops[rows, sampling].measure(int(steps)), flush=True)


if __name__ == "__main__":
    main()
