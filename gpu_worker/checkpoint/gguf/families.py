"""Reads those entries of a GGUF file that only some architectures have: windows, limits, scales, compressed attention
and experts."""

from collections.abc import Callable
from typing import Any

from tokenloom.gguf.gguf_file import GgufFile

from ..files.config_reader import ConfigReader

_GEMMA2_LAYERS, _GEMMA3_LAYERS = 46, 62
"""Of the largest model of each family, of 27B: its scores are divided by the square root of another size than a head's,
which llama.cpp knows it by, too."""


def _gemma(config: dict[str, Any], largest: int) -> dict[str, Any]:
    is_largest = config["num_hidden_layers"] == largest
    size = config["hidden_size"] // config["num_attention_heads"] if is_largest else config["head_dim"]
    return {"query_pre_attn_scalar": size}


def _limit(reader: ConfigReader, name: str) -> float | None:
    return None if reader.take(name) is None else reader.take_float(name)


def _gemma2(reader: ConfigReader, prefix: str, file: GgufFile, config: dict[str, Any]) -> dict[str, Any]:
    return _gemma(config, _GEMMA2_LAYERS) | {
        "sliding_window": reader.take_int(f"{prefix}attention.sliding_window", 4096),
        "attn_logit_softcapping": _limit(reader, f"{prefix}attn_logit_softcapping"),
        "final_logit_softcapping": _limit(reader, f"{prefix}final_logit_softcapping"),
    }


def _gemma3(reader: ConfigReader, prefix: str, file: GgufFile, config: dict[str, Any]) -> dict[str, Any]:
    window = reader.take_count(f"{prefix}attention.sliding_window")
    step = reader.take_int(f"{prefix}attention.sliding_window_pattern", 6 if window else 1)
    local = {"rope_type": "default", "rope_theta": reader.take_float(f"{prefix}rope.freq_base_swa", 10_000.0)}
    return _gemma(config, _GEMMA3_LAYERS) | {
        "sliding_window": window or None,
        "layer_types": [
            "sliding_attention" if (layer + 1) % step else "full_attention"
            for layer in range(config["num_hidden_layers"])
        ],
        "final_logit_softcapping": _limit(reader, f"{prefix}final_logit_softcapping"),
        "rope_parameters": {"full_attention": config["rope_parameters"], "sliding_attention": local},
    }


def _gemma4(reader: ConfigReader, prefix: str, file: GgufFile, config: dict[str, Any]) -> dict[str, Any]:
    pattern = reader.take(name := f"{prefix}attention.sliding_window_pattern")
    if not isinstance(pattern, list) or len(pattern) != config["num_hidden_layers"]:
        raise reader.error(name, "must say of each layer whether it has a window")
    local_size = reader.take_int(f"{prefix}attention.key_length_swa")
    for name in ("attention.value_length_swa", "rope.dimension_count_swa"):
        if reader.take_int(prefix + name, local_size) != local_size:
            raise reader.error(prefix + name, f"must be the size of a head with a window, {local_size}")
    local = {"rope_type": "default", "rope_theta": reader.take_float(f"{prefix}rope.freq_base_swa", 10_000.0)}
    by_layer = file.tensors.get("per_layer_token_embd.weight")
    if (num_shared := reader.take_count(name := f"{prefix}attention.shared_kv_layers")) > len(pattern):
        raise reader.error(name, f"must be at most the number of layers, {len(pattern)}")
    return {
        "head_dim": local_size,
        "global_head_dim": config["head_dim"],
        "sliding_window": reader.take_int(f"{prefix}attention.sliding_window"),
        "layer_types": ["sliding_attention" if has_window else "full_attention" for has_window in pattern],
        "rope_parameters": {"full_attention": config["rope_parameters"], "sliding_attention": local},
        "final_logit_softcapping": _limit(reader, f"{prefix}final_logit_softcapping"),
        "num_kv_shared_layers": num_shared,
        "hidden_size_per_layer_input": reader.take_count(f"{prefix}embedding_length_per_layer_input"),
        "vocab_size_per_layer_input": config["vocab_size"] if by_layer is None else by_layer.shape[0],
        "use_double_wide_mlp": _is_double_wide(reader, f"{prefix}feed_forward_length", num_shared),
    } | _kv_heads(reader, f"{prefix}attention.head_count_kv", file, pattern)


