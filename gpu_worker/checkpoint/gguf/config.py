"""Derives the entries of a ``config.json`` from the metadata and tensors of a GGUF file."""

import math
import struct
from pathlib import Path
from typing import Any

from tokenloom.gguf.gguf_file import GGUF_ARCHITECTURES, GgufFile, gguf_parts, is_gguf, read_gguf

from ..files.architectures import CLASS_OF_TYPE
from ..files.config_reader import ConfigReader, causal_classes, read_architecture
from .families import FURTHER, has_experts, read_experts, read_mamba2

ROPE_FACTORS = "rope_freqs.weight"
"""The tensor that says by how much each frequency of a Llama 3.1 is divided."""
LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
"""The tensors of long rope (Phi-3)."""

PLAIN_NAMES = {0: "float32", 1: "float16", 28: "float64", 30: "bfloat16"}
"""Types of tensors that are not quantized, by their id in the file."""
BLOCK_NAMES = {
    2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 10: "Q2_K", 11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K",
    20: "IQ4_NL", 23: "IQ4_XS", 39: "MXFP4",
}  # fmt: skip
"""Types of blocks that are read, by their id in the file."""
_OTHER_NAMES = {
    15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 21: "IQ3_S", 22: "IQ2_S", 29: "IQ1_M",
    34: "TQ1_0", 35: "TQ2_0", 40: "NVFP4", 41: "Q1_0",
}  # fmt: skip

_LLAMA3_ORIGINAL, _LLAMA3_LOW, _LLAMA3_HIGH = 8192, 1.0, 4.0
"""What every Llama from 3.1 on has; its file has only the factors that follow from them."""


_LAST: dict[tuple[tuple[Path, int, int], ...], dict[str, Any]] = {}
"""The configuration that was derived last, by each of its files, its time and its size."""


def described_by(path: Path) -> Path:
    """Return the file that describes a checkpoint: the ``config.json`` of a directory, or the GGUF file itself."""
    return path if is_gguf(path) else path / "config.json"


def read_model(path: Path) -> tuple[str, dict[str, Any]]:
    """Return the name of a model's class and the entries that describe it, of a directory or a GGUF file. Raises
    ``ValueError``."""
    if not is_gguf(path):
        return read_architecture(path)
    config = gguf_config(path)
    return config["architectures"][0], config


def gguf_config(path: Path, head: GgufFile | None = None) -> dict[str, Any]:
    """Return the configuration of the model in a file, as Hugging Face's ``config.json`` states it. ``head``: that of
    the file, if it was read already.

    Raises ``ValueError`` naming the file and the entry that is missing, wrong or not supported.
    """
    if not (files := [part for part in gguf_parts(path) if part.is_file()]):
        path.stat()  # raises the error of a missing file
    key = tuple((part, (status := part.stat()).st_mtime_ns, status.st_size) for part in files)
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
    _check_sizes(file, own)
    if (split := f"blk.0.{_JOINED.get(architecture)}.weight") in file.tensors:
        raise ValueError(f"{path}: {split} is a part of a matrix that is read as one: serve the safetensors checkpoint")
    reader = ConfigReader(own, str(path))
    config = _read(reader, f"{architecture}.", file)
    reader.refuse_rest()
    return config


_NO_SIZES = ("context_length", "sliding_window", "temperature_length")
"""Ends of the names of entries that count tokens."""


def _check_sizes(file: GgufFile, own: dict[str, Any]) -> None:
    """Raise ``ValueError`` for a tensor that its file cannot hold, and for an entry that is a size of none.

    Of such a number the engine would first ask for memory, and fail without its name.
    """
    bits = {part: 8 * part.stat().st_size for part in file.parts}
    most = 0
    for tensor in file.tensors.values():
        if (count := math.prod(tensor.shape)) > bits[tensor.path]:  # no number takes less than a bit
            raise ValueError(f"{tensor.path} ends within the tensor {tensor.name}: the file is not complete")
        most = max(most, count)
    for name, value in own.items():
        values = value if isinstance(value, list) else [value]
        largest = max((each for each in values if type(each) is int), default=0)
        if largest > most and not name.endswith(_NO_SIZES) and ".rope." not in name:
            raise ValueError(f"{file.path}: {name} is {largest}, and no tensor has more than {most} numbers")


def type_error(name: str, kind: int) -> ValueError:
    """Return the error for a tensor of a type that is not supported."""
    known = ", ".join(("F32", "F16", "BF16", *BLOCK_NAMES.values()))
    return ValueError(f"{name} has the type {_OTHER_NAMES.get(kind, kind)}, which is not supported: must be of {known}")


