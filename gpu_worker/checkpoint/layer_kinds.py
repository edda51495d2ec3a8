"""Reads what differs between the layers of one decoder: windows, rotations, and experts of which a token uses some."""

import math
from dataclasses import replace
from typing import Any

from .files.architectures import ACTIVATION_NAMES, DECODERS
from .files.config_reader import ConfigReader
from .model_config import ExpertSwitches, RouterSwitches
from .rope_config import (
    LongRopeScaling,
    QueryScaling,
    RopeConfig,
    YarnScaling,
    no_rotation,
    read_rope,
    read_rope_by_kind,
    with_context,
)

_FULL, _SLIDING, _CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
_GPT_OSS_YARN = YarnScaling(32.0, 4096, 32.0, 1.0, 0.1 * math.log(32.0) + 1.0, truncate=False)
"""How gpt-oss's class stretches its positions if the configuration says nothing."""


def read_ropes(
    reader: ConfigReader, family: str, head_size: int, num_layers: int, max_model_len: int | None
) -> tuple[RopeConfig, ...]:
    """Return how each layer rotates its heads, in an engine whose requests have at most ``max_model_len`` tokens;
    None: as many as the model was trained with.

    Raises ``ValueError`` naming the entry that is not supported.
    """
    theta = DECODERS[family].rope_theta
    max_position = reader.take_int("max_position_embeddings")
    if family == "gemma3":
        by_kind = read_rope_by_kind(reader, head_size, max_position, {_FULL: theta, _SLIDING: 10_000.0})
        chosen = {kind: with_context(rope, max_model_len or 1) for kind, rope in by_kind.items()}
        return tuple(chosen[kind] for kind in _gemma_kinds(reader, family, num_layers))
    rope = read_rope(reader, head_size, max_position, theta, DECODERS[family].rotated_share)
    if family in ("nemotron_h", "kimi_linear") or (
        family == "granitemoehybrid" and reader.take("position_embedding_type") != "rope"
    ):
        rope = no_rotation(head_size)
    if family == "phi3" and rope.scaling != 1.0 and not isinstance(rope.scaling, LongRopeScaling):
        raise reader.unsupported(
            "rope_scaling" if reader.take("rope_scaling") else "rope_parameters", "is not supported"
        )
    rope = with_context(rope, max_model_len or 1)
    if family == "gpt_oss" and not (reader.take("rope_scaling") or reader.take("rope_parameters")):
        rope = replace(rope, scaling=_GPT_OSS_YARN)
    if family == "muse_glimmer":
        unrotated = no_rotation(head_size)
        return tuple(rope if rotates else unrotated for rotates in _muse_rotating(reader, num_layers))
    if family in ("smollm3", "llama4"):
        longest = min(max_model_len or max_position, max_position)
        unrotated = _scaled_queries(reader, head_size, longest) if family == "llama4" else no_rotation(head_size)
        return tuple(rope if rotates else unrotated for rotates in _rotating(reader, num_layers))
    return (rope,) * num_layers


def _scaled_queries(reader: ConfigReader, head_size: int, longest: int) -> RopeConfig:
    """Return what Llama 4 does in layers that do not rotate heads, in requests of at most ``longest`` tokens."""
    is_on = reader.take("attn_temperature_tuning", True)  # true, or 4 as in the first published files
    if not isinstance(is_on, int):
        raise reader.error("attn_temperature_tuning", "must be true, false or a number")
    period, factor = reader.take_int("floor_scale", 8192), reader.take_float("attn_scale", 0.1)
    if not is_on or longest < period:
        return no_rotation(head_size)
    return RopeConfig(head_size, scaling=QueryScaling(factor, period))


def read_chunks(
    reader: ConfigReader, num_layers: int, ropes: tuple[RopeConfig, ...], longest: int
) -> tuple[int | None, ...]:
    """Return in which chunks of positions each layer of Llama 4 attends; None: in none, or in one that ``longest``
    tokens do not fill. Raises ``ValueError`` as :func:`read_ropes`."""
    chunk = None
    if reader.take("attention_chunk_size", 8192) is not None:
        chunk = reader.take_int("attention_chunk_size", 8192)
    kinds = _layer_types(reader, num_layers) or [_CHUNKED if rope.rotates else _FULL for rope in ropes]
    if any(kind not in (_FULL, _CHUNKED) for kind in kinds):
        raise reader.error("layer_types", "may only hold full_attention and chunked_attention")
    return tuple(chunk if kind == _CHUNKED and chunk is not None and chunk < longest else None for kind in kinds)