def _is_double_wide(reader: ConfigReader, name: str, num_shared: int) -> bool:
    """Return whether the MLPs of the last layers, which share keys and values, are twice as wide."""
    sizes = reader.take(name)
    if not isinstance(sizes, list) or len(set(sizes)) == 1:
        return False
    first = len(sizes) - num_shared
    if sizes != [sizes[0]] * first + [2 * sizes[0]] * num_shared:
        raise reader.error(name, f"must be the same for all layers, or twice as large for the last {num_shared}")
    return True


def _kv_heads(reader: ConfigReader, name: str, file: GgufFile, pattern: list[Any]) -> dict[str, Any]:
    """Return the numbers of KV heads of layers with a window and of others, if the file has one for each layer."""
    counts = reader.take(name)
    if not isinstance(counts, list):
        return {}
    by_kind = [
        {count for count, each in zip(counts, pattern, strict=False) if bool(each) is kind} for kind in (True, False)
    ]
    if len(counts) != len(pattern) or [len(each) for each in by_kind] != [1, 1]:
        raise reader.error(name, "must have one number for layers with a window, and one for the others")
    # Layers without a window then have no matrix for values: their keys, before they are rotated, are the values too.
    full = [layer for layer, has_window in enumerate(pattern) if not has_window]
    reuses = f"blk.{full[0]}.attn_v.weight" not in file.tensors
    (local,), (whole,) = by_kind
    return {"num_key_value_heads": local, "num_global_key_value_heads": whole, "attention_k_eq_v": reuses}


def _phi3(reader: ConfigReader, prefix: str, file: GgufFile, config: dict[str, Any]) -> dict[str, Any]:
    window = reader.take_count(f"{prefix}attention.sliding_window") or None
    original = config["rope_parameters"].get("original_max_position_embeddings")
    # The class has a default of its own for the second, which hides what the rope's entries say.
    return {"sliding_window": window} | ({} if original is None else {"original_max_position_embeddings": original})


def _gpt_oss(reader: ConfigReader, prefix: str, file: GgufFile, config: dict[str, Any]) -> dict[str, Any]:
    # The class rounds the ends of YaRN's ramp unless an entry forbids it, and files do not say that gpt-oss does not.
    rope = config["rope_parameters"]
    return {
        "sliding_window": reader.take_int(f"{prefix}attention.sliding_window"),
        "rope_parameters": rope | ({"truncate": False} if rope["rope_type"] == "yarn" else {}),
    }


def _granite(reader: ConfigReader, prefix: str, file: GgufFile, config: dict[str, Any]) -> dict[str, Any]:
    return {
        "attention_multiplier": reader.take_float(f"{prefix}attention.scale", config["head_dim"] ** -0.5),
        "embedding_multiplier": reader.take_float(f"{prefix}embedding_scale", 1.0),
        "residual_multiplier": reader.take_float(f"{prefix}residual_scale", 1.0),
        "logits_scaling": reader.take_float(f"{prefix}logit_scale", 1.0),
    }


def _mistral3(reader: ConfigReader, prefix: str, file: GgufFile, config: dict[str, Any]) -> dict[str, Any]:
    rope = config["rope_parameters"] | _magnitudes(reader, prefix, 1.0)
    if reader.take(f"{prefix}attention.temperature_scale") is not None:
        rope["llama_4_scaling_beta"] = reader.take_float(f"{prefix}attention.temperature_scale")
    return {"rope_parameters": rope}


def _magnitudes(reader: ConfigReader, prefix: str, unit: float) -> dict[str, float]:
    """Return what YaRN multiplies with; the file has one number, in ``unit``, for the two entries, which are equal in
    published models."""
    name = f"{prefix}rope.scaling.yarn_log_multiplier"
    if reader.take(name) is None:
        return {}
    size = round(reader.take_float(name) / unit, 6)
    return {"mscale": size, "mscale_all_dim": size}


def _deepseek2(reader: ConfigReader, prefix: str, file: GgufFile, config: dict[str, Any]) -> dict[str, Any]:
    rope = config["rope_parameters"] | _magnitudes(reader, prefix, 0.1)
    return _latent(reader, prefix, config) | {"rope_parameters": rope}


