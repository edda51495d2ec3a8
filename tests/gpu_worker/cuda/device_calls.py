"""``python -m tests.gpu_worker.cuda.device_calls`` prints what a decode step gives a GPU to do, without a GPU:
kernels, operations of PyTorch, and copies between host and device.

Models of full shapes lie on the device ``meta``, which has no memory. A graph replays the calls of the model at once;
their number says how many kernels the device begins and ends. Views and allocations are left out.
"""

import json
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.gpu_worker.kernels.triton.meta_launch import META, use_kernels_on_meta
from tokenloom.bench.random_model import SHAPES
from tokenloom.engine_core.data.core_params import CoreSamplingParams
from tokenloom.engine_core.data.scheduler_output import CachedRequestData, NewRequestData, SchedulerOutput
from tokenloom.gpu_worker.attention import triton_backend
from tokenloom.gpu_worker.attention.attention_backends import make_attention_backend
from tokenloom.gpu_worker.batch.input_batch import InputBatch
from tokenloom.gpu_worker.cuda import row_kernels
from tokenloom.gpu_worker.cuda.device_steps import make_device_steps
from tokenloom.gpu_worker.cuda.row_kernels import TritonRowKernels
from tokenloom.gpu_worker.cuda.step_tensors import StepTools
from tokenloom.gpu_worker.device.device_link import Past
from tokenloom.gpu_worker.layers import triton_linear
from tokenloom.gpu_worker.layers.expert_routes import DeviceCounts
from tokenloom.gpu_worker.model_runner import ModelRunner, RunnerParts
from tokenloom.gpu_worker.models.load_model import load_model
from tokenloom.gpu_worker.models.model import routes_of
from tokenloom.gpu_worker.ops import triton_ops
from tokenloom.gpu_worker.ops.cpu_ops import make_ops
from tokenloom.gpu_worker.sampler.device import sampler_kernels
from tokenloom.gpu_worker.sampler.device.device_sampler import DeviceSampler
from tokenloom.gpu_worker.sampler.device.sampler_kernels import TritonSamplerKernels

MODELS: dict[str, dict[str, Any]] = {
    "8B (Llama 3.1)": SHAPES["llama-8b"],
    "30B-A3B (Qwen3)": SHAPES["llama-8b"]
    | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "vocab_size": 151_936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
}
ROWS = (1, 16, 128)
_LENGTH = 500
_NOTHING = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach")


@dataclass
class StepCalls:
    """Counts what one step gives the device."""

    kernels: Counter[str]
    operations: Counter[str]
    to_device: int = 0
    to_host: int = 0
    blocking: int = 0
    """Copies that the host waits for, or that pass another way than the one of steps."""

    @property
    def total(self) -> int:
        """Kernels and operations; copies are apart."""
        return self.kernels.total() + self.operations.total()


class CountingLink:
    """Fulfils ``DeviceLink`` of a device without content."""

    def __init__(self) -> None:
        self.num_sent = self.num_fetched = 0
        self.is_copying = False

    def host_memory(self, num_bytes: int) -> torch.Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8)

    def send(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self.num_sent += 1

    def fetch(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self.num_fetched += 1

    def event(self) -> Past:
        return Past()


class Operations(TorchDispatchMode):
    """Counts the operations of the device, and those that cross between it and the host."""

    def __init__(self) -> None:
        super().__init__()
        self.found = Counter[str]()
        self.num_crossing = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        tensors = [each for each in tree_leaves((args, kwargs or {}, results)) if isinstance(each, torch.Tensor)]
        devices = {tensor.device for tensor in tensors}
        aliases = [each.alias_info for each in func._schema.returns]
        is_view = any(each is not None and not each.is_write for each in aliases)
        name = func.__name__.partition(".")[0]
        if META not in devices or is_view or name in _NOTHING:
            return results
        if len({tensor.device for tensor in tensors if tensor.dim()}) > 1:
            self.num_crossing += 1
        else:
            self.found[name] += 1
        return results


def count_step(config: dict[str, Any], num_rows: int) -> StepCalls:
    """Count the calls of a decode step of so many rows, the second one: the first finds new rows."""
    with pytest.MonkeyPatch.context() as patch:
        modules = (row_kernels, sampler_kernels, triton_backend, triton_linear, triton_ops)
        launched, link = use_kernels_on_meta(patch, modules), CountingLink()
        runner = _make_runner(config, num_rows, link)
        blocks = -(-(_LENGTH + 9) // 16)
        params = [CoreSamplingParams(max_tokens=9, seed=row, temperature=0.7, top_p=0.9) for row in range(num_rows)]
        news = [
            NewRequestData(str(row), [1] * _LENGTH, [], params[row], list(range(blocks)), _LENGTH - 1)
            for row in range(num_rows)
        ]
        names = [new.req_id for new in news]
        step = SchedulerOutput(news, CachedRequestData([], [], [], {}), dict.fromkeys(names, 1), num_rows, [], [])
        for computed in (_LENGTH, _LENGTH + 1):
            launched.clear()
            link.num_sent = link.num_fetched = 0
            with Operations() as operations:
                runner.execute(step)
                runner.sample()
            cached = CachedRequestData(names, [[] for _ in names], [computed] * num_rows, {})
            step = SchedulerOutput([], cached, dict.fromkeys(names, 1), num_rows, [], [])
        return StepCalls(Counter(launched), operations.found, link.num_sent, link.num_fetched, operations.num_crossing)


def _make_runner(config: dict[str, Any], num_rows: int, link: CountingLink) -> ModelRunner:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        (path / "config.json").write_text(json.dumps(config))
        model = load_model(path, "bfloat16", META, make_ops("auto", META), load_format="dummy")
    if (routes := routes_of(model)) is not None:  # the counts of a GPU, whose link nothing else knows here
        routes._on_device = DeviceCounts(routes.num_layers, routes.num_experts, META, link)
    backend, batch = make_attention_backend("auto", model.config, 16, META), InputBatch(num_rows, 1024, 16)
    steps = make_device_steps(backend, batch, 1024, META, StepTools(link, TritonRowKernels()), None)
    sampler = DeviceSampler(TritonSamplerKernels(), link)
    parts = RunnerParts(device=META, device_sampler=sampler, recordings=steps)
    return ModelRunner(model, backend, batch, 64, parts=parts)


def main() -> None:
    for name, config in MODELS.items():
        for num_rows in ROWS:
            calls = count_step(config, num_rows)
            layers = config["num_hidden_layers"]
            print(
                f"{name}, {num_rows} rows: {calls.total} calls, {calls.total / layers:.2f} a layer; "
                f"copies to the device: {calls.to_device}, back: {calls.to_host}, others: {calls.blocking}"
            )
            if "-v" in sys.argv[1:]:
                print("   kernels", dict(calls.kernels))
                print("   operations", dict(calls.operations))


if __name__ == "__main__":
    main()
