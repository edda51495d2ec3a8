"""Keeps the states of transformers' recurrent layers in slots, and computes each run of tokens from its own state.

transformers' modules ask their cache for the state of a sequence and give it the new one. The tokens of a step lie in
one row [1, T, hidden_size]: a module that asks for a state is called once for each run of several tokens, in which it
takes its chunk form, and once for all runs of one token, each a row of a batch, in which it takes its recurrent form.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from ...attention.states import FROM_ZERO, LayerStates, StatePlan
from ...checkpoint.model_config import StateLayout, StateShape
from .paged_attention import UnservableModel

FORM = "modules"
"""The form of states that transformers' modules compute, in ``numerics``."""
_CHUNK = 64
"""The tokens of a chunk in modules that name no other number."""
_NUM_PROBED = 5
"""The tokens of the pass that finds the layers: more than a convolution looks back."""


class _Finder(DynamicCache):
    """Notes which module asks for the state of which layer."""

    def __init__(self, config: Any) -> None:
        super().__init__(config=config)
        self.calling: list[nn.Module] = []
        self.found: dict[int, nn.Module] = {}

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        self.found[layer_idx] = self.calling[-1]
        state: Tensor | None = super().get_conv_state(layer_idx, state_idx)
        return state


class _RunCache:
    """Stands for transformers' cache in one call of one layer: holds the states of n runs, [n, ...]."""

    def __init__(self, conv: Tensor | None = None, recurrent: Tensor | None = None) -> None:
        """None: the runs begin sequences."""
        self.conv, self.recurrent = conv, recurrent

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self.conv

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self.recurrent

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return self.conv is not None

    def is_recording_past(self, layer_idx: int) -> bool:
        return False

    def update_conv_state(
        self, x: Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int | None = None, **_: Any
    ) -> Tensor:
        """Return the inputs [n, channels, ...] that the convolution reads: the kept ones and ``x``."""
        size = conv_kernel_size or x.shape[-1]
        full = x if self.conv is None else torch.cat([self.conv, x], dim=-1)
        kept = full[..., -size:]
        self.conv = F.pad(kept, (size - kept.shape[-1], 0))
        return full

    def update_recurrent_state(self, x: Tensor, layer_idx: int, state_idx: int = 0, **_: Any) -> Tensor:
        self.recurrent = x
        return x


class _Run(NamedTuple):
    """Holds a run that is computed alone."""

    tokens: slice
    read: int
    written: int


class _Together(NamedTuple):
    """Holds the runs of one token that are computed in one batch."""

    rows: Tensor
    """[n] int64: their tokens in the step."""
    read: Tensor
    written: Tensor


class LayersWithStates:
    """Computes the layers of one model that keep states, in the place of their modules' own forward passes.

    Attributes:
        layout: What the layers keep.
    """

    def __init__(self, body: nn.Module, config: Any, dtype: torch.dtype, device: torch.device) -> None:
        """Find the layers of ``body`` that keep a state. Raises :class:`UnservableModel` if they keep it otherwise than
        slots hold it."""
        modules, caches = _find(body, config, device)
        shapes = tuple(_shape_of(caches[layer], dtype) for layer in modules)
        for module, shape in zip(modules.values(), shapes, strict=True):
            if shape.recurrent is not None:
                _refuse_restarts(module, shape, dtype, device)
        # A prompt that is cut where the sums of its chunks begin has the bits of one that is not. A convolution alone
        # sums the same few inputs wherever its prompt is cut.
        recurrent = [module for module, shape in zip(modules.values(), shapes, strict=True) if shape.recurrent]
        chunk = math.lcm(*(getattr(module, "chunk_size", _CHUNK) for module in recurrent))
        self.layout = StateLayout(shapes, FORM, chunk)
        self._device = device
        self._layers: list[LayerStates | None] | None = None
        self._together: _Together | None = None
        self._alone: list[_Run] = []
        for index, module in enumerate(modules.values()):
            module.__dict__["forward"] = _Layer(self, index, module.forward)

    def begin(self, plan: StatePlan) -> None:
        """Compute the runs of this plan until :meth:`end`."""
        self._layers, self._together, self._alone = plan.layers, None, []
        together: list[tuple[int, int, int]] = []
        written: set[int] = set()
        begins = plan.cu_lens.tolist()
        for index, (read, wrote) in enumerate(zip(plan.read.tolist(), plan.written.tolist(), strict=True)):
            begin, end = begins[index : index + 2]
            # A run that reads what an earlier one of its request writes comes after that one.
            if end - begin == 1 and read != FROM_ZERO and read not in written:
                together.append((begin, read, wrote))
            else:
                self._alone.append(_Run(slice(begin, end), read, wrote))
                written.add(wrote)
        if together:
            self._together = _Together(*torch.tensor(together, device=self._device).unbind(1))

    def end(self) -> None:
        """Let the modules compute their own forward passes."""
        self._layers = self._together = None
        self._alone = []

    def compute(self, index: int, forward: Callable[..., Tensor], hidden: Tensor) -> Tensor | None:
        """Compute layer ``index`` for ``hidden`` [1, T, hidden_size] with its module's ``forward``; None: no plan has
        begun."""
        if self._layers is None:
            return None
        states = self._layers[index]
        assert states is not None, "only layers that keep a state are here"
        out: Tensor | None = None
        if (batch := self._together) is not None:
            cache = _RunCache(*_read(states, batch.read))
            part = forward(hidden[0, batch.rows][:, None], cache=cache, attention_mask=None)
            _write(states, batch.written, cache)
            out = part.new_empty(hidden.shape)
            out[0, batch.rows] = part[:, 0]
        for run in self._alone:
            cache = _RunCache(*(_read(states, slice(run.read, run.read + 1)) if run.read != FROM_ZERO else ()))
            part = forward(hidden[:, run.tokens], cache=cache, attention_mask=None)
            _write(states, slice(run.written, run.written + 1), cache)
            out = part.new_empty(hidden.shape) if out is None else out
            out[:, run.tokens] = part
        return out