def _latent(reader: ConfigReader, prefix: str, config: dict[str, Any]) -> dict[str, Any]:
    """Return the sizes of attention over compressed vectors."""
    rotated = config["head_dim"]
    # Since the matrix to keys and values is stored as two, the first entries state the size of what is cached.
    key_size = reader.take_int(f"{prefix}attention.key_length_mla", reader.take_int(f"{prefix}attention.key_length"))
    value_size = reader.take_int(
        f"{prefix}attention.value_length_mla", reader.take_int(f"{prefix}attention.value_length")
    )
    query_rank = f"{prefix}attention.q_lora_rank"
    return {
        "q_lora_rank": None if reader.take(query_rank) is None else reader.take_int(query_rank),
        "kv_lora_rank": reader.take_int(f"{prefix}attention.kv_lora_rank"),
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": key_size - rotated,
        "v_head_dim": value_size,
        "num_key_value_heads": config["num_attention_heads"],
    }


def _layers_by_heads(
    reader: ConfigReader, prefix: str, config: dict[str, Any], attending: str, other: str
) -> list[str]:
    """Return the kind of each layer, of which those without KV heads are ``other``."""
    counts = reader.take(name := f"{prefix}attention.head_count_kv")
    if not isinstance(counts, list) or len(counts) != config["num_hidden_layers"]:
        raise reader.error(name, "must say of each layer how many KV heads it has, 0 where it keeps a state")
    return [attending if count else other for count in counts]


def _lfm2(reader: ConfigReader, prefix: str, file: GgufFile, config: dict[str, Any]) -> dict[str, Any]:
    return {
        "norm_eps": config["rms_norm_eps"],
        "conv_L_cache": reader.take_int(f"{prefix}shortconv.l_cache"),
        "conv_bias": "blk.0.shortconv.conv.bias" in file.tensors,
        "block_auto_adjust_ff_dim": False,  # the file has the size that followed
        "layer_types": _layers_by_heads(reader, prefix, config, "full_attention", "conv"),
    }


def _mamba_heads(reader: ConfigReader, prefix: str, multiple_of: int = 1) -> tuple[int, int]:
    """Return how many heads Mamba-2 has, and the size of all, which must be a multiple of another one, too."""
    heads, inner = reader.take_int(f"{prefix}ssm.time_step_rank"), reader.take_int(f"{prefix}ssm.inner_size")
    if inner % multiple_of or inner % heads:
        raise reader.error(f"{prefix}ssm.inner_size", f"must be a multiple of {multiple_of} and of {heads}")
    return heads, inner


def read_mamba2(reader: ConfigReader, prefix: str, file: GgufFile, config: dict[str, Any]) -> dict[str, Any]:
    """Return the entries of a model of nothing but Mamba-2: ``config``, which every model has, and its own."""
    for of_attention in ("feed_forward_length", "attention.head_count"):
        if reader.take_count(prefix + of_attention):
            raise reader.error(prefix + of_attention, "must be 0: no layer attends or has an MLP")
    heads, inner = _mamba_heads(reader, prefix, config["hidden_size"])
    return {name: value for name, value in config.items() if name != "rms_norm_eps"} | {
        "layer_norm_epsilon": config["rms_norm_eps"],
        "num_heads": heads,
        "head_dim": inner // heads,
        "expand": inner // config["hidden_size"],
        "n_groups": reader.take_int(f"{prefix}ssm.group_count", 1),
        "state_size": reader.take_int(f"{prefix}ssm.state_size"),
        "conv_kernel": reader.take_int(f"{prefix}ssm.conv_kernel"),
        "use_bias": "blk.0.ssm_in.bias" in file.tensors,
        "use_conv_bias": "blk.0.ssm_conv1d.bias" in file.tensors,
    }


