"""Finds out which positions a mask of transformers lets a token see."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionMaskInterface

from .paged_attention import PROBING

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