class _Layer:
    """Replaces the forward pass of a module that keeps a state."""

    def __init__(self, layers: LayersWithStates, index: int, forward: Callable[..., Tensor]) -> None:
        self._layers, self._index, self._forward = layers, index, forward

    def __call__(self, hidden_states: Tensor, *rest: Any, **options: Any) -> Tensor:
        found = self._layers.compute(self._index, self._forward, hidden_states)
        return self._forward(hidden_states, *rest, **options) if found is None else found


def _read(states: LayerStates, slots: Tensor | slice) -> tuple[Tensor, Tensor | None]:
    """Return copies of these slots' states, which modules change in place, the convolution's as [n, channels, taps]."""
    conv = states.conv[slots].transpose(1, 2).contiguous()
    # Indexing by a slice makes a view, and a convolution of one channel or tap is contiguous either way.
    own = conv.clone() if conv.data_ptr() == states.conv[slots].data_ptr() else conv
    recurrent = None if states.recurrent is None else states.recurrent[slots].clone()
    return own, recurrent


def _write(states: LayerStates, slots: Tensor | slice, cache: _RunCache) -> None:
    assert cache.conv is not None, "the module has updated it"
    states.conv[slots] = cache.conv.transpose(1, 2)
    if states.recurrent is not None:
        assert cache.recurrent is not None, "the module has updated it"
        states.recurrent[slots] = cache.recurrent


def keeps_states(config: Any) -> bool:
    """Return whether transformers' cache holds states of layers for this configuration."""
    layers = DynamicCache(config=config.get_text_config(decoder=True)).layers
    return any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in layers)


def _find(body: nn.Module, config: Any, device: torch.device) -> tuple[dict[int, nn.Module], dict[int, Any]]:
    """Return, by layer, the module that asks for a state, and the layer of the cache that then holds it."""
    finder = _Finder(config.get_text_config(decoder=True))
    hooks: list[Any] = []
    for module in body.modules():
        hooks.append(module.register_forward_pre_hook(lambda module, _: finder.calling.append(module)))
        hooks.append(module.register_forward_hook(lambda *_: finder.calling.pop() and None))
    ids = torch.zeros(1, _NUM_PROBED, dtype=torch.int64, device=device)
    try:
        places = torch.arange(_NUM_PROBED, device=device)[None]
        body(input_ids=ids, position_ids=places, cache=finder, use_cache=True)
    finally:
        for hook in hooks:
            hook.remove()
    if not finder.found:
        raise UnservableModel("keeps a state between tokens that its layers do not ask the cache for")
    layers = sorted(finder.found)
    return {layer: finder.found[layer] for layer in layers}, {layer: finder.layers[layer] for layer in layers}


def _shape_of(cache: Any, dtype: torch.dtype) -> StateShape:
    """Return what a layer has put into its layer of the cache after a pass."""
    conv, recurrent = cache.conv_states.get(0), cache.recurrent_states.get(0)
    if len(cache.conv_states) != 1 or conv is None:
        raise UnservableModel("keeps other states in a layer than one convolution's and one recurrence's")
    if conv.dtype != dtype or (recurrent is not None and recurrent.dtype != torch.float32):
        kinds = f"{conv.dtype} and {'none' if recurrent is None else recurrent.dtype}"
        raise UnservableModel(f"keeps states of other dtypes than its own and float32: {kinds}")
    return StateShape(conv.shape[1], conv.shape[2], None if recurrent is None else tuple(recurrent.shape[1:]))


def _refuse_restarts(module: nn.Module, shape: StateShape, dtype: torch.dtype, device: torch.device) -> None:
    """Raise :class:`UnservableModel` if the module leaves out the state before a run of several tokens."""
    size = getattr(module, "hidden_size", None)
    if not isinstance(size, int) or shape.recurrent is None:
        return
    hidden = torch.randn(1, _NUM_PROBED, size, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    found = []
    for value in (0.0, 1.0):
        conv = torch.zeros(1, shape.channels, shape.taps, dtype=dtype, device=device)
        recurrent = torch.full((1, *shape.recurrent), value, device=device)
        found.append(module(hidden, cache=_RunCache(conv, recurrent), attention_mask=None))
    if torch.equal(*found):
        raise UnservableModel("restarts its state from zero where a prompt is continued")