def _nemotron(reader: ConfigReader, prefix: str, file: GgufFile, config: dict[str, Any]) -> dict[str, Any]:
    for unread in ("rope.dimension_count", "attention.layer_norm_epsilon"):
        reader.take(prefix + unread)  # heads do not rotate, and all norms are RMSNorm
    layers = _layers_by_heads(reader, prefix, config, "attention", "mamba")
    sizes = reader.take(name := f"{prefix}feed_forward_length")
    if not isinstance(sizes, list) or len(sizes) != len(layers):
        raise reader.error(name, "must say of each layer how large its MLP is, 0 where it has none")
    if any(size and layer == "attention" for size, layer in zip(sizes, layers, strict=True)):
        raise reader.error(name, "must be 0 for layers with KV heads: a layer has one part")
    layers = ["mlp" if size else layer for size, layer in zip(sizes, layers, strict=True)]
    first = {kind: f"blk.{layers.index(kind)}" if kind in layers else "" for kind in ("mamba", "attention", "mlp")}
    heads, inner = _mamba_heads(reader, prefix)
    return {
        "layers_block_type": layers,
        "layer_norm_epsilon": config["rms_norm_eps"],
        "attention_bias": f"{first['attention']}.attn_q.bias" in file.tensors,
        "mlp_bias": f"{first['mlp']}.ffn_up.bias" in file.tensors,
        "mamba_num_heads": heads,
        "mamba_head_dim": inner // heads,
        "n_groups": reader.take_int(f"{prefix}ssm.group_count", 1),
        "ssm_state_size": reader.take_int(f"{prefix}ssm.state_size"),
        "conv_kernel": reader.take_int(f"{prefix}ssm.conv_kernel"),
        "use_bias": f"{first['mamba']}.ssm_in.bias" in file.tensors,
        "use_conv_bias": f"{first['mamba']}.ssm_conv1d.bias" in file.tensors,
    }


def _falcon(reader: ConfigReader, prefix: str, file: GgufFile, config: dict[str, Any]) -> dict[str, Any]:
    # llama.cpp's converter multiplies the factors of the class into the matrices, so that none is left.
    heads, inner = _mamba_heads(reader, prefix)
    has_bias = "blk.0.ssm_in.bias" in file.tensors
    return {
        "mamba_d_ssm": inner,
        "mamba_n_heads": heads,
        "mamba_d_head": inner // heads,
        "mamba_n_groups": reader.take_int(f"{prefix}ssm.group_count", 1),
        "mamba_d_state": reader.take_int(f"{prefix}ssm.state_size"),
        "mamba_d_conv": reader.take_int(f"{prefix}ssm.conv_kernel"),
        "mamba_conv_bias": "blk.0.ssm_conv1d.bias" in file.tensors,
        "mamba_proj_bias": has_bias,
        "projectors_bias": has_bias,
        # Files do not say which comes first; llama.cpp gates, then normalizes, as all published models do.
        "mamba_rms_norm": "blk.0.ssm_norm.weight" in file.tensors,
        "mamba_norm_before_gate": False,
    }


def _kimi(reader: ConfigReader, prefix: str, file: GgufFile, config: dict[str, Any]) -> dict[str, Any]:
    reader.take(f"{prefix}attention.value_length")  # of a head that is neither kept nor computed
    return _latent(reader, prefix, config) | {
        "layer_types": _layers_by_heads(reader, prefix, config, "full_attention", "linear_attention"),
        "linear_num_heads": config["num_attention_heads"],
        "linear_head_dim": reader.take_int(f"{prefix}kda.head_dim"),
        "linear_conv_kernel_dim": reader.take_int(f"{prefix}ssm.conv_kernel"),
    }


def _granite_hybrid(reader: ConfigReader, prefix: str, file: GgufFile, config: dict[str, Any]) -> dict[str, Any]:
    heads, inner = _mamba_heads(reader, prefix, config["hidden_size"])
    layers = _layers_by_heads(reader, prefix, config, "attention", "mamba")
    first = next((layer for layer, kind in enumerate(layers) if kind == "mamba"), 0)
    return _granite(reader, prefix, file, config) | {
        "num_local_experts": 0,  # another number is that of ``read_experts``
        "shared_intermediate_size": reader.take_int(
            f"{prefix}expert_shared_feed_forward_length", config["intermediate_size"]
        ),
        # As llama.cpp has it: the entry that says how positions were stretched says whether heads rotate.
        "position_embedding_type": "rope" if reader.take_bool(f"{prefix}rope.scaling.finetuned", True) else "nope",
        "mamba_d_conv": reader.take_int(f"{prefix}ssm.conv_kernel"),
        "mamba_d_state": reader.take_int(f"{prefix}ssm.state_size"),
        "mamba_n_groups": reader.take_int(f"{prefix}ssm.group_count"),
        "mamba_n_heads": heads,
        "mamba_d_head": inner // heads,
        "mamba_expand": inner // config["hidden_size"],
        "mamba_conv_bias": f"blk.{first}.ssm_conv1d.bias" in file.tensors,
        "mamba_proj_bias": f"blk.{first}.ssm_in.bias" in file.tensors,
        "layer_types": layers,
    }