def read_windows(reader: ConfigReader, family: str, num_layers: int, max_model_len: int) -> tuple[int | None, ...]:
    """Return how many positions a token of each layer sees; None: all. Raises ``ValueError`` as :func:`read_ropes`."""
    match family:
        case "llama" | "olmo2" | "deepseek_v2" | "deepseek_v3":
            _check_full_attention(reader, num_layers)
            return (None,) * num_layers
        case "gemma2" | "gemma3":
            window = _window(reader, 4096)
            windows = [window if kind == _SLIDING else None for kind in _gemma_kinds(reader, family, num_layers)]
        case "gpt_oss":
            window = _window(reader, 128)
            windows = [window if kind == _SLIDING else None for kind in _gemma_kinds(reader, family, num_layers)]
        case "smollm3":
            windows = _smollm_windows(reader, num_layers)
        case "qwen2_moe" | "qwen3_moe":
            return _no_windows(reader, num_layers)
        case "muse_glimmer":
            window = _window(reader, 2048)
            default = [_FULL if (num_layers - 1 - layer) % 4 == 0 else _SLIDING for layer in range(num_layers)]
            windows = [window if kind == _SLIDING else None for kind in _known_kinds(reader, num_layers) or default]
        case (
            "llama4"
            | "qwen3_next"
            | "qwen3_5"
            | "qwen3_5_moe"
            | "granitemoehybrid"
            | "lfm2"
            | "nemotron_h"
            | "falcon_h1"
            | "kimi_linear"
        ):
            return (None,) * num_layers
        case "mistral" | "mixtral" | "phi3":
            window = _window(reader, 4096 if family == "mistral" else None)
            windows = [window] * num_layers
            if window is None or window >= max_model_len:
                _check_full_attention(reader, num_layers)
        case _:
            windows = _qwen_windows(reader, num_layers)
    return tuple(size if size is not None and size < max_model_len else None for size in windows)


def _window(reader: ConfigReader, default: int | None) -> int | None:
    return None if reader.take("sliding_window", default) is None else reader.take_int("sliding_window", default)


def _gemma_kinds(reader: ConfigReader, family: str, num_layers: int) -> list[Any]:
    """Return each layer's kind. Without a list, every second (Gemma 2, gpt-oss) or n-th layer has no window."""
    step = 2 if family in ("gemma2", "gpt_oss") else reader.take_int("sliding_window_pattern", 6)
    default = [_FULL if (layer + 1) % step == 0 else _SLIDING for layer in range(num_layers)]
    return _known_kinds(reader, num_layers) or default


def _rotating(reader: ConfigReader, num_layers: int) -> list[bool]:
    """Return which layers rotate their heads. Without a list, every n-th does not (SmolLM3)."""
    step, listed = reader.take_int("no_rope_layer_interval", 4), reader.take("no_rope_layers")
    if not listed:  # as published, Llama 4 has an empty list
        return [(layer + 1) % step != 0 for layer in range(num_layers)]
    if not isinstance(listed, list) or len(listed) < num_layers or not all(entry in (0, 1) for entry in listed):
        raise reader.error("no_rope_layers", f"must be a list of num_hidden_layers = {num_layers} zeros and ones")
    return [bool(entry) for entry in listed[:num_layers]]


def _muse_rotating(reader: ConfigReader, num_layers: int) -> list[bool]:
    """Return which layers rotate their heads. Without a list, every fourth from the last one on does not."""
    listed = reader.take("layer_rope_theta")
    if listed is None:
        return [(num_layers - 1 - layer) % 4 != 0 for layer in range(num_layers)]
    is_list = isinstance(listed, list) and len(listed) >= num_layers
    if not is_list or not all(type(theta) in (int, float) for theta in listed):
        raise reader.error("layer_rope_theta", f"must be a list of num_hidden_layers = {num_layers} numbers")
    return [theta != 0 for theta in listed[:num_layers]]  # whatever it is: the class uses that of all layers


def _smollm_windows(reader: ConfigReader, num_layers: int) -> list[int | None]:
    """Return each layer's window. Without a list of kinds, the layers that do not rotate have it."""
    use_window, window = reader.take_bool("use_sliding_window", False), _window(reader, None)
    reader.take("max_window_layers")  # published files hold it; the class does not read it
    window = window if use_window else None
    kinds = _known_kinds(reader, num_layers)
    if kinds is None:
        return [None if rotates else window for rotates in _rotating(reader, num_layers)]
    return [window if kind == _SLIDING else None for kind in kinds]