def _read(reader: ConfigReader, prefix: str, file: GgufFile) -> dict[str, Any]:
    hidden, vocab_size = reader.take_int(f"{prefix}embedding_length"), _vocab_size(file)
    if reader.take_int(f"{prefix}vocab_size", vocab_size) != vocab_size:
        raise reader.error(f"{prefix}vocab_size", f"must be the number of embeddings, {vocab_size}")
    every = {
        "dtype": _dtype(file),
        "vocab_size": vocab_size,
        "hidden_size": hidden,
        "num_hidden_layers": reader.take_layers(f"{prefix}block_count"),
        "max_position_embeddings": reader.take_int(f"{prefix}context_length"),
        "rms_norm_eps": reader.take_float(f"{prefix}attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "pad_token_id": None,  # the defaults of classes may lie beyond the vocabulary
    }
    if prefix == "mamba2.":
        return _with_class(prefix, file, read_mamba2(reader, prefix, file, every))
    heads = reader.take_int(f"{prefix}attention.head_count")
    head_size = _head_size(reader, prefix, hidden // heads)
    experts = read_experts(reader, prefix, file)
    config = every | {
        "intermediate_size": _inner_size(reader, prefix),
        "num_attention_heads": heads,
        "num_key_value_heads": _of_first_layer(reader, f"{prefix}attention.head_count_kv", heads),
        "head_dim": head_size,
        "rope_parameters": _rope(reader, prefix, file, head_size),
    }
    # The metadata does not mention biases; Qwen2 always has those of queries, keys and values, and Mixtral has none.
    is_mixtral = prefix == "llama." and has_experts(file)
    if prefix in _WITH_BIASES and not is_mixtral:
        config["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
    if prefix in ("llama.", "smollm3.", "granite.", "falcon-h1.") and not is_mixtral:
        config["mlp_bias"] = "blk.0.ffn_down.bias" in file.tensors
    if prefix in FURTHER:
        config |= FURTHER[prefix](reader, prefix, file, config)
    return _with_class(prefix, file, config | experts)


_JOINED = {"phi3": "attn_q", "glm4": "ffn_gate", "gemma4": "ffn_gate_exps"}
"""A tensor that a file of the architecture has if it holds by parts what its class, and llama.cpp's converter, join."""
_WITH_BIASES = (
    "llama.",
    "qwen3.",
    "qwen3moe.",
    "gemma2.",
    "gemma3.",
    "gpt-oss.",
    "olmo2.",
    "smollm3.",
    "granite.",
    "glm4.",
    "falcon-h1.",
)
"""Architectures whose classes read ``attention_bias``, and of which every layer attends."""


def _with_class(prefix: str, file: GgufFile, config: dict[str, Any]) -> dict[str, Any]:
    """Return the entries with the class that computes them, and its type."""
    is_other = {
        "llama.": has_experts(file),
        "deepseek2.": config.get("scoring_func") != "sigmoid",
        "mistral3.": "llama_4_scaling_beta" not in config.get("rope_parameters", ()),
    }
    name = GGUF_ARCHITECTURES[prefix[:-1]][is_other.get(prefix, False)]
    if name == "MistralForCausalLM":
        config = config | {"sliding_window": None}  # which its class has by default
    types = {each: kind for table in (causal_classes(), CLASS_OF_TYPE) for kind, each in table.items()}
    return config | {"architectures": [name]} | ({"model_type": types[name]} if name in types else {})


_PARTLY_ROTATED = ("glm4.", "phi3.", "qwen35.", "qwen35moe.", "qwen3next.")
_LATENT = ("deepseek2.", "kimi-linear.")


def _head_size(reader: ConfigReader, prefix: str, default: int) -> int:
    """Return the size of a head, of a latent model that of its rotated part. Raises ``ValueError`` naming an entry that
    contradicts it, or asks for what is not supported."""
    if prefix in _LATENT:
        return reader.take_int(f"{prefix}rope.dimension_count")
    head_size = reader.take_int(f"{prefix}attention.key_length", default)
    rotated = () if prefix in (*_PARTLY_ROTATED, "nemotron_h.") else ("rope.dimension_count",)
    for name in ("attention.value_length", *rotated):
        if reader.take_int(prefix + name, head_size) != head_size:
            raise reader.error(prefix + name, f"must be the size of a head, {head_size}")
    return head_size


def _inner_size(reader: ConfigReader, prefix: str) -> int:
    """Return the size of the MLPs of layers without experts, which not every Qwen3.5 has."""
    name = f"{prefix}feed_forward_length"
    return reader.take_count(name) if prefix == "qwen35moe." else _of_first_layer(reader, name)


_OF_SOME_LAYERS = ("lfm2.", "granitehybrid.", "kimi-linear.", "nemotron_h.")
"""Architectures whose files say 0 for layers without KV heads, or without an MLP."""


def _of_first_layer(reader: ConfigReader, name: str, default: int | None = None) -> int:
    """Return an entry that may be a list with a number for each layer, which differ in Gemma 4 alone."""
    values = reader.take(name)
    if not isinstance(values, list) or not values:
        return reader.take_int(name, default)
    if name.startswith(_OF_SOME_LAYERS):  # a layer that keeps a state has no KV heads, and one that attends no MLP
        values = [value for value in values if value != 0] or values
    if any(type(value) is not int or value < 1 for value in values):
        raise reader.error(name, "must be positive integers")
    if len(set(values)) > 1 and not name.startswith("gemma4."):
        raise reader.error(name, "must be the same for all layers")
    return int(values[0])


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
    kind, scaling = reader.take(f"{prefix}rope.scaling.type") or "none", f"{prefix}rope.scaling."
    rope: dict[str, Any] = {"rope_theta": reader.take_float(f"{prefix}rope.freq_base", 10_000.0)}
    if prefix in _PARTLY_ROTATED:
        rope["partial_rotary_factor"] = reader.take_int(f"{prefix}rope.dimension_count", head_size) / head_size
    reader.take(f"{scaling}finetuned")
    if prefix == "gemma4." and ROPE_FACTORS in file.tensors:
        # Frequencies that are not to be used are divided by a number that leaves nothing of them.
        factors = _floats(file, ROPE_FACTORS)
        return rope | {"rope_type": "proportional", "partial_rotary_factor": factors.count(1.0) / len(factors)}
    if ROPE_FACTORS in file.tensors:
        if kind != "none":
            raise reader.error(f"{scaling}type", f"must be none: the file also has factors, in {ROPE_FACTORS}")
        return rope | _llama3(file, rope["rope_theta"], head_size)
    if prefix == "phi3." and kind in ("none", "longrope"):
        return rope | _long_rope(reader, prefix, file)
    match kind:
        case "none":
            return rope | {"rope_type": "default"}
        case "linear":
            return rope | {"rope_type": "linear", "factor": reader.take_float(f"{scaling}factor")}
        case "yarn":
            return rope | _yarn(reader, scaling)
    raise reader.error(f"{scaling}type", "must be none, linear or yarn")


def _yarn(reader: ConfigReader, scaling: str) -> dict[str, Any]:
    yarn = {
        "rope_type": "yarn",
        "factor": reader.take_float(f"{scaling}factor"),
        "original_max_position_embeddings": reader.take_int(f"{scaling}original_context_length"),
        "beta_fast": reader.take_float(f"{scaling}yarn_beta_fast", 32.0),
        "beta_slow": reader.take_float(f"{scaling}yarn_beta_slow", 1.0),
    }
    if reader.take(f"{scaling}yarn_attn_factor") is not None:
        yarn["attention_factor"] = reader.take_float(f"{scaling}yarn_attn_factor")
    return yarn


def _long_rope(reader: ConfigReader, prefix: str, file: GgufFile) -> dict[str, Any]:
    """Return the parameters of a Phi-3, whose files say nothing of long rope but its factors and the original
    context."""
    original = reader.take_int(f"{prefix}rope.scaling.original_context_length", reader.take(f"{prefix}context_length"))
    if LONG_FACTORS not in file.tensors:
        return {"rope_type": "default"}
    rope = {
        "rope_type": "longrope",
        "original_max_position_embeddings": original,
        "long_factor": _floats(file, LONG_FACTORS),
        "short_factor": _floats(file, SHORT_FACTORS),
    }
    if reader.take(f"{prefix}rope.scaling.attn_factor") is not None:
        rope["attention_factor"] = reader.take_float(f"{prefix}rope.scaling.attn_factor")
    return rope


def _floats(file: GgufFile, name: str) -> list[float]:
    """Return the numbers of a small tensor. Raises ``ValueError`` unless it is a vector of float32 in the file."""
    tensor = file.tensors.get(name)
    if tensor is None or tensor.kind != 0 or len(tensor.shape) != 1:
        raise ValueError(f"{file.path}: {name} must be float32, of one dimension")
    with tensor.path.open("rb") as stream:
        stream.seek(tensor.offset)
        content = stream.read(4 * min(tensor.shape[0], 1 << 16))
    return list(struct.unpack(f"<{len(content) // 4}f", content[: len(content) // 4 * 4]))


def _llama3(file: GgufFile, theta: float, head_size: int) -> dict[str, Any]:
    """Return the parameters from which the factors of each frequency follow. Raises ``ValueError`` if none do."""
    stored = _floats(file, ROPE_FACTORS)
    if file.tensors[ROPE_FACTORS].shape != (head_size // 2,):
        raise ValueError(f"{file.path}: {ROPE_FACTORS} must be float32 [{head_size // 2}]")
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
