"""Records what each layer of a transformers model asks of attention, in one forward pass of two tokens."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionMaskInterface

from ...attention.attention_backend import ScoreRule
from .paged_attention import PROBING, AttentionCall, LayerRule, bind

_FARTHEST = 1 << 20
"""A model's masks are read for tokens up to this position."""

MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class UnreadableMask(Exception):
    """Raised for a mask that is neither causal nor a sliding window."""


class FunctionMask(Tensor):
    """Stands for a mask in a probing pass, and holds the function that decides what a token sees.

    A slice holds it too; what any other operation returns is a plain tensor, whose meaning is unknown.
    """

    function: MaskFunction

    @classmethod
    def make(cls, function: MaskFunction, num_queries: int, num_keys: int) -> "FunctionMask":
        mask = torch.zeros(1, 1, num_queries, num_keys).as_subclass(cls)
        mask.function = function
        return mask

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            result = function(*args, **(kwargs or {}))
        if function is Tensor.__getitem__ and isinstance(args[0], FunctionMask):
            result = result.as_subclass(cls)
            result.function = args[0].function
        return result


def window_of(mask: Tensor | None, max_model_len: int) -> int | None:
    """Return how many positions a token sees under a probe's mask, itself included; None: all.

    Raises :class:`UnreadableMask` if the mask was changed, or if a token sees other positions than the last ones.
    """
    if mask is None:
        return None
    if not isinstance(mask, FunctionMask):
        raise UnreadableMask
    last = min(max_model_len, _FARTHEST) - 1
    # Three positions: a window sees equally many from each, a mask by chunks or documents does not.
    sizes = {query: _num_seen(mask.function, query) for query in (last, last * 2 // 3, last // 2)}
    window = max(sizes.values())
    if any(size != min(window, query + 1) for query, size in sizes.items()):
        raise UnreadableMask
    return None if window > last else window


def _num_seen(function: MaskFunction, query: int) -> int:
    zero = torch.tensor(0)
    try:
        seen = function(zero, zero, torch.tensor(query), torch.arange(query + 1)).expand(query + 1)
    except IndexError:  # it looks up the token at the position, of which the probe has few
        raise UnreadableMask from None
    size = int(seen.sum())
    if not size or not seen[query + 1 - size :].all():
        raise UnreadableMask
    return size


def _make_mask(mask_function: MaskFunction, q_length: int, kv_length: int, **_: Any) -> Tensor:
    return FunctionMask.make(mask_function, q_length, kv_length)


AttentionMaskInterface.register(PROBING, _make_mask)


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