def _qwen_windows(reader: ConfigReader, num_layers: int) -> list[int | None]:
    """Return each layer's window. Qwen2 and Qwen3 name each layer's kind, or (older) the first layer with a window."""
    window = _window(reader, 4096)
    use_window, first = reader.take_bool("use_sliding_window", False), reader.take("max_window_layers", 28)
    if type(first) is not int:
        raise reader.error("max_window_layers", "must be an integer")
    window = window if use_window else None
    kinds = _known_kinds(reader, num_layers)
    if kinds is None:
        return [window if layer >= first else None for layer in range(num_layers)]
    if window is None and _SLIDING in kinds:
        raise reader.error("layer_types", "has sliding_attention, but use_sliding_window is off")
    return [window if kind == _SLIDING else None for kind in kinds]


def _no_windows(reader: ConfigReader, num_layers: int) -> tuple[None, ...]:
    """Check that the windows of Qwen's models with experts are off, as they are in every published one."""
    if reader.take_bool("use_sliding_window", False):
        raise reader.unsupported("use_sliding_window", "must be false")
    for unused in ("sliding_window", "max_window_layers"):
        reader.take(unused)
    _check_full_attention(reader, num_layers)
    return (None,) * num_layers


def _known_kinds(reader: ConfigReader, num_layers: int) -> list[Any] | None:
    kinds = _layer_types(reader, num_layers)
    if any(kind not in (_FULL, _SLIDING) for kind in kinds or ()):
        raise reader.error("layer_types", "may only hold full_attention and sliding_attention")
    return kinds


def _layer_types(reader: ConfigReader, num_layers: int) -> list[Any] | None:
    kinds = reader.take("layer_types")
    if kinds is not None and (not isinstance(kinds, list) or len(kinds) != num_layers):
        raise reader.error("layer_types", f"must be a list of num_hidden_layers = {num_layers} entries")
    return kinds


def _check_full_attention(reader: ConfigReader, num_layers: int) -> None:
    """Check that every layer attends to all positions, in a model whose class has no other kind of layer."""
    if any(kind != _FULL for kind in _layer_types(reader, num_layers) or ()):
        raise reader.error("layer_types", "may only hold full_attention")


def read_experts(reader: ConfigReader, family: str, num_layers: int, intermediate_size: int) -> ExpertSwitches | None:
    """Return the experts of ``family``; None: it has none. Raises ``ValueError`` naming an entry that is wrong."""
    if family in ("deepseek_v2", "deepseek_v3"):
        return _read_deepseek(reader, family == "deepseek_v3", num_layers)
    if family == "granitemoehybrid":
        return _read_granite(reader, num_layers, intermediate_size)
    if family == "kimi_linear":
        return _read_kimi(reader, num_layers)
    if family not in ("mixtral", "qwen2_moe", "qwen3_moe", "qwen3_next", "qwen3_5_moe", "gpt_oss", "llama4"):
        return None
    for training_only in ("router_aux_loss_coef", "router_jitter_noise"):
        reader.take(training_only)
    if family == "mixtral":
        experts = ExpertSwitches(
            count=reader.take_int("num_local_experts", 8),
            per_token=reader.take_int("num_experts_per_tok", 2),
            intermediate_size=intermediate_size,
            normalizes_weights=True,
            layers=(True,) * num_layers,
        )
    elif family == "gpt_oss":
        for unread in ("experts_per_token", "initial_context_length"):
            reader.take(unread)  # published files hold them; the class does not read them
        experts = ExpertSwitches(
            count=reader.take_int("num_local_experts", 128),
            per_token=reader.take_int("num_experts_per_tok", 4),
            intermediate_size=intermediate_size,
            normalizes_weights=True,
            layers=(True,) * num_layers,
        )
    elif family == "llama4":
        experts = _read_llama4(reader, num_layers, intermediate_size)
    else:
        experts = _read_qwen(reader, family, num_layers)
    _check_per_token(reader, experts.per_token, experts.count)
    return experts


def _check_per_token(reader: ConfigReader, per_token: int, count: int) -> None:
    if per_token > count:
        raise reader.error("num_experts_per_tok", f"must be at most the number of experts, {count}")


