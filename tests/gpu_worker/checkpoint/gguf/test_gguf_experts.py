"""Models with experts in GGUF files, whose tensors hold the matrices of all experts of a layer."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.gpu_worker.checkpoint.gguf.files import write
from tokenloom.gpu_worker.checkpoint.load_config import load_model_config
from tokenloom.gpu_worker.models.load_model import ModelLoader, load_model

RunModel = Callable[..., list[Tensor]]
SaveCheckpoint = Callable[..., Path]
Values = dict[str, np.ndarray]

PROMPT = torch.arange(100, 148)
CONFIG = {
    "max_position_embeddings": 512, "hidden_size": 64, "num_hidden_layers": 3, "intermediate_size": 96,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "rms_norm_eps": 1e-6,
}  # fmt: skip
EXPERT = re.compile(r"model\.layers\.(\d+)\.\w+\.experts\.(\d+)\.(\w+)\.weight")
STACKED = {
    "gate_proj": "ffn_gate_exps", "up_proj": "ffn_up_exps", "down_proj": "ffn_down_exps",
    "w1": "ffn_gate_exps", "w3": "ffn_up_exps", "w2": "ffn_down_exps",
}  # fmt: skip
SINGLE = {
    "mlp.gate.": "ffn_gate_inp.", "block_sparse_moe.gate.": "ffn_gate_inp.",
    "mlp.shared_expert_gate.": "ffn_gate_inp_shexp.", "mlp.shared_expert.gate_proj.": "ffn_gate_shexp.",
    "mlp.shared_expert.up_proj.": "ffn_up_shexp.", "mlp.shared_expert.down_proj.": "ffn_down_shexp.",
}  # fmt: skip
OWN_DEFAULTS = {"rms_norm_eps": 1e-6, "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}}
MODELS: dict[str, tuple[str, dict[str, Any], Callable[[gguf.GGUFWriter], None]]] = {
    "mixtral": ("llama", {"num_local_experts": 5, **OWN_DEFAULTS}, lambda writer: None),
    "qwen2_moe": ("qwen2moe", {}, lambda writer: writer.add_expert_shared_feed_forward_length(40)),
    "qwen3_moe": ("qwen3moe", {"norm_topk_prob": True, "mlp_only_layers": [1]}, lambda writer: None),
}
SIZES = {"mixtral": (5, 2, 96), "qwen2_moe": (6, 3, 32), "qwen3_moe": (6, 3, 32)}


def write_experts(path: Path, model_type: str, tensors: dict[str, Tensor], kind: Kind) -> Values:
    """Write a model; return the weights that the file then stands for."""
    architecture, _, describe = MODELS[model_type]
    values: Values = {}
    own = {name for name in tensors if EXPERT.match(name) or any(part in name for part in SINGLE)}

    def change(writer: gguf.GGUFWriter) -> None:
        number, used, size = SIZES[model_type]
        writer.add_expert_count(number)
        writer.add_expert_used_count(used)
        writer.add_expert_feed_forward_length(size)
        describe(writer)
        stacks: dict[str, list[str]] = {}
        for name in sorted(own):
            if match := EXPERT.match(name):
                stacks.setdefault(f"blk.{match[1]}.{STACKED[match[3]]}.weight", []).append(name)
            else:
                part = next(part for part in SINGLE if part in name)
                stored = name.replace("model.layers", "blk").replace(part, SINGLE[part])
                values[name] = tensors[name].float().numpy()
                writer.add_tensor(stored, values[name].squeeze())
        for stored, names in stacks.items():
            data = gguf.quants.quantize(torch.stack([tensors[name].float() for name in names]).numpy(), kind)
            values.update(zip(names, gguf.quants.dequantize(data, kind), strict=True))
            writer.add_tensor(stored, data, raw_dtype=kind)

    rest = {name: tensor for name, tensor in tensors.items() if name not in own}
    return write(path, architecture, CONFIG, rest, kind, change) | values


@pytest.mark.parametrize(
    ("model_type", "kind"),
    [("mixtral", Kind.F32), ("qwen2_moe", Kind.F32), ("qwen3_moe", Kind.F32), ("qwen3_moe", Kind.Q8_0)],
    ids=str,
)
@torch.inference_mode()
def test_logits_are_those_of_the_weights(
    model_type: str, kind: Kind, tmp_path: Path, save_checkpoint: SaveCheckpoint, run_model: RunModel
) -> None:
    plain = save_checkpoint(model_type, **MODELS[model_type][1])
    path = tmp_path / "model.gguf"
    values = write_experts(path, model_type, load_file(plain / "model.safetensors"), kind)
    save_file(
        {name: torch.from_numpy(np.ascontiguousarray(value)) for name, value in values.items()},
        plain / "model.safetensors",
    )
    found, expected = (run_model(load_model(each, "float32"), [PROMPT], [[len(PROMPT)]])[0] for each in (path, plain))
    assert (found - expected).abs().max() <= 1e-4
    ModelLoader().check(path)  # reads no tensors' content


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda writer: writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID),
            "expert_gating_func must be 1",
        ),
        (lambda writer: writer.add_expert_group_count(2), "not supported: qwen3moe.expert_group_count = 2"),
        (lambda writer: writer.add_expert_count(0), "expert_count must be above 0"),
    ],
)
def test_what_is_not_supported_is_named(
    change: Callable[[gguf.GGUFWriter], None], message: str, tmp_path: Path
) -> None:
    def describe(writer: gguf.GGUFWriter) -> None:
        writer.add_expert_used_count(2)
        writer.add_expert_feed_forward_length(32)
        if "above" not in message:
            writer.add_expert_count(4)
        change(writer)

    path = tmp_path / "model.gguf"
    write(path, "qwen3moe", CONFIG, {"model.embed_tokens.weight": torch.zeros(199, 64)}, change=describe)
    with pytest.raises(ValueError, match=re.escape(message)):
        load_model_config(path)
