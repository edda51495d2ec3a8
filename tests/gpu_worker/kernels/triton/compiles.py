"""``python -m …compiles CASE…`` serves random requests as an engine on a GPU does, without a GPU, and prints as JSON
what Triton would have compiled before the first request and after it.

A driver that launches nothing stands in the place of CUDA's: Triton itself decides, by the kinds of the arguments, what
it would compile for an H100. The tensors are the CPU's, so addresses and sizes are real, and kernels leave zeros. A
process of its own, because Triton's interpreter takes the place of that.
"""

import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
import triton
from triton.backends.compiler import GPUTarget

from tests.gpu_worker.kv_connector.fake_device import FakeIpc
from tests.gpu_worker.platform.device_platform import ApartPlatform
from tests.parity.state_checkpoints import entries_of
from tokenloom.bench.random_adapter import write_adapter
from tokenloom.engine_core.core import EngineCore
from tokenloom.engine_core.data.config import CacheConfig, EngineConfig, KVConfig, SchedulerConfig, WorkerConfig
from tokenloom.engine_core.data.core_params import CoreSamplingParams
from tokenloom.engine_core.data.lora import LoraConfig
from tokenloom.engine_core.data.messages import EngineCoreRequest
from tokenloom.engine_core.executor.uniproc import UniProcExecutor
from tokenloom.engine_core.kv_transfer.kv_transport import KVPool
from tokenloom.gpu_worker import model_worker
from tokenloom.gpu_worker.attention import attention_backends, triton_backend
from tokenloom.gpu_worker.cuda.device_steps import DeviceSteps
from tokenloom.gpu_worker.cuda.row_kernels import TritonRowKernels, copy_pool_blocks
from tokenloom.gpu_worker.cuda.step_tensors import StepTools
from tokenloom.gpu_worker.device.device_link import HostLink
from tokenloom.gpu_worker.kv_connector.device_pool import make_device_pool
from tokenloom.gpu_worker.layers import linear
from tokenloom.gpu_worker.lora import slots
from tokenloom.gpu_worker.model_worker import ModelWorker
from tokenloom.gpu_worker.models import experts
from tokenloom.gpu_worker.ops import cpu_ops
from tokenloom.gpu_worker.sampler.device.device_sampler import DeviceSampler
from tokenloom.gpu_worker.sampler.device.sampler_kernels import TritonSamplerKernels

_SHAPES = {
    "vocab_size": 199,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
}
_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
MODELS: dict[str, dict[str, Any]] = {
    "llama": _SHAPES,
    "qwen3": _SHAPES,
    "gemma3_text": {**_SHAPES, "query_pre_attn_scalar": 24, "sliding_window": 30},
    "qwen3_moe": {**_SHAPES, **_EXPERTS},
    **{kind: {**entries_of(kind), "vocab_size": 199} for kind in ("qwen3_5_text", "nemotron_h")},
}
_NUM_REQUESTS = 60
_STEPS = {"small steps": 21, "chunks": 95}
"""The tokens of the largest step of cases that need others than the rest."""
_ASKED: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0, "top_k": 5, "top_p": 0.9, "min_p": 0.1},
    {"temperature": 0.8, "frequency_penalty": 0.5, "logprobs": 3},
    {"temperature": 1.0, "logit_bias": {3: 1.0}, "logprobs": 0, "logprob_token_ids": (7, 8)},
    {"temperature": 0.0, "prompt_logprobs": 2, "allowed_token_ids": (0, 3, 9)},
)


