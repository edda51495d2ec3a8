"""Records what each layer of a transformers model asks of attention, in one forward pass of two tokens."""

from typing import Any

import torch
from torch import Tensor, nn

from ...attention.score_rule import ScoreRule
from .layer_rule import LayerRule
from .mask_reader import UnreadableMask, window_of
from .paged_attention import PROBING, AttentionCall, bind

_KNOWN = {"softcap", "s_aux", "position_ids", "cache_position"}
"""Tensors and numbers among the options that are used, or that change nothing."""
NUM_PROBED = 2
"""The tokens of the pass."""


class UnservableModel(ValueError):
    """Raised for a model that paged attention cannot serve; the message completes "the model …"."""


class AttentionRecorder:
    """Fulfils ``AttentionOwner``: records the calls, and answers with zeros."""

    def __init__(self, max_model_len: int) -> None:
        self.rules: list[LayerRule] = []
        self._max_model_len = max_model_len
        self._keys: list[Tensor] = []

    def attend(self, call: AttentionCall) -> Tensor:
        module, query, key, value, mask, scaling, options = call
        _check_options(module, options)
        if key.shape[2] != query.shape[2]:
            raise UnservableModel(f"attends to {key.shape[2]} keys with {query.shape[2]} queries")
        try:
            # Configurations do not say reliably which layers have a window: some classes pass one to attention, some
            # only build a mask, and Phi-3.5-MoE was wrong without an error.
            window = window_of(mask, self._max_model_len)
        except UnreadableMask:
            raise UnservableModel("changes its attention mask (as ALiBi, chunks or documents do)") from None
        scale = query.shape[3] ** -0.5 if scaling is None else float(scaling)
        scores = ScoreRule(scale, window, options.get("softcap"), _sinks(options))
        sizes = query.shape[1], key.shape[1], query.shape[3], value.shape[3]
        self.rules.append(LayerRule(module, *sizes, scores, self._source_of(key, window)))
        self._keys.append(key)
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3])

    def _source_of(self, key: Tensor, window: int | None) -> int | None:
        """Return the first layer that passed this very tensor, if it has the same window."""
        for layer, earlier in enumerate(self._keys):
            # Gemma 3n's last layers attend to keys of an earlier one. The same tensor object says so for any class, and
            # the layer then writes nothing.
            if earlier is key and self.rules[layer].scores.sliding_window == window:
                return layer
        return None


def _check_options(module: nn.Module, options: dict[str, Any]) -> None:
    if not getattr(module, "is_causal", True) or options.get("is_causal") is False:
        raise UnservableModel("attends to later tokens")
    unknown = sorted(name for name in options.keys() - _KNOWN if isinstance(options[name], Tensor))
    if unknown:
        raise UnservableModel(f"passes {', '.join(unknown)} to attention")


def _sinks(options: dict[str, Any]) -> Tensor | None:
    sinks = options.get("s_aux")
    return sinks.detach().float() if isinstance(sinks, Tensor) else None


def record(body: nn.Module, model: Any, max_model_len: int, device: torch.device) -> list[LayerRule]:
    """Return the rules of all attention calls of a pass of ``body``, the inner part of ``model``.

    Raises :class:`UnservableModel`.
    """
    if getattr(model, "_is_stateful", False):
        raise UnservableModel("keeps a state between tokens, as recurrent layers do")
    recorder = AttentionRecorder(max_model_len)
    bind(model, recorder)
    model.set_attn_implementation(PROBING)
    ids = torch.zeros(1, NUM_PROBED, dtype=torch.int64, device=device)
    body(input_ids=ids, position_ids=torch.arange(NUM_PROBED, device=device)[None], use_cache=False)
    return recorder.rules