def _read_qwen(reader: ConfigReader, family: str, num_layers: int) -> ExpertSwitches:
    if family in ("qwen3_next", "qwen3_5_moe"):
        return _read_shared_qwen(reader, family == "qwen3_next", num_layers)
    is_2, older_count = family == "qwen2_moe", reader.take("num_local_experts")
    count = reader.take_int("num_experts") if older_count is None else reader.take_int("num_local_experts")
    step, dense = reader.take_int("decoder_sparse_step", 1), reader.take("mlp_only_layers") or []
    if not isinstance(dense, list) or any(type(layer) is not int for layer in dense):
        raise reader.error("mlp_only_layers", "must be a list of layer numbers")
    return ExpertSwitches(
        count=count,
        per_token=reader.take_int("num_experts_per_tok", 4 if is_2 else 8),
        intermediate_size=reader.take_int("moe_intermediate_size", 1408 if is_2 else 768),
        shared_size=reader.take_int("shared_expert_intermediate_size", 5632) if is_2 else 0,
        normalizes_weights=reader.take_bool("norm_topk_prob", False),
        layers=tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(num_layers)),
    )


def _read_shared_qwen(reader: ConfigReader, is_next: bool, num_layers: int) -> ExpertSwitches:
    """Read the experts of Qwen3-Next and Qwen3.5, beside a shared one."""
    step, dense = reader.take_int("decoder_sparse_step", 1), reader.take("mlp_only_layers") or []
    if not isinstance(dense, list) or any(type(layer) is not int for layer in dense):
        raise reader.error("mlp_only_layers", "must be a list of layer numbers")
    normalizes = reader.take_bool("norm_topk_prob", True)
    if not is_next and (not normalizes or dense or step > 1):
        raise reader.unsupported("norm_topk_prob", "must be true, and every layer must have experts", is_known=False)
    return ExpertSwitches(
        count=reader.take_int("num_experts", 512 if is_next else 256),
        per_token=reader.take_int("num_experts_per_tok", 10 if is_next else 8),
        intermediate_size=reader.take_int("moe_intermediate_size", 512),
        shared_size=reader.take_int("shared_expert_intermediate_size", 512),
        normalizes_weights=normalizes,
        layers=tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(num_layers)),
    )


def _read_granite(reader: ConfigReader, num_layers: int, shared_size: int) -> ExpertSwitches | None:
    """Read the experts of Granite 4, beside an MLP for every token."""
    if not (count := reader.take_count("num_local_experts", 8)):
        return None
    per_token = reader.take_int("num_experts_per_tok", 2)
    _check_per_token(reader, per_token, count)
    return ExpertSwitches(
        count=count,
        per_token=per_token,
        intermediate_size=reader.take_int("intermediate_size", 11008),
        shared_size=shared_size,
        normalizes_weights=True,
        layers=(True,) * num_layers,
    )


def _read_kimi(reader: ConfigReader, num_layers: int) -> ExpertSwitches:
    """Read the experts of Kimi-Linear, under DeepSeek's names of their entries."""
    for unread in ("moe_layer_freq", "use_grouped_topk"):
        reader.take(unread)  # published files hold them; the class does not read them
    if reader.take("moe_router_activation_func", "sigmoid") != "sigmoid":
        raise reader.unsupported("moe_router_activation_func", "must be sigmoid", is_known=False)
    kinds, first = reader.take("mlp_layer_types"), reader.take_count("first_k_dense_replace", 1)
    if kinds is not None and (not isinstance(kinds, list) or len(kinds) != num_layers):
        raise reader.error("mlp_layer_types", f"must be a list of num_hidden_layers = {num_layers} entries")
    size, per_token = reader.take_int("moe_intermediate_size", 1024), reader.take_int("num_experts_per_tok", 8)
    count = reader.take_int("n_routed_experts", 256)
    _check_per_token(reader, per_token, count)
    layers = tuple(layer >= first if kinds is None else kinds[layer] == "sparse" for layer in range(num_layers))
    router = RouterSwitches(
        num_groups=reader.take_int("n_group", 1),
        groups_per_token=reader.take_int("topk_group", 1),
        has_independent_scores=True,
        scale=reader.take_float("routed_scaling_factor", 2.446),
    )
    _check_groups(reader, router, count, per_token)
    return ExpertSwitches(
        count=count,
        per_token=per_token,
        intermediate_size=size,
        shared_size=size * reader.take_count("n_shared_experts", 1),
        normalizes_weights=reader.take_bool("norm_topk_prob", True),
        router=router,
        layers=layers,
    )


