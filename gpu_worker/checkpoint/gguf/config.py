"""Derives the entries of a ``config.json`` from the metadata and tensors of a GGUF file."""

import math
import struct
from pathlib import Path
from typing import Any

from tokenloom.gguf.gguf_file import GGUF_ARCHITECTURES, GgufFile, read_gguf

from ..files.config_reader import ConfigReader

ROPE_FACTORS = "rope_freqs.weight"
"""The tensor that says by how much each frequency of a Llama 3.1 is divided."""

PLAIN_NAMES = {0: "float32", 1: "float16", 28: "float64", 30: "bfloat16"}
"""Types of tensors that are not quantized, by their id in the file."""
BLOCK_NAMES = {2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K"}
"""Types of blocks that are read, by their id in the file."""
_OTHER_NAMES = {
    10: "Q2_K", 11: "Q3_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL",
    21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
}  # fmt: skip

_LLAMA3_ORIGINAL, _LLAMA3_LOW, _LLAMA3_HIGH = 8192, 1.0, 4.0
"""What every Llama from 3.1 on has; its file has only the factors that follow from them."""


_LAST: dict[tuple[Path, int, int], dict[str, Any]] = {}
"""The configuration that was derived last, by its file, time and size."""


def gguf_config(path: Path, head: GgufFile | None = None) -> dict[str, Any]:
    """Return the configuration of the model in a file, as Hugging Face's ``config.json`` states it. ``head``: that of
    the file, if it was read already.

    Raises ``ValueError`` naming the file and the entry that is missing, wrong or not supported.
    """
    status = path.stat()
    key = (path, status.st_mtime_ns, status.st_size)
    # A start asks several times; reading the head of a file with 150,000 tokens takes 0.3 s.
    if key not in _LAST:
        config = _derive(path, head or read_gguf(path))
        _LAST.clear()
        _LAST[key] = config
    return _LAST[key]


def _derive(path: Path, file: GgufFile) -> dict[str, Any]:
    architecture = file.metadata.get("general.architecture")
    if file.metadata.get("general.type", "model") != "model":
        raise ValueError(f"{path} holds no model but {file.metadata['general.type']!r:.40}")
    if not isinstance(architecture, str) or architecture not in GGUF_ARCHITECTURES:
        known = ", ".join(GGUF_ARCHITECTURES)
        raise ValueError(
            f"{path}: general.architecture {architecture!r} is not supported: must be one of {known}; serve the "
            "model's safetensors checkpoint"
        )
    own = {name: value for name, value in file.metadata.items() if name.startswith(f"{architecture}.")}
    for tensor in file.tensors.values():
        if tensor.kind not in PLAIN_NAMES.keys() | BLOCK_NAMES.keys():
            raise ValueError(f"{path}: {type_error(tensor.name, tensor.kind)}")
    reader = ConfigReader(own, str(path))
    prefix = f"{architecture}."
    name = "MixtralForCausalLM" if architecture == "llama" and has_experts(file) else GGUF_ARCHITECTURES[architecture]
    config = _read(reader, prefix, file) | read_experts(reader, prefix, file) | {"architectures": [name]}
    reader.refuse_rest()
    return config


def has_experts(file: GgufFile) -> bool:
    """Return whether the model's layers choose some of many MLPs for each token."""
    return bool(file.metadata.get(f"{file.metadata['general.architecture']}.expert_count"))


def type_error(name: str, kind: int) -> ValueError:
    """Return the error for a tensor of a type that is not supported."""
    known = ", ".join(("F32", "F16", "BF16", *BLOCK_NAMES.values()))
    return ValueError(f"{name} has the type {_OTHER_NAMES.get(kind, kind)}, which is not supported: must be of {known}")


def _read(reader: ConfigReader, prefix: str, file: GgufFile) -> dict[str, Any]:
    hidden, heads = reader.take_int(f"{prefix}embedding_length"), reader.take_int(f"{prefix}attention.head_count")
    head_size = reader.take_int(f"{prefix}attention.key_length", hidden // heads)
    vocab_size = _vocab_size(file)
    _check(reader, prefix, head_size, vocab_size)
    config = {
        "dtype": _dtype(file),
        "vocab_size": vocab_size,
        "hidden_size": hidden,
        "intermediate_size": reader.take_int(f"{prefix}feed_forward_length"),
        "num_hidden_layers": reader.take_int(f"{prefix}block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": reader.take_int(f"{prefix}attention.head_count_kv", heads),
        "head_dim": head_size,
        "max_position_embeddings": reader.take_int(f"{prefix}context_length"),
        "rms_norm_eps": reader.take_float(f"{prefix}attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "rope_parameters": _rope(reader, prefix, file, head_size),
    }
    # The metadata does not mention biases; Qwen2 always has those of queries, keys and values, and Mixtral has none.
    is_mixtral = prefix == "llama." and has_experts(file)
    if prefix not in ("qwen2.", "qwen2moe.") and not is_mixtral:
        config["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
    if prefix == "llama." and not is_mixtral:
        config["mlp_bias"] = "blk.0.ffn_down.bias" in file.tensors
    return config


def _check(reader: ConfigReader, prefix: str, head_size: int, vocab_size: int) -> None:
    """Raise ``ValueError`` naming an entry that contradicts others, or asks for what is not supported."""
    for name in ("attention.value_length", "rope.dimension_count"):
        if reader.take_int(prefix + name, head_size) != head_size:
            raise reader.error(prefix + name, f"must be the size of a head, {head_size}")
    if reader.take_int(f"{prefix}vocab_size", vocab_size) != vocab_size:
        raise reader.error(f"{prefix}vocab_size", f"must be the number of embeddings, {vocab_size}")


def _vocab_size(file: GgufFile) -> int:
    embeddings = file.tensors.get("token_embd.weight")
    if embeddings is None or len(embeddings.shape) != 2:
        raise ValueError(f"{file.path} has no matrix token_embd.weight: it holds no language model")
    return embeddings.shape[0]


def _dtype(file: GgufFile) -> str:
    """Return the dtype of the matrices; bfloat16 if any is quantized, as the file then does not say what they were."""
    kinds = {tensor.kind for tensor in file.tensors.values() if len(tensor.shape) >= 2}
    return PLAIN_NAMES.get(kinds.pop(), "bfloat16") if len(kinds) == 1 else "bfloat16"


def _rope(reader: ConfigReader, prefix: str, file: GgufFile, head_size: int) -> dict[str, Any]:
    theta = reader.take_float(f"{prefix}rope.freq_base", 10_000.0)
    kind = reader.take(f"{prefix}rope.scaling.type") or "none"
    scaling = f"{prefix}rope.scaling."
    if ROPE_FACTORS in file.tensors:
        if kind != "none":
            raise reader.error(f"{scaling}type", f"must be none: the file also has factors, in {ROPE_FACTORS}")
        return {"rope_theta": theta} | _llama3(file, theta, head_size)
    match kind:
        case "none":
            return {"rope_type": "default", "rope_theta": theta}
        case "linear":
            return {"rope_type": "linear", "rope_theta": theta, "factor": reader.take_float(f"{scaling}factor")}
        case "yarn":
            return {
                "rope_type": "yarn",
                "rope_theta": theta,
                "factor": reader.take_float(f"{scaling}factor"),
                "original_max_position_embeddings": reader.take_int(f"{scaling}original_context_length"),
                "beta_fast": reader.take_float(f"{scaling}yarn_beta_fast", 32.0),
                "beta_slow": reader.take_float(f"{scaling}yarn_beta_slow", 1.0),
            }
    raise reader.error(f"{scaling}type", "must be none, linear or yarn")


def _llama3(file: GgufFile, theta: float, head_size: int) -> dict[str, Any]:
    """Return the parameters from which the factors of each frequency follow. Raises ``ValueError`` if none do."""
    tensor = file.tensors[ROPE_FACTORS]
    if tensor.kind != 0 or tensor.shape != (head_size // 2,):
        raise ValueError(f"{file.path}: {ROPE_FACTORS} must be float32 [{head_size // 2}]")
    with file.path.open("rb") as stream:
        stream.seek(tensor.offset)
        content = stream.read(2 * head_size)
    stored = struct.unpack(f"<{len(content) // 4}f", content[: len(content) // 4 * 4])
    factor = max(1.0, *stored)
    expected = [_llama3_factor(theta ** (-2 * pair / head_size), factor) for pair in range(head_size // 2)]
    if len(stored) != len(expected) or not all(map(_is_close, stored, expected)):
        raise ValueError(
            f"{file.path}: {ROPE_FACTORS} holds other factors than those of Llama 3, which are the ones supported"
        )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": _LLAMA3_LOW,
        "high_freq_factor": _LLAMA3_HIGH,
        "original_max_position_embeddings": _LLAMA3_ORIGINAL,
    }


def _is_close(found: float, expected: float) -> bool:
    return math.isclose(found, expected, rel_tol=1e-4)


def _llama3_factor(frequency: float, factor: float) -> float:
    turns = _LLAMA3_ORIGINAL * frequency / (2 * math.pi)  # within the original context
    if turns < _LLAMA3_LOW:
        return factor
    if turns > _LLAMA3_HIGH:
        return 1.0
    smooth = (turns - _LLAMA3_LOW) / (_LLAMA3_HIGH - _LLAMA3_LOW)
    return 1 / ((1 - smooth) / factor + smooth)


_SOFTMAX = 1


def read_experts(reader: ConfigReader, prefix: str, file: GgufFile) -> dict[str, Any]:
    """Return the entries of a ``config.json`` that describe experts; empty for a model without any.

    Raises ``ValueError`` naming an entry that is wrong or not supported.
    """
    if not has_experts(file):
        if prefix in ("qwen2moe.", "qwen3moe."):
            raise reader.error(f"{prefix}expert_count", "must be above 0")
        for name in ("expert_count", "expert_used_count"):
            if reader.take(prefix + name, 0) != 0:
                raise reader.error(prefix + name, "must be 0 for a model without experts")
        return {}
    if prefix not in ("llama.", "qwen2moe.", "qwen3moe."):
        raise reader.error(f"{prefix}expert_count", "must be 0: models of this architecture have no experts")
    if reader.take_int(f"{prefix}expert_gating_func", _SOFTMAX) != _SOFTMAX:
        raise reader.error(f"{prefix}expert_gating_func", f"must be {_SOFTMAX}, which is softmax")
    count = {"num_experts_per_tok": reader.take_int(f"{prefix}expert_used_count")}
    number = reader.take_int(f"{prefix}expert_count")
    if prefix == "llama.":
        size = reader.take_int(f"{prefix}feed_forward_length")
        if reader.take_int(f"{prefix}expert_feed_forward_length", size) != size:
            raise reader.error(f"{prefix}expert_feed_forward_length", f"must be the feed_forward_length, {size}")
        return count | {"num_local_experts": number, "sliding_window": None}
    return count | {"num_experts": number} | _read_qwen(reader, prefix, file)


def _read_qwen(reader: ConfigReader, prefix: str, file: GgufFile) -> dict[str, Any]:
    is_2, num_layers = prefix == "qwen2moe.", reader.take_int(f"{prefix}block_count")
    with_experts = [layer for layer in range(num_layers) if f"blk.{layer}.ffn_gate_exps.weight" in file.tensors]
    # As llama.cpp computes them: the metadata need not mention it.
    normalizes = reader.take_bool(f"{prefix}expert_weights_norm", not is_2)
    config: dict[str, Any] = {
        "moe_intermediate_size": reader.take_int(f"{prefix}expert_feed_forward_length"),
        "norm_topk_prob": normalizes,
        "mlp_only_layers": [layer for layer in range(num_layers) if layer not in with_experts],
    }
    if is_2:
        config["shared_expert_intermediate_size"] = reader.take_int(f"{prefix}expert_shared_feed_forward_length")
    return config
