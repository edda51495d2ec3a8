"""Reads what the metadata of a GGUF file says of experts."""

from typing import Any

from tokenloom.gguf.gguf_file import GgufFile

from ..files.config_reader import ConfigReader
from .names import has_experts

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
