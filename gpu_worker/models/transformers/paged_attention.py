"""Computes the attention of transformers' modules over the paged KV cache.

transformers calls the registered function with the queries, keys and values of one layer, [1, heads, T, size]: the
tokens of all requests in a row. The function finds the step through an attribute of the calling module, so that models
share no state.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from ...attention.attention_backend import AttentionPlan, KVCache, ScoreRule


@dataclass(frozen=True, slots=True)
class LayerRule:
    """Holds what the probe recorded of one call."""

    module: nn.Module
    num_heads: int
    num_kv_heads: int
    head_size: int
    """The size of a query and a key."""
    value_size: int
    scores: ScoreRule
    source: int | None = None
    """The earlier layer whose keys and values the call passes, with the same window; None: they are its own."""


SERVING = "tokenloom"
"""The attention implementation of steps. transformers makes no mask for it, because it has no mask function."""
PROBING = "tokenloom_probe"
"""The attention implementation of the pass that records what each layer asks for; its masks say what a token sees."""

# An attribute of each module, because transformers keeps attention functions in one registry of the process: models
# that run side by side would share a step that is stored there.
_OWNER = "tokenloom_attention"


class AttentionCall(NamedTuple):
    """Holds what transformers passes to the attention function for one layer."""

    module: nn.Module
    query: Tensor
    """[1, heads, T, size], as the keys and values are."""
    key: Tensor
    value: Tensor
    mask: Tensor | None
    scaling: float | None
    """The factor on query times key; None: 1 / sqrt(size)."""
    options: dict[str, Any]
    """What only some classes pass, by name."""


class AttentionOwner(Protocol):
    """Computes the attention of the modules that it was bound to."""

    def attend(self, call: AttentionCall) -> Tensor:
        """Compute one layer. Returns [1, T, heads, size of a value]."""


class EnoughLayers(Exception):
    """Raised to end a forward pass after as many layers as there are caches."""


class PagedAttention:
    """Computes attention in the order of the calls: the n-th call of a step is that of rule and cache n."""

    def __init__(self, rules: Sequence[LayerRule], head_size: int) -> None:
        """``head_size`` is that of the cache, which is the largest of all keys and values."""
        self._rules = list(rules)
        self._head_size = head_size
        self._plan: AttentionPlan | None = None
        self._kv_caches: list[KVCache] = []
        self.num_calls = 0

    def begin(self, plan: AttentionPlan, kv_caches: list[KVCache]) -> None:
        """Use this plan and these caches until :meth:`end`."""
        self._plan, self._kv_caches, self.num_calls = plan, kv_caches, 0

    def end(self) -> None:
        """Forget the plan and the caches."""
        self._plan, self._kv_caches = None, []

    def attend(self, call: AttentionCall) -> Tensor:
        layer = self.num_calls
        if layer >= len(self._kv_caches):
            raise EnoughLayers
        rule, plan, kv_cache = self._rules[layer], self._plan, self._kv_caches[layer]
        if rule.module is not call.module or plan is None or call.mask is not None:
            raise RuntimeError(
                f"{type(call.module).__name__} attends in another order or with another mask than at load"
            )
        self.num_calls += 1
        queries, keys, values = (heads[0].transpose(0, 1) for heads in (call.query, call.key, call.value))
        # A layer that shares the cache of an earlier one finds its keys and values there.
        is_written = rule.source is not None and kv_cache is self._kv_caches[rule.source]
        if rule.head_size == rule.value_size == self._head_size:
            if not is_written:
                plan.write_kv(keys, values, kv_cache)
            return plan.attend(queries, kv_cache, rule.scores)[None]
        if not is_written:
            plan.write_kv(self._pad(keys), self._pad(values), kv_cache)
        return plan.attend(self._pad(queries), kv_cache, rule.scores)[None, :, :, : rule.value_size]

    def _pad(self, heads: Tensor) -> Tensor:
        """Extend [T, heads, size] to the cache's head size with zeros, which change no product."""
        return F.pad(heads, (0, self._head_size - heads.shape[2]))


def bind(model: nn.Module, owner: AttentionOwner) -> None:
    """Let ``owner`` compute the attention of all modules of ``model``."""
    for module in model.modules():
        module.__dict__[_OWNER] = owner


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    owner: AttentionOwner = module.__dict__[_OWNER]
    return owner.attend(AttentionCall(module, query, key, value, attention_mask, scaling, options)), None


AttentionInterface.register(SERVING, _attend)
AttentionInterface.register(PROBING, _attend)