class Driver:
    """Says what Triton asks a driver before it compiles."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


class Compiles:
    """Notes what Triton would compile, each once, and lets it compile and launch nothing."""

    def __init__(self) -> None:
        self.found: dict[tuple[str, Any], str] = {}

    def __call__(self, *, key: Any, repr: str, fn: Any, **_: Any) -> bool:
        self.found.setdefault((fn.name, key), repr)
        return True

    def names(self, begin: int = 0) -> list[str]:
        return list(self.found.values())[begin:]


@dataclass
class Graph:
    """Does nothing: no kernel runs."""

    results: Sequence[torch.Tensor]

    def replay(self) -> None:
        pass


class Capture:
    """Fulfils ``Capture``."""

    def __call__(self, compute: Callable[[], Sequence[torch.Tensor]]) -> Graph:
        return Graph(compute())

    def forget(self) -> None:
        pass


class Platform(ApartPlatform):
    """Has all kernels of a GPU, and tensors of the CPU."""

    def __init__(self, *, has_graphs: bool) -> None:
        super().__init__(1 << 24)
        self._has_graphs = has_graphs

    def make_sampler(self) -> DeviceSampler:
        # Steps of up to ten rows are drawn by parts of 64 logits, and those of more rows are not.
        return DeviceSampler(TritonSamplerKernels(64, multiprocessors=20), HostLink())

    def make_step_tools(self) -> StepTools:
        return StepTools(HostLink(), TritonRowKernels())

    def make_capture(self) -> Capture | None:
        return Capture() if self._has_graphs else None

    def device_pool(self, caches: Any, num_blocks: int, layout: str) -> KVPool:
        return make_device_pool(caches, num_blocks, layout, copy_pool_blocks, FakeIpc())


@contextmanager
def zeros() -> Iterator[None]:
    """Fill what is allocated for kernels, which do not run, with zeros."""
    kept = torch.empty, torch.empty_like, torch.Tensor.new_empty

    def clean(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        return lambda *args, **kwargs: make(*args, **kwargs).zero_()

    torch.empty, torch.empty_like, torch.Tensor.new_empty = map(clean, kept)  # type: ignore[misc]
    try:
        yield
    finally:
        torch.empty, torch.empty_like, torch.Tensor.new_empty = kept  # type: ignore[misc]


def serve(core: EngineCore, adapters: list[bytes], prefix: list[int]) -> int:
    """Serve requests that come at random, long and short, with one of the ``adapters``, each behind ``prefix``. Returns
    the number of steps."""
    rng, num_steps, sent = np.random.default_rng(0), 0, 0
    while sent < _NUM_REQUESTS or core.has_work():
        for _ in range(min(int(rng.poisson(0.6)), _NUM_REQUESTS - sent)):
            length = int(rng.choice([1, 2, 7, 16, 40, 90, 190]) + rng.integers(0, 9))
            params = CoreSamplingParams(max_tokens=int(rng.integers(1, 12)), seed=sent, **_ASKED[sent % len(_ASKED)])
            prompt = prefix + rng.integers(10, 199, length).tolist()
            adapter = adapters[sent % len(adapters)]
            core.add_request(EngineCoreRequest(str(sent), prompt, params, adapter=adapter))
            sent += 1
        if not core.has_work():
            continue
        num_steps += 1
        for output in core.step().outputs:
            assert not output.error, output.error
    return num_steps


def count_shared() -> list[int]:
    """Return a list that gets an element for each step whose requests read keys together."""
    steps, shared_work = list[int](), DeviceSteps._shared_work

    def counted(self: DeviceSteps, inputs: Any) -> Any:
        found = shared_work(self, inputs)
        if found is not None:
            steps.append(len(inputs.rows))
        return found

    DeviceSteps._shared_work = counted  # type: ignore[method-assign]
    return steps


def _adapters(model: Path) -> LoraConfig:
    for rank in (3, 8):
        write_adapter(model / str(rank), model, rank, seed=rank)
    return LoraConfig(enable=True, max_loras=3, max_lora_rank=8, modules=(f"a={model}/3", f"b={model}/8"))


def count(case: str, compiles: Compiles, shared: list[int]) -> dict[str, Any]:
    name, _, how = case.partition(", ")
    with tempfile.TemporaryDirectory() as folder, zeros():
        path = Path(folder)
        model_config = transformers.AutoConfig.for_model(name, **MODELS[name])
        transformers.AutoModelForCausalLM.from_config(model_config, dtype=torch.bfloat16).save_pretrained(path)
        config = EngineConfig(
            # An odd number of rows and of tokens: what lies behind them in an array must be aligned all the same.
            worker=WorkerConfig(
                model=str(path),
                dtype="bfloat16",
                attention_backend="triton",
                num_threads=1,
                disable_cascade_attn=how != "shared keys",
            ),
            cache=CacheConfig(block_size=16, num_blocks=200),
            scheduler=SchedulerConfig(max_num_seqs=21, max_num_batched_tokens=_STEPS.get(how, 75)),
            kv=KVConfig(transports=() if entries_of(name) else ("cuda",)),  # states do not move between GPUs
            lora=_adapters(path) if how == "adapters" else LoraConfig(),
            max_model_len=256,
        )
        # As on a GPU: these tensors are the CPU's.
        model_worker.state_prompts = lambda *_: "chunks" if how == "chunks" else "scan"  # type: ignore[assignment]
        has_graphs = how in ("", "adapters", "chunks", "shared keys")
        core = EngineCore(config, UniProcExecutor(ModelWorker(config, Platform(has_graphs=has_graphs))))
        begun = len(compiles.found)
        loaded = [] if core.adapters is None else core.adapters.answer().adapters
        prefix = list(range(10, 50)) if how == "shared keys" else []
        shared.clear()
        steps = serve(core, [b"", *(state.digest for state in loaded)], prefix)
    return {
        "shared": len(shared),
        "before": begun,
        "steps": steps,
        "after": compiles.names(begun),
        "kernels": sorted({n for n, _ in compiles.found}),
    }


def _multiply(x: torch.Tensor, weight: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    """Take the place of a product that only GPUs have."""
    return (x.float() @ weight.float()).to(out_dtype)


def main() -> None:
    compiles = Compiles()
    torch.mm = _multiply  # type: ignore[assignment]
    triton.runtime.driver.set_active(Driver())
    triton.knobs.runtime.jit_cache_hook = compiles
    for module in (attention_backends, experts, linear, cpu_ops, slots):
        module.uses_triton = lambda device: True
    # These models are small, and their requests few and short.
    triton_backend.FEWEST_SHARING, triton_backend._FEWEST_SHARED, triton_backend._LEAST_SAVED = 2, 16, 0
    found, shared = {}, count_shared()
    for case in sys.argv[1:]:
        compiles.found.clear()
        found[case] = count(case, compiles, shared)
    json.dump(found, sys.stdout, indent=1)


if __name__ == "__main__":
    main()
