"""Adapters with random matrices for a checkpoint, and the checkpoint with one of them merged into its weights."""

import json
import shutil
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

KINDS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def save_adapter(
    path: Path, checkpoint: Path, *, rank: int = 4, seed: int = 0, kinds: Collection[str] = KINDS, **entries: Any
) -> Path:
    """Write an adapter in peft's layout; ``entries`` of its configuration replace the defaults."""
    path.mkdir(parents=True)
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, weight in load_file(checkpoint / "model.safetensors").items():
        layer = name.removesuffix(".weight")
        if layer.rpartition(".")[2] in kinds and weight.dim() == 2 and ".experts." not in layer:
            outputs, inputs = weight.shape
            a = torch.randn(rank, inputs, generator=generator) / inputs**0.5
            b = torch.randn(outputs, rank, generator=generator) * 0.3
            tensors |= {f"base_model.model.{layer}.lora_A.weight": a, f"base_model.model.{layer}.lora_B.weight": b}
    save_file(tensors, path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "bias": "none", "target_modules": list(kinds)}
    (path / "adapter_config.json").write_text(json.dumps(config | entries))
    return path


def matrices_of(adapter: Path) -> Iterator[tuple[str, torch.Tensor, torch.Tensor, float]]:
    """Yield the name of each layer, A, B and the scaling."""
    config = json.loads((adapter / "adapter_config.json").read_text())
    scaling = config["lora_alpha"] / (config["r"] ** 0.5 if config.get("use_rslora") else config["r"])
    tensors = load_file(adapter / "adapter_model.safetensors")
    for key, a in tensors.items():
        if key.endswith(".lora_A.weight"):
            name = key.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            yield name, a, tensors[key.replace("lora_A", "lora_B")], scaling


def merge(checkpoint: Path, adapter: Path, path: Path) -> Path:
    """Write a copy of the checkpoint with the adapter merged into its weights, as peft's ``merge_and_unload`` does."""
    shutil.copytree(checkpoint, path)
    weights = load_file(checkpoint / "model.safetensors")
    for name, a, b, scaling in matrices_of(adapter):
        weights[f"{name}.weight"] = weights[f"{name}.weight"] + scaling * (b @ a)
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    return path
