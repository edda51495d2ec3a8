"""Reads what a configuration of transformers declares, in the terms of :class:`ModelConfig`."""

import math
from dataclasses import replace
from typing import Any

import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ...checkpoint.model_config import DtypeName, KVShape, ModelConfig, StateLayout
from ...checkpoint.rope_config import CONTEXT_ENTRIES, GROWING, longest_context
from .paged_attention import LayerRule, UnservableModel

_UNLIMITED = 2048
"""The context of a model whose configuration states none."""


def max_model_len(config: Any, wanted: int | None = None) -> int:
    """Return how many tokens prompt and output may have together, in an engine whose options allow ``wanted``; None:
    they state nothing. More than the model was trained for needs :func:`fix_ropes`."""
    text = config.get_text_config(decoder=True)
    return longest_context({name: getattr(text, name, None) for name in CONTEXT_ENTRIES}, _UNLIMITED, wanted)


def fix_ropes(model: Any, length: int) -> None:
    """Give the rotary embeddings of ``model`` that change with the longest sequence of a batch the frequencies of one
    of ``length`` tokens, for good."""
    for module in model.modules():
        kind = getattr(module, "rope_type", None)
        if kind not in GROWING or not isinstance(getattr(module, "inv_freq", None), torch.Tensor):
            continue
        compute = ROPE_INIT_FUNCTIONS["dynamic" if kind == "dynamic" else "longrope"]
        module.inv_freq, module.attention_scaling = compute(module.config, module.inv_freq.device, seq_len=length)
        module.rope_type = "default"


def declared_config(
    config: Any, dtype: DtypeName, quantization: str | None, max_length: int | None = None
) -> ModelConfig:
    """Describe a model by its configuration alone, without what each layer asks of attention. ``max_length``: what the
    engine's options allow, as in :func:`max_model_len`."""
    text = config.get_text_config(decoder=True)
    num_heads = _number(text, "num_attention_heads")
    hidden_size = _number(text, "hidden_size")
    return ModelConfig(
        family="transformers",
        dtype_name=dtype,
        vocab_size=_number(text, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_number(text, "intermediate_size"),
        num_layers=_number(text, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=_number(text, "num_key_value_heads") or num_heads,
        head_size=_number(text, "head_dim") or hidden_size // max(num_heads, 1),
        max_model_len=max_model_len(config, max_length),
        norm_eps=0.0,
        hidden_act="",
        tie_word_embeddings=bool(getattr(config, "tie_word_embeddings", False)),
        attention_scales=(),
        sliding_windows=(),
        quantization=quantization,
    )


def complete(
    declared: ModelConfig,
    text: Any,
    rules: list[LayerRule],
    states: StateLayout | None = None,
    num_layers: int | None = None,
) -> ModelConfig:
    """Return the configuration with what the layers' ``rules`` show, and what they keep. ``text`` is transformers'
    configuration. ``num_layers``: those of this stage; None: all.

    Raises :class:`UnservableModel` if the layers cannot share one KV cache.
    """
    if states is not None and not rules:
        return _without_attention(declared, states)
    if num_layers is None:
        num_layers = _number(text, "num_hidden_layers")
    _check_layers(num_layers, rules, keeps_states=states is not None)
    _check_windows(text, rules, declared.max_model_len)
    shapes = _shapes(rules)
    widest = max(shapes, key=math.prod)
    if any(math.prod(widest) % math.prod(shape) for shape in shapes):
        raise UnservableModel(
            f"has layers whose keys are not whole parts of each other, (heads, size): {', '.join(map(str, shapes))}"
        )
    return replace(
        declared,
        num_layers=len(rules),
        num_heads=rules[0].num_heads,
        num_kv_heads=widest.num_heads,
        head_size=widest.head_size,
        kv_shapes=shapes if len(set(shapes)) > 1 else (),
        attention_scales=tuple(rule.scores.scale for rule in rules),
        sliding_windows=tuple(rule.scores.sliding_window for rule in rules),
        kv_sources=tuple(layer if rule.source is None else rule.source for layer, rule in enumerate(rules)),
        states=states,
    )


def _without_attention(declared: ModelConfig, states: StateLayout) -> ModelConfig:
    """Return the configuration of a model whose layers keep states only. Its KV blocks hold the smallest rows of one
    layer that no token ever writes: they name prefixes, by which states are found."""
    return replace(
        declared,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_size=16,
        attention_scales=(1.0,),
        sliding_windows=(None,),
        kv_sources=(0,),
        states=states,
    )


def _shapes(rules: list[LayerRule]) -> tuple[KVShape, ...]:
    """Return the shape of each layer's keys. If all have equally many heads, all have the largest size."""
    sizes = [max(rule.head_size, rule.value_size) for rule in rules]
    heads = [rule.num_kv_heads for rule in rules]
    if len(set(heads)) == 1:
        return tuple(KVShape(count, max(sizes)) for count in heads)
    return tuple(KVShape(count, -(-size // 16) * 16) for count, size in zip(heads, sizes, strict=True))


def _number(text: Any, name: str) -> int:
    try:
        value = getattr(text, name, None)
    except RuntimeError:  # the layers differ; their rules show how
        return 0
    return value if isinstance(value, int) else 0


def _check_layers(num_layers: int, rules: list[LayerRule], *, keeps_states: bool) -> None:
    if not rules:
        raise UnservableModel("computes attention or state by itself, not through transformers' AttentionInterface")
    if len(rules) != num_layers and not keeps_states:
        raise UnservableModel(
            f"attends {len(rules)} times in {num_layers} layers: the others keep a state of their own"
        )
    if len({id(rule.module) for rule in rules}) != len(rules):
        raise UnservableModel("attends more than once in a layer")
    heads = sorted({rule.num_heads for rule in rules})
    if len(heads) > 1:
        raise UnservableModel(f"has layers with different numbers of query heads: {', '.join(map(str, heads))}")


def _check_windows(text: Any, rules: list[LayerRule], max_length: int) -> None:
    """Compare the windows with the declared ones."""
    kinds = getattr(text, "layer_types", None)
    window = getattr(text, "sliding_window", None)
    if not isinstance(kinds, list) or len(kinds) != len(rules):
        return
    for layer, (kind, rule) in enumerate(zip(kinds, rules, strict=True)):
        found = rule.scores.sliding_window
        if kind == "full_attention" and found is not None:
            raise UnservableModel(f"declares full attention in layer {layer} and computes a window of {found}")
        if kind == "sliding_attention" and found is None and window and window < max_length:
            raise UnservableModel(f"declares a window of {window} in layer {layer} and computes full attention")
