"""Makes LoRA adapters with random matrices, in the layout of the peft library."""

import json
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file


def write_adapter(path: Path, model: Path, rank: int, seed: int) -> None:
    """Write an adapter of every linear layer in the checkpoint's decoder layers; ``seed`` decides its numbers."""
    generator, tensors, kinds = torch.Generator().manual_seed(seed), {}, set()
    with safe_open(model / "model.safetensors", "pt") as weights:
        for key in sorted(weights.keys()):
            if key.endswith("_proj.weight"):
                outputs, inputs = weights.get_slice(key).get_shape()
                layer = key.removesuffix(".weight")
                kinds.add(layer.rpartition(".")[2])
                name = f"base_model.model.{layer}"
                tensors[f"{name}.lora_A.weight"] = torch.randn(rank, inputs, generator=generator) / inputs**0.5
                tensors[f"{name}.lora_B.weight"] = torch.randn(outputs, rank, generator=generator) * 0.01
    path.mkdir(parents=True)
    save_file(tensors, path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "bias": "none", "target_modules": sorted(kinds)}
    (path / "adapter_config.json").write_text(json.dumps(config))
