"""Adds the head that drafts to a tiny checkpoint of Qwen3-Next or Qwen3.5, as published ones hold it."""

from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.parity.state_checkpoints import SERVED, make_model

_EXPERTS: dict[str, Any] = {
    **{name: each for name, each in SERVED["qwen3_next"].items() if name != "intermediate_size"},
    "hidden_size": 64,
    "max_position_embeddings": 4096,
    "num_hidden_layers": 4,
    "pad_token_id": 0,
}
OWN_HEADS: dict[str, dict[str, Any]] = {"qwen3_next": {}, "qwen3_5_text": {}, "qwen3_5_moe_text": _EXPERTS}
"""The types whose checkpoints bring a head, with further entries of their configurations."""


def layer_of(model: Any) -> Any:
    """Return a random layer of the model's class with attention, as its head has one."""
    config = type(model.config)(**{**model.config.to_dict(), "num_hidden_layers": 1, "layer_types": ["full_attention"]})
    torch.manual_seed(3)
    return transformers.AutoModelForCausalLM.from_config(config).eval().requires_grad_(False).to(model.dtype)


def sharp_model(kind: str, **entries: Any) -> Any:
    """Return a model whose layers add little to what its embeddings say, and that is sure of it: a head that reads the
    last token alone is often right."""
    model = make_model(kind, **entries)
    for name, parameter in model.named_parameters():
        if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight", "down_proj")):
            parameter.data.mul_(0.01)
    model.lm_head.weight.data.mul_(20)
    return model


def add_head(path: Path, model: Any, *, is_sharp: bool = False) -> tuple[Any, dict[str, Tensor]]:
    """Write the head into the checkpoint of ``model``, and return its layer, as a model of its own, and the tensors
    beside. ``is_sharp``: it predicts what follows from a token alone, which is right where layers add little."""
    whole, size = layer_of(model), model.config.hidden_size
    generator = torch.Generator().manual_seed(4)
    others = {"fc.weight": torch.randn(size, 2 * size, generator=generator) * size**-0.5}
    for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
        others[f"{name}.weight"] = torch.randn(size, generator=generator) * 0.1
    if is_sharp:
        others |= {"fc.weight": torch.cat((torch.eye(size), torch.zeros(size, size)), 1)}
        others |= {name: torch.zeros(size) for name in others if name.startswith("pre_fc")}
        others["norm.weight"] = model.model.norm.weight.clone()
        for name, parameter in whole.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight", "down_proj")):
                parameter.zero_()
    own = dict(whole.model.layers[0].named_parameters())
    tensors = {f"mtp.{name}": each.to(model.dtype) for name, each in others.items()}
    tensors |= {f"mtp.layers.0.{name}": each.clone().contiguous() for name, each in own.items()}
    file = path / "model.safetensors"
    save_file(load_file(file) | tensors, file, {"format": "pt"})
    return whole, others
