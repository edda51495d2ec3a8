"""Small random checkpoints of transformers' classes, and engines that pool with them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor

from tokenloom.engine_core.core import EngineCore
from tokenloom.engine_core.data.config import (
    CacheConfig,
    EngineConfig,
    ParallelConfig,
    SchedulerConfig,
    WorkerConfig,
)
from tokenloom.engine_core.data.core_params import DRAWS_NOTHING, CorePoolingParams, PoolingTask
from tokenloom.engine_core.data.messages import EngineCoreOutput, EngineCoreRequest
from tokenloom.engine_core.executor.executor import Executor
from tokenloom.engine_core.executor.uniproc import UniProcExecutor
from tokenloom.gpu_worker.devices import make_worker

VOCAB_SIZE = 120
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 130,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
OWN: dict[str, dict[str, Any]] = {
    "Qwen3": {"num_key_value_heads": 2, "head_dim": 16},
    "XLMRoberta": {"pad_token_id": 1},
    "ModernBert": {"local_attention": 8, "classifier_pooling": "mean", "cls_token_id": 1, "sep_token_id": 2},
}
PROMPTS = [[int(token) for token in np.random.default_rng(seed).integers(5, VOCAB_SIZE, seed)] for seed in (9, 3, 31)]


def make_checkpoint(path: Path, architecture: str, **config: Any) -> Any:
    """Save a checkpoint of random weights; returns transformers' model, in float32."""
    name = architecture.removesuffix("ForSequenceClassification").removesuffix("ForCausalLM").removesuffix("Model")
    torch.manual_seed(0)
    settings = getattr(transformers, f"{name}Config")(**{**SIZES, **OWN.get(name, {}), **config})
    model = getattr(transformers, architecture)(settings).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter + 0.2 * torch.randn_like(parameter))
    model.save_pretrained(path)
    return model


def save_pooling(path: Path, *modules: dict[str, Any]) -> None:
    """Save the files of sentence-transformers: the modules after the transformer, each with its configuration."""
    listed = [{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}]
    for index, module in enumerate(modules, 1):
        directory = path / f"{index}_{module['type']}"
        directory.mkdir()
        (directory / "config.json").write_text(json.dumps(module["config"]))
        listed.append(
            {"idx": index, "name": "", "path": directory.name, "type": f"sentence_transformers.models.{module['type']}"}
        )
    (path / "modules.json").write_text(json.dumps(listed))


def make_config(
    path: Path,
    *,
    budget: int = 256,
    num_blocks: int | None = None,
    parallel: ParallelConfig | None = None,
    **worker: Any,
) -> EngineConfig:
    return EngineConfig(
        worker=WorkerConfig(**{"model": str(path), "dtype": "float32", "device": "cpu"} | worker),
        cache=CacheConfig(block_size=4, num_blocks=num_blocks, memory_bytes=None if num_blocks else 4 << 20),
        scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=budget),
        parallel=parallel or ParallelConfig(),
    )


def make_core(path: Path, *, executor: Callable[[EngineConfig], Executor] | None = None, **settings: Any) -> EngineCore:
    """Make an engine with what :func:`make_config` accepts. ``executor``: None: one worker, in this process."""
    config = make_config(path, **settings)
    return EngineCore(config, UniProcExecutor(make_worker(config)) if executor is None else executor(config))


def pool(core: EngineCore, prompts: list[list[int]], task: PoolingTask, **params: Any) -> list[Any]:
    """Return the results of prompts that are pooled together."""
    for index, prompt in enumerate(prompts):
        pooling = CorePoolingParams(task, **params)
        core.add_request(EngineCoreRequest(str(index), prompt, DRAWS_NOTHING, pooling_params=pooling))
    outputs: dict[str, EngineCoreOutput] = {}
    while core.has_work():
        outputs.update((output.request_id, output) for output in core.step().outputs)
    assert not any(output.error for output in outputs.values()), outputs
    return [outputs[str(index)].pooled for index in range(len(prompts))]


@torch.no_grad()
def states(model: Any, prompt: list[int], **inputs: Any) -> Tensor:
    """Return transformers' last hidden states of a prompt, [n, hidden_size]."""
    base = model if hasattr(model, "embeddings") or not hasattr(model, "base_model") else model.base_model
    hidden: Tensor = base(torch.tensor([prompt]), **inputs).last_hidden_state[0]
    return hidden


@torch.no_grad()
def logits(model: Any, prompt: list[int], **inputs: Any) -> Tensor:
    """Return transformers' logits of the classes of a prompt, [n]."""
    result: Tensor = model(torch.tensor([prompt]), **inputs).logits[0]
    return result


def close(found: Any, expected: Tensor) -> None:
    np.testing.assert_allclose(found, expected.numpy(), rtol=0, atol=1e-5)