def _qwen_delta(reader: ConfigReader, prefix: str, file: GgufFile, config: dict[str, Any]) -> dict[str, Any]:
    heads, inner = reader.take_int(f"{prefix}ssm.time_step_rank"), reader.take_int(f"{prefix}ssm.inner_size")
    further = reader.take_count(f"{prefix}nextn_predict_layers")
    reader.take(f"{prefix}rope.dimension_sections")  # which of a token's three positions rotate: in a text all are one
    return {
        "num_hidden_layers": config["num_hidden_layers"] - further,
        "mtp_num_hidden_layers": further,
        "full_attention_interval": reader.take_int(f"{prefix}full_attention_interval", 4),
        "linear_conv_kernel_dim": reader.take_int(f"{prefix}ssm.conv_kernel"),
        "linear_key_head_dim": reader.take_int(f"{prefix}ssm.state_size"),
        "linear_num_key_heads": reader.take_int(f"{prefix}ssm.group_count"),
        "linear_num_value_heads": heads,
        "linear_value_head_dim": inner // heads,
    }


Further = Callable[[ConfigReader, str, GgufFile, dict[str, Any]], dict[str, Any]]
FURTHER: dict[str, Further] = {
    "gemma2.": _gemma2,
    "gemma3.": _gemma3,
    "gemma4.": _gemma4,
    "phi3.": _phi3,
    "gpt-oss.": _gpt_oss,
    "granite.": _granite,
    "mistral3.": _mistral3,
    "deepseek2.": _deepseek2,
    "lfm2.": _lfm2,
    "qwen35.": _qwen_delta,
    "qwen35moe.": _qwen_delta,
    "qwen3next.": _qwen_delta,
    "granitehybrid.": _granite_hybrid,
    "falcon-h1.": _falcon,
    "kimi-linear.": _kimi,
    "nemotron_h.": _nemotron,
}
"""What reads the entries that only some architectures have, and returns those of their classes beside the common."""


def has_experts(file: GgufFile) -> bool:
    """Return whether the model's layers choose some of many MLPs for each token."""
    return bool(file.metadata.get(f"{file.metadata['general.architecture']}.expert_count"))


_SOFTMAX, _SIGMOID = 1, 2
_WITH_EXPERTS = (
    *("llama.", "qwen2moe.", "qwen3moe.", "qwen35moe.", "qwen3next.", "gpt-oss.", "deepseek2.", "gemma4."),
    *("granitehybrid.", "kimi-linear."),
)


def read_experts(reader: ConfigReader, prefix: str, file: GgufFile) -> dict[str, Any]:
    """Return the entries of a ``config.json`` that describe experts; empty for a model without any.

    Raises ``ValueError`` naming an entry that is wrong or not supported.
    """
    if not has_experts(file):
        if prefix in ("qwen2moe.", "qwen3moe.", "qwen35moe.", "gpt-oss.", "kimi-linear."):
            raise reader.error(f"{prefix}expert_count", "must be above 0")
        for name in ("expert_count", "expert_used_count"):
            if reader.take(prefix + name, 0) != 0:
                raise reader.error(prefix + name, "must be 0 for a model without experts")
        return {}
    if prefix not in _WITH_EXPERTS:
        raise reader.error(f"{prefix}expert_count", "must be 0: experts of this architecture are not read")
    if prefix == "deepseek2.":
        return _read_deepseek(reader, prefix)
    if prefix == "kimi-linear.":
        return _read_kimi(reader, prefix)
    if prefix == "gpt-oss.":
        reader.take(f"{prefix}expert_gating_func")
    elif reader.take_int(f"{prefix}expert_gating_func", _SOFTMAX) != _SOFTMAX:
        raise reader.error(f"{prefix}expert_gating_func", f"must be {_SOFTMAX}, which is softmax")
    if prefix == "gemma4.":
        return {
            "enable_moe_block": True,
            "num_experts": reader.take_int(f"{prefix}expert_count"),
            "top_k_experts": reader.take_int(f"{prefix}expert_used_count"),
            "moe_intermediate_size": reader.take_int(f"{prefix}expert_feed_forward_length"),
        }
    count = {"num_experts_per_tok": reader.take_int(f"{prefix}expert_used_count")}
    number = reader.take_int(f"{prefix}expert_count")
    if prefix in ("gpt-oss.", "granitehybrid."):
        default = reader.take_int(f"{prefix}feed_forward_length") if prefix == "granitehybrid." else None
        size = reader.take_int(f"{prefix}expert_feed_forward_length", default)
        return count | {"num_local_experts": number, "intermediate_size": size}
    if prefix == "llama.":
        size = reader.take_int(f"{prefix}feed_forward_length")
        if reader.take_int(f"{prefix}expert_feed_forward_length", size) != size:
            raise reader.error(f"{prefix}expert_feed_forward_length", f"must be the feed_forward_length, {size}")
        return count | {"num_local_experts": number, "sliding_window": None}
    return count | {"num_experts": number} | _read_qwen(reader, prefix, file)


