"""Computes the attention of transformers' modules over the paged KV cache, and records before, in one forward pass of
two tokens, what each layer of a model asks of attention.

transformers calls the registered function with the queries, keys and values of one layer, [1, heads, T, size]: the
tokens of all requests in a row. The function finds the step through an attribute of the calling module, so that models
share no state.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

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

    def __init__(self, rules: Sequence[LayerRule], head_sizes: Sequence[int]) -> None:
        """``head_sizes``: of each layer's cache."""
        self._rules = list(rules)
        self._head_sizes = list(head_sizes)
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
        size = self._head_sizes[layer]
        if rule.head_size == rule.value_size == size:
            if not is_written:
                plan.write_kv(keys, values, kv_cache)
            return plan.attend(queries, kv_cache, rule.scores)[None]
        if not is_written:
            plan.write_kv(_pad(keys, size), _pad(values, size), kv_cache)
        return plan.attend(_pad(queries, size), kv_cache, rule.scores)[None, :, :, : rule.value_size]


def _pad(heads: Tensor, size: int) -> Tensor:
    """Extend [T, heads, head size] to ``size`` with zeros, which change no product."""
    return F.pad(heads, (0, size - heads.shape[2]))


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
        sinks = options.get("s_aux")
        own_sinks = sinks.detach().float() if isinstance(sinks, Tensor) else None
        scores = ScoreRule(scale, window, options.get("softcap"), own_sinks)
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


def record(
    body: nn.Module, model: Any, max_model_len: int, device: torch.device, hidden: Tensor | None = None
) -> list[LayerRule]:
    """Return the rules of all attention calls of a pass of ``body``, the inner part of ``model``. ``hidden``
    [1, NUM_PROBED, hidden_size]: what a later stage is given in the place of tokens.

    Raises :class:`UnservableModel`.
    """
    recorder = AttentionRecorder(max_model_len)
    bind(model, recorder)
    model.set_attn_implementation(PROBING)
    ids = torch.zeros(1, NUM_PROBED, dtype=torch.int64, device=device)
    given = {"input_ids": ids} if hidden is None else {"inputs_embeds": hidden}
    body(**given, position_ids=torch.arange(NUM_PROBED, device=device)[None], use_cache=False)
    return recorder.rules
