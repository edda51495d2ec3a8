"""Writes GGUF files with the format's own package, and quantizes to the types that the package only reads."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file
from torch import Tensor

from tokenloom.model_files.model_path import DEMO_MODEL

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_demo(
    path: Path, kind: Kind, change: Callable[[gguf.GGUFWriter], None] | None = None, tensors_in_a_file: int = 0
) -> dict[str, np.ndarray]:
    """Write the demo model with its matrices in ``kind``, or in Q8_0 where rows do not fit its blocks, and without a
    tokenizer; ``change`` adds more. Return the weights that the file then stands for, by Hugging Face's names."""
    config = json.loads((DEMO_MODEL / "config.json").read_text())
    tensors = load_file(DEMO_MODEL / "model.safetensors")
    floats = {name: tensor.float() for name, tensor in tensors.items()}
    return write(path, "qwen3", config, floats, kind, change, tensors_in_a_file)


def write(
    path: Path,
    architecture: str,
    config: dict[str, Any],
    tensors: dict[str, Tensor],
    kind: Kind = Kind.F32,
    change: Callable[[gguf.GGUFWriter], None] | None = None,
    tensors_in_a_file: int = 0,
) -> dict[str, np.ndarray]:
    """Write a model, in several files ``NAME-0000N-of-0000M.gguf`` if each has only so many tensors."""
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=tensors_in_a_file)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base((config.get("rope_parameters") or {}).get("rope_theta", 10_000.0))
    if change is not None:
        change(writer)
    values = {}
    for name, tensor in tensors.items():
        data, used = encode(tensor.float().numpy(), kind)
        values[name] = gguf.quants.dequantize(data, used)
        if architecture == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            rows = _pairs(len(data), config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"])
            data = data[rows]
        writer.add_tensor(_stored_name(name), data, raw_dtype=used)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return values


def _stored_name(name: str) -> str:
    layer, _, kind = name.rpartition(".")
    if not layer.startswith("model.layers."):
        return f"{_NAMES[layer]}.{kind}"
    _, _, number, part = layer.split(".", 3)
    return f"blk.{number}.{_NAMES[part]}.{kind}"


def _pairs(rows: int, heads: int) -> list[int]:
    """llama.cpp rotates neighbours of a head of Llama, transformers its two halves."""
    size = rows // heads
    return [
        head * size + half * size // 2 + pair for head in range(heads) for pair in range(size // 2) for half in (0, 1)
    ]


def encode(weight: np.ndarray, kind: Kind) -> tuple[np.ndarray, Kind]:
    if weight.ndim == 1:
        return weight, Kind.F32
    if weight.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0]:
        kind = Kind.F32 if weight.shape[-1] % 32 else Kind.Q8_0
    if kind in HALVES:
        blocks = random_blocks(kind, weight.size // gguf.GGML_QUANT_SIZES[kind][0], float(weight.std()))
    elif kind in (Kind.Q4_K, Kind.Q5_K):
        blocks = _k_blocks(weight.reshape(-1, 256), 4 if kind is Kind.Q4_K else 5)
    elif kind is Kind.Q6_K:
        blocks = _q6_k_blocks(weight.reshape(-1, 256))
    else:
        return gguf.quants.quantize(weight, kind), kind
    return blocks.reshape(len(weight), -1), kind


HALVES = {Kind.Q2_K: (80, 82), Kind.Q3_K: (108,), Kind.IQ4_NL: (0,), Kind.IQ4_XS: (0,)}
"""Where blocks of types that nothing here quantizes to hold a float16."""
_LARGEST = {Kind.Q2_K: 45, Kind.Q3_K: 124, Kind.IQ4_NL: 127, Kind.IQ4_XS: 4064}
"""By how much a block's float16 is multiplied at most."""


def random_blocks(kind: Kind, count: int, size: float) -> np.ndarray:
    """Return blocks of random numbers that are about as large as ``size``."""
    random = np.random.default_rng(count)
    blocks = random.integers(0, 256, (count, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8)
    for at in HALVES[kind]:
        halves = (random.uniform(1, 2, count) * size / _LARGEST[kind]).astype(np.float16)
        blocks[:, at : at + 2] = halves.view(np.uint8).reshape(-1, 2)
    return blocks


def _k_blocks(weight: np.ndarray, bits: int) -> np.ndarray:
    """Q4_K and Q5_K: eight groups of 32 with scales and offsets of 6 bits."""
    most = (1 << bits) - 1
    groups = weight.reshape(-1, 8, 32)
    low = np.minimum(groups.min(2), 0)
    steps = (groups.max(2) - low) / most
    d, m = _f16(steps.max(1) / 63), _f16(-low.min(1) / 63)
    scales = np.rint(steps / _some(d)).clip(0, 63).astype(np.uint8)
    offsets = np.rint(-low / _some(m)).clip(0, 63).astype(np.uint8)
    codes = (groups + m[..., None] * offsets[..., None]) / _some(d[..., None] * scales[..., None])
    codes = np.rint(codes).clip(0, most).astype(np.uint8)
    packed = np.zeros((len(weight), 12), np.uint8)
    for i in range(4):
        packed[:, i] = scales[:, i] | (scales[:, i + 4] >> 4) << 6
        packed[:, i + 4] = offsets[:, i] | (offsets[:, i + 4] >> 4) << 6
        packed[:, i + 8] = scales[:, i + 4] & 15 | (offsets[:, i + 4] & 15) << 4
    low_codes = codes & 15
    nibbles = np.concatenate([low_codes[:, 2 * i] | low_codes[:, 2 * i + 1] << 4 for i in range(4)], 1)
    high = sum((codes[:, i] >> 4) << i for i in range(8)).astype(np.uint8)
    halves = np.concatenate((d, m), 1).astype(np.float16).view(np.uint8)
    return np.concatenate((halves, packed, *([high] if bits == 5 else []), nibbles), 1)


def _q6_k_blocks(weight: np.ndarray) -> np.ndarray:
    """Q6_K: sixteen groups of 16 with scales in int8."""
    groups = weight.reshape(-1, 16, 16)
    steps = abs(groups).max(2) / 31
    d = _f16(steps.max(1) / 127)
    scales = np.rint(steps / _some(d)).astype(np.int8)
    codes = np.rint(groups / _some(d[..., None] * scales[..., None].astype(np.float32))).clip(-32, 31) + 32
    runs = codes.astype(np.uint8).reshape(-1, 2, 4, 32)
    low = np.concatenate((runs[:, :, :2] & 15 | (runs[:, :, 2:] & 15) << 4,), 2).reshape(-1, 128)
    high = sum((runs[:, :, i] >> 4) << 2 * i for i in range(4)).reshape(-1, 64)
    return np.concatenate((low, high.astype(np.uint8), scales.view(np.uint8), d.astype(np.float16).view(np.uint8)), 1)


def _f16(values: np.ndarray) -> np.ndarray:
    return values.astype(np.float16).astype(np.float32)[:, None]


def _some(values: np.ndarray) -> np.ndarray:
    return np.where(values == 0, 1, values)