def _read_deepseek(reader: ConfigReader, prefix: str) -> dict[str, Any]:
    gating = reader.take_int(f"{prefix}expert_gating_func", _SOFTMAX)
    if gating not in (_SOFTMAX, _SIGMOID):
        raise reader.error(f"{prefix}expert_gating_func", "must be 1 or 2, which are softmax and sigmoid")
    count = reader.take_int(f"{prefix}expert_count")
    is_3 = gating == _SIGMOID
    # Files of before October 2025 leave out the groups. All published models with so many experts and sigmoids are
    # DeepSeek-V3 and those made from it.
    groups, used = (8, 4) if is_3 and count == 256 else (1, 1)
    groups = reader.take_int(f"{prefix}expert_group_count", groups)
    router = (
        {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}
        if is_3
        else {"scoring_func": "softmax", "topk_method": "greedy" if groups == 1 else "group_limited_greedy"}
    )
    return router | {
        "n_routed_experts": count,
        "num_experts_per_tok": reader.take_int(f"{prefix}expert_used_count"),
        "n_shared_experts": reader.take_count(f"{prefix}expert_shared_count"),
        "moe_intermediate_size": reader.take_int(f"{prefix}expert_feed_forward_length"),
        "first_k_dense_replace": reader.take_count(f"{prefix}leading_dense_block_count"),
        "routed_scaling_factor": reader.take_float(f"{prefix}expert_weights_scale", 1.0),
        "norm_topk_prob": reader.take_bool(f"{prefix}expert_weights_norm", False),
        "n_group": groups,
        "topk_group": reader.take_int(f"{prefix}expert_group_used_count", used),
    }


def _read_kimi(reader: ConfigReader, prefix: str) -> dict[str, Any]:
    if reader.take_int(f"{prefix}expert_gating_func", _SIGMOID) != _SIGMOID:
        raise reader.error(f"{prefix}expert_gating_func", f"must be {_SIGMOID}, which is sigmoid")
    # llama.cpp divides the weights of a token's experts by their sum whatever the file says.
    if not reader.take_bool(f"{prefix}expert_weights_norm", True):
        raise reader.error(f"{prefix}expert_weights_norm", "must be true")
    return {
        "num_experts": reader.take_int(f"{prefix}expert_count"),
        "num_experts_per_token": reader.take_int(f"{prefix}expert_used_count"),
        "num_shared_experts": reader.take_count(f"{prefix}expert_shared_count", 1),
        "moe_intermediate_size": reader.take_int(f"{prefix}expert_feed_forward_length"),
        "first_k_dense_replace": reader.take_count(f"{prefix}leading_dense_block_count"),
        "routed_scaling_factor": reader.take_float(f"{prefix}expert_weights_scale", 1.0),
        "num_expert_group": reader.take_int(f"{prefix}expert_group_count", 1),
        "topk_group": reader.take_int(f"{prefix}expert_group_used_count", 1),
        "moe_renormalize": True,
    }


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
    if prefix != "qwen3moe.":
        config["shared_expert_intermediate_size"] = reader.take_int(f"{prefix}expert_shared_feed_forward_length")
    return config