def _read_llama4(reader: ConfigReader, num_layers: int, intermediate_size: int) -> ExpertSwitches:
    """Read the experts of Llama 4, of which each token has one beside the shared one."""
    reader.take("for_llm_compressor")  # published files hold it; the class does not read it
    step, listed = reader.take_int("interleave_moe_layer_step", 1), reader.take("moe_layers")
    if listed is not None and (not isinstance(listed, list) or any(type(layer) is not int for layer in listed)):
        raise reader.error("moe_layers", "must be a list of layer numbers")
    if reader.take_int("num_experts_per_tok", 1) != 1:
        raise reader.unsupported("num_experts_per_tok", "must be 1")
    with_experts = range(step - 1, num_layers, step) if listed is None else listed
    return ExpertSwitches(
        count=reader.take_int("num_local_experts", 16),
        per_token=1,
        intermediate_size=intermediate_size,
        shared_size=intermediate_size,
        scales_inputs=True,
        layers=tuple(layer in with_experts for layer in range(num_layers)),
    )


def _read_deepseek(reader: ConfigReader, is_3: bool, num_layers: int) -> ExpertSwitches | None:
    """Read the experts of DeepSeek-V2 and V3, of which published files state more than the classes read."""
    for unused in ("aux_loss_alpha", "seq_aux", "ep_size"):
        reader.take(unused)  # of training and of a layout on devices
    first, step = reader.take_count("first_k_dense_replace", 3 if is_3 else 0), reader.take_int("moe_layer_freq", 1)
    size = reader.take_int("moe_intermediate_size", 2048 if is_3 else 1407)
    count = reader.take_count("n_routed_experts", 256 if is_3 else 64)
    num_shared = reader.take_count("n_shared_experts", 1 if is_3 else 2)
    per_token = reader.take_int("num_experts_per_tok", 8 if is_3 else None)
    normalizes, router = reader.take_bool("norm_topk_prob", is_3), _read_router(reader, is_3)
    if not count:
        return None
    _check_groups(reader, router, count, per_token)
    if normalizes and not is_3:
        raise reader.error("norm_topk_prob", "must be false: transformers' class does not read it")
    return ExpertSwitches(
        count=count,
        per_token=per_token,
        intermediate_size=size,
        shared_size=size * num_shared,
        normalizes_weights=normalizes,
        router=router,
        layers=tuple(layer >= first and layer % step == 0 for layer in range(num_layers)),
    )


def _check_groups(reader: ConfigReader, router: RouterSwitches, count: int, per_token: int) -> None:
    if router.groups_per_token > router.num_groups:
        raise reader.error("topk_group", f"must be at most n_group, {router.num_groups}")
    in_group = count // router.num_groups
    if count % router.num_groups or in_group < 2 or per_token > in_group * router.groups_per_token:
        raise reader.error(
            "n_group", f"must divide {count} experts, of which topk_group groups hold num_experts_per_tok"
        )


def _read_router(reader: ConfigReader, is_3: bool) -> RouterSwitches:
    scoring = reader.take("scoring_func", wanted := "sigmoid" if is_3 else "softmax")
    if scoring != wanted:
        raise reader.unsupported("scoring_func", f"must be {wanted}", is_known=False)
    methods = ("noaux_tc",) if is_3 else ("greedy", "group_limited_greedy")
    method = reader.take("topk_method", methods[0])
    if method not in methods:
        raise reader.unsupported("topk_method", f"must be {' or '.join(methods)}", is_known=False)
    for name in ("n_group", "topk_group"):
        reader.take(name)  # files of greedy routers state them too
    return RouterSwitches(
        num_groups=1 if method == "greedy" else reader.take_int("n_group", 8 if is_3 else None),
        groups_per_token=1 if method == "greedy" else reader.take_int("topk_group", 4 if is_3 else None),
        has_independent_scores=is_3,
        scale=reader.take_float("routed_scaling_factor", 2.5 if is_3 else 1.0),
    )


def read_activation(reader: ConfigReader, name: str, default: str) -> str:
    """Return the name of an activation function, an entry or its default. Raises ``ValueError``."""
    activation = reader.take(name) or default
    if activation not in ACTIVATION_NAMES:
        raise reader.unsupported(name, f"is not supported: must be one of {', '.join(ACTIVATION_NAMES)}")
    return str(activation)
