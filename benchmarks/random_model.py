"""Makes checkpoints of real shapes with random weights and a generated tokenizer: speed depends on shapes only."""

import itertools
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

_SEED = 1234
_STD = 0.02
_EOS = "<|endoftext|>"
_COMMON: dict[str, Any] = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 4096,
    "bos_token_id": None,
    "eos_token_id": 0,
    "attention_bias": False,
}
_TINY = _COMMON | {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
_QWEN3_5 = _COMMON | {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "head_dim": 256,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
SHAPES: dict[str, dict[str, Any]] = {
    "tiny-fp32": _TINY | {"torch_dtype": "float32"},
    "tiny-bf16": _TINY | {"torch_dtype": "bfloat16"},
    "qwen3-0.6b": _COMMON
    | {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": 151_936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rope_theta": 1e6,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
    },
    "llama-8b": _COMMON
    | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 128_256,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 16_384,
        "rope_theta": 500_000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    },
    "tiny-qwen3.5": _QWEN3_5
    | {
        "vocab_size": 4096,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "layer_types": [*["linear_attention"] * 3, "full_attention"],
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "torch_dtype": "float32",
    },
    "qwen3.5-0.8b": _QWEN3_5
    | {
        "vocab_size": 248_320,
        "hidden_size": 1024,
        "intermediate_size": 3584,
        "num_hidden_layers": 24,
        "layer_types": [*["linear_attention"] * 3, "full_attention"] * 6,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "linear_num_value_heads": 16,
    },
    # An eighth of the layers, whose shares of a prompt's time are those of all, and a vocabulary that takes none of it.
    "qwen3.5-4b-part": _QWEN3_5
    | {
        "vocab_size": 4096,
        "hidden_size": 2560,
        "intermediate_size": 9216,
        "num_hidden_layers": 4,
        "layer_types": [*["linear_attention"] * 3, "full_attention"],
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "linear_num_value_heads": 32,
    },
}
"""The shapes: names and configurations."""


def write_model(name: str, directory: Path) -> None:
    """Write ``config.json``, ``model.safetensors`` and the tokenizer; the same name gives the same files."""
    if name not in SHAPES:
        raise ValueError(f"shape {name!r} is unknown; there are {', '.join(SHAPES)}")
    config = SHAPES[name]
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": 0}) + "\n")
    _tokenizer(config["vocab_size"]).save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": _EOS}) + "\n"
    )
    generator = torch.Generator().manual_seed(_SEED)
    dtype = getattr(torch, config["torch_dtype"])
    tensors = {
        key: torch.ones(shape, dtype=dtype)
        if len(shape) == 1
        else torch.empty(shape, dtype=dtype).normal_(0, _STD, generator=generator)
        for key, shape in _shapes(config)
    }
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def write_zero_model(name: str, directory: Path) -> None:
    """Write ``config.json`` and weights of zeros that take no room on a disk, for who fills them after loading."""
    config = SHAPES[name]
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    dtype = {"bfloat16": "BF16", "float32": "F32"}[config["torch_dtype"]]
    entries: dict[str, Any] = {}
    end = 0
    for key, shape in _shapes(config):
        begin, end = end, end + math.prod(shape) * getattr(torch, config["torch_dtype"]).itemsize
        entries[key] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % 8)
    with (directory / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + end)


def _shapes(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Return the tensors' names in transformers and their shapes."""
    hidden, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    has_gates = config["model_type"] == "qwen3_5_text"
    kinds = config.get("layer_types", ["full_attention"] * config["num_hidden_layers"])
    yield "model.embed_tokens.weight", (config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        yield prefix + "input_layernorm.weight", (hidden,)
        yield prefix + "post_attention_layernorm.weight", (hidden,)
        if kinds[layer] == "linear_attention":
            yield from _delta_shapes(config, f"{prefix}linear_attn.")
        else:
            yield prefix + "self_attn.q_proj.weight", ((1 + has_gates) * queries, hidden)
            yield prefix + "self_attn.k_proj.weight", (keys, hidden)
            yield prefix + "self_attn.v_proj.weight", (keys, hidden)
            yield prefix + "self_attn.o_proj.weight", (hidden, queries)
            if config["model_type"] in ("qwen3", "qwen3_5_text"):
                yield prefix + "self_attn.q_norm.weight", (head,)
                yield prefix + "self_attn.k_norm.weight", (head,)
        yield prefix + "mlp.gate_proj.weight", (inner, hidden)
        yield prefix + "mlp.up_proj.weight", (inner, hidden)
        yield prefix + "mlp.down_proj.weight", (hidden, inner)
    yield "model.norm.weight", (hidden,)
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", (config["vocab_size"], hidden)


def _delta_shapes(config: dict[str, Any], prefix: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Return those of a gated delta net."""
    hidden, heads, size = config["hidden_size"], config["linear_num_value_heads"], config["linear_value_head_dim"]
    keys, values = config["linear_num_key_heads"] * config["linear_key_head_dim"], heads * size
    yield prefix + "in_proj_qkv.weight", (2 * keys + values, hidden)
    yield prefix + "in_proj_z.weight", (values, hidden)
    yield prefix + "in_proj_a.weight", (heads, hidden)
    yield prefix + "in_proj_b.weight", (heads, hidden)
    yield prefix + "conv1d.weight", (2 * keys + values, 1, config["linear_conv_kernel_dim"])
    yield prefix + "A_log", (heads,)
    yield prefix + "dt_bias", (heads,)
    yield prefix + "norm.weight", (size,)
    yield prefix + "out_proj.weight", (hidden, values)


def _tokenizer(vocab_size: int) -> Tokenizer:
    """Make a byte-level BPE of bytes, pairs of letters, pairs of pairs, until the vocabulary is full.

    Every id decodes to text, so that detokenizing costs what it costs for a real model.
    """
    letters = "etaoinshrdlcumwfgypbvkjxqz"
    tokens: dict[str, int] = {_EOS: 0}
    for byte in sorted(pre_tokenizers.ByteLevel.alphabet()):
        tokens[byte] = len(tokens)
    merges: list[tuple[str, str]] = []
    pairs = [a + b for a, b in itertools.product("Ġ" + letters, letters)]
    for left, right in itertools.chain(((pair[0], pair[1]) for pair in pairs), itertools.product(pairs, pairs)):
        if len(tokens) == vocab_size:
            break
        if left + right not in tokens:
            merges.append((left, right))
            tokens[left + right] = len(tokens)
    assert len(tokens) == vocab_size, "more made-up words are needed"
    tokenizer = Tokenizer(models.BPE(tokens, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([_EOS])
    return tokenizer
