"""Keeps the states of transformers' recurrent layers in slots, and computes each run of tokens from its own state.

transformers' modules ask their cache for the state of a sequence and give it the new one. The tokens of a step lie in
one row [1, T, hidden_size]: a module that asks for a state is called once for each run of several tokens, in which it
takes its chunk form, and once for all runs of one token, each a row of a batch, in which it takes its recurrent form.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from ...attention.states import FROM_ZERO, LayerStates, StatePlan
from ...checkpoint.model_config import StateLayout, StateShape
from ...layers.linear import make_linear
from .paged_attention import UnservableModel

FORM = "modules"
"""The form of states that transformers' modules compute, in ``numerics``."""
_CHUNK = 64
"""The tokens of a chunk, in all modules. Those of Mamba-2 have 256 by default, for which transformers' code makes
tensors of 4 GiB in a layer of Granite 4.0 H Small; with 64 it is a sixteenth."""
_SOFTPLUS = F.softplus
_VECTOR = 64
"""Elements: a multiple of those that any processor computes in a turn."""
_OF_A_THREAD = 1 << 14
"""Elements: PyTorch divides more than twice as many among threads, at places that follow from their number."""
_NUM_PROBED = 5
"""The tokens of the pass that finds the layers: more than a convolution looks back."""


class _Finder(DynamicCache):
    """Notes which module asks for the state of which layer."""

    def __init__(self, config: Any) -> None:
        super().__init__(config=config)
        self.calling: list[nn.Module] = []
        self.found: dict[int, nn.Module] = {}

    # transformers' own refuse to answer if no layer attends.
    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return query_length, 0

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

    pieces: list[slice]
    """Its tokens in the step, divided into what one call computes."""
    read: int
    written: int


class _Wave(NamedTuple):
    """Holds runs that read nothing which another one of them writes."""

    rows: Tensor
    """[n] int64: the tokens of the runs of one token, which are computed in one batch."""
    read: Tensor
    """[n] int64: their slots, as ``written``."""
    written: Tensor
    alone: list[_Run]


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
        forwards = [
            _forward_of(module, shape, dtype, device) for module, shape in zip(modules.values(), shapes, strict=True)
        ]
        scans = [isinstance(forward, SelectiveScan) for forward in forwards]
        # A prompt that is cut where the sums of its chunks begin has the bits of one that is not. A convolution alone
        # sums the same few inputs wherever its prompt is cut, and a scan adds one token after the other.
        has_chunks = any(shape.recurrent and not scan for shape, scan in zip(shapes, scans, strict=True))
        self.layout = StateLayout(shapes, f"{FORM}-scan" if any(scans) else FORM, _CHUNK if has_chunks else 1)
        # Mamba-2's modules compute all chunks of a call at once, in so much memory, and sum over them. A scan holds the
        # states of all tokens of a call.
        chunked = [module for module in modules.values() if hasattr(module, "chunk_size")]
        for module in chunked:
            module.__dict__["chunk_size"] = _CHUNK
        self._piece = _CHUNK if chunked or any(scans) else None
        self._device = device
        self._layers: list[LayerStates | None] | None = None
        self._waves: list[_Wave] = []
        for index, (module, forward) in enumerate(zip(modules.values(), forwards, strict=True)):
            module.__dict__["forward"] = _Layer(self, index, module.forward, forward)

    def begin(self, plan: StatePlan) -> None:
        """Compute the runs of this plan until :meth:`end`."""
        self._layers = plan.layers
        singles, others = list[list[tuple[int, int, int]]](), list[list[_Run]]()
        depths: dict[int, int] = {}
        begins = plan.cu_lens.tolist()
        for index, (read, written) in enumerate(zip(plan.read.tolist(), plan.written.tolist(), strict=True)):
            begin, end = begins[index : index + 2]
            # A run that reads what an earlier one of its request writes comes after that one.
            depth = depths[written] = depths.get(read, -1) + 1
            if depth == len(singles):
                singles.append([])
                others.append([])
            if end - begin == 1 and read != FROM_ZERO:
                singles[depth].append((begin, read, written))
            else:
                others[depth].append(_Run(_pieces(begin, end, self._piece), read, written))
        self._waves = [self._wave(single, alone) for single, alone in zip(singles, others, strict=True)]

    def _wave(self, singles: list[tuple[int, int, int]], alone: list[_Run]) -> _Wave:
        rows, read, written = torch.tensor(singles, dtype=torch.int64, device=self._device).view(-1, 3).unbind(1)
        return _Wave(rows, read, written, alone)

    def end(self) -> None:
        """Let the modules compute their own forward passes."""
        self._layers, self._waves = None, []

    def compute(self, index: int, forward: Callable[..., Tensor], hidden: Tensor) -> Tensor | None:
        """Compute layer ``index`` for ``hidden`` [1, T, hidden_size] with its module's ``forward``; None: no plan has
        begun."""
        if self._layers is None:
            return None
        states = self._layers[index]
        assert states is not None, "only layers that keep a state are here"
        with _even_softplus() if hidden.is_cpu else nullcontext():
            return self._compute_waves(states, forward, hidden)

    def _compute_waves(self, states: LayerStates, forward: Callable[..., Tensor], hidden: Tensor) -> Tensor | None:
        out: Tensor | None = None
        for wave in self._waves:
            if len(wave.rows):
                cache = _RunCache(*_read(states, wave.read))
                part = forward(hidden[0, wave.rows][:, None], cache=cache, attention_mask=None)
                _write(states, wave.written, cache)
                out = part.new_empty(hidden.shape) if out is None else out
                out[0, wave.rows] = part[:, 0]
            for run in wave.alone:
                cache = _RunCache(*(_read(states, slice(run.read, run.read + 1)) if run.read != FROM_ZERO else ()))
                for tokens in run.pieces:
                    part = forward(hidden[:, tokens], cache=cache, attention_mask=None)
                    out = part.new_empty(hidden.shape) if out is None else out
                    out[:, tokens] = part
                _write(states, slice(run.written, run.written + 1), cache)
        return out


@contextmanager
def _even_softplus() -> Iterator[None]:
    """Let modules compute softplus by :func:`_softplus` for the length of the ``with`` block."""
    vars(F)["softplus"] = _softplus
    try:
        yield
    finally:
        vars(F)["softplus"] = _SOFTPLUS


def _softplus(x: Tensor, beta: float = 1.0, threshold: float = 20.0) -> Tensor:
    """Return softplus, with bits that do not depend on where in ``x`` an element lies: on CPUs PyTorch computes those
    behind the last whole vectors of a thread by another function, so that a decay had another last bit in another
    batch."""
    padded = F.pad(x.reshape(-1), (0, -x.numel() % _VECTOR))
    found = [_SOFTPLUS(part, beta, threshold) for part in torch.split(padded, _OF_A_THREAD)]
    return torch.cat(found)[: x.numel()].view(x.shape)


class _Layer:
    """Replaces the forward pass of a module that keeps a state."""

    def __init__(
        self, layers: LayersWithStates, index: int, own: Callable[..., Tensor], forward: Callable[..., Tensor]
    ) -> None:
        """``own``: the module's, for passes without slots; ``forward``: what computes runs."""
        self._layers, self._index, self._own, self._forward = layers, index, own, forward

    def __call__(self, hidden_states: Tensor, *rest: Any, **options: Any) -> Tensor:
        found = self._layers.compute(self._index, self._forward, hidden_states)
        return self._own(hidden_states, *rest, **options) if found is None else found


def _pieces(begin: int, end: int, size: int | None) -> list[slice]:
    """Return the tokens from ``begin`` to ``end`` in pieces of ``size``; None: in one."""
    if size is None:
        return [slice(begin, end)]
    # No piece is one token, which a module would compute in its other form.
    cuts = [begin, *range(begin + size, end - 1, size), end]
    return [slice(first, last) for first, last in pairwise(cuts)]


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
    try:
        layers = DynamicCache(config=config.get_text_config(decoder=True)).layers
    except AttributeError:  # some configurations lack what a cache asks for, such as the number of layers
        return False
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
    except UnservableModel:
        raise
    except Exception as error:  # a module may fail in any way, and one with a cache of its own refuses another one
        raise UnservableModel(
            f"keeps a state that transformers' cache does not hold ({type(error).__name__})"
        ) from error
    finally:
        for hook in hooks:
            hook.remove()
    if not finder.found:
        raise UnservableModel("keeps a state that its layers do not ask transformers' cache for")
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


def _forward_of(
    module: nn.Module, shape: StateShape, dtype: torch.dtype, device: torch.device
) -> Callable[..., Tensor]:
    """Return what computes runs of a module. Raises :class:`UnservableModel` if nothing begins with a given state."""
    if shape.recurrent is None or not _restarts(module, shape, dtype, device):
        return module.forward
    if not is_selective_scan(module):
        raise UnservableModel("restarts its state from zero where a prompt is continued")
    return SelectiveScan(module)


def _restarts(module: nn.Module, shape: StateShape, dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether the module leaves out the state before a run of several tokens, as transformers' do of which the
    recurrence takes no state."""
    size = getattr(module, "hidden_size", None)
    if not isinstance(size, int) or shape.recurrent is None:
        return False
    hidden = torch.randn(1, _NUM_PROBED, size, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    found = []
    for value in (0.0, 1.0):
        conv = torch.zeros(1, shape.channels, shape.taps, dtype=dtype, device=device)
        recurrent = torch.full((1, *shape.recurrent), value, device=device)
        found.append(module(hidden, cache=_RunCache(conv, recurrent), attention_mask=None))
    return torch.equal(*found)


class _States(Protocol):
    """Holds the states of n runs, as transformers' cache does."""

    def get_conv_state(self, layer_idx: int) -> Tensor | None: ...

    def get_recurrent_state(self, layer_idx: int) -> Tensor | None: ...

    def update_conv_state(self, x: Tensor, layer_idx: int, *, conv_kernel_size: int) -> Tensor: ...

    def update_recurrent_state(self, x: Tensor, layer_idx: int) -> Tensor: ...


UNPACKED = "dt_proj"
"""The linear layer whose weight the modules read themselves, so that none of ours replaces it."""
_PARTS = ("in_proj", "conv1d", "act", "x_proj", "dt_proj", "A_log", "D", "out_proj", "time_step_rank", "ssm_state_size")


def is_selective_scan(module: nn.Module) -> bool:
    """Return whether ``module`` has the parts of such a mixer."""
    return all(hasattr(module, name) for name in _PARTS)


class SelectiveScan:
    """Stands for the forward pass of one mixer."""

    def __init__(self, module: Any) -> None:
        self._module = module
        # One of our layers: the bits of its rows do not depend on how many there are.
        self._time_step = make_linear(module.dt_proj.weight.detach())
        self._time_bias = module.dt_proj.bias.detach().float()
        self._decay = -torch.exp(module.A_log.detach().float())

    def __call__(self, hidden: Tensor, *, cache: _States, attention_mask: None = None) -> Tensor:
        """Return [n, T, hidden_size] for the next T tokens ``hidden`` of n runs, whose states ``cache`` holds."""
        module = self._module
        x, gate = module.in_proj(hidden).chunk(2, dim=-1)
        x = self._convolve(x, cache)
        dt, b, c = self._parameters(x)
        wide = x.float()
        decay = torch.exp(dt[..., None] * self._decay)
        added = (dt * wide)[..., None] * b[:, :, None, :]
        states = torch.empty_like(added)
        before = cache.get_recurrent_state(0)
        state = torch.zeros_like(added[:, 0]) if before is None else before
        for token in range(added.shape[1]):
            state = torch.addcmul(added[:, token], state, decay[:, token])
            states[:, token] = state
        cache.update_recurrent_state(state, 0)
        y = (states * c[:, :, None, :]).sum(-1) + wide * module.D.float()
        result: Tensor = module.out_proj((y * F.silu(gate.float())).to(hidden.dtype))
        return result

    def _convolve(self, x: Tensor, cache: _States) -> Tensor:
        """Return [n, T, channels]: the short convolution of x and of what the states hold of it, activated."""
        convolution, size = self._module.conv1d, self._module.conv1d.kernel_size[0]
        is_first = cache.get_conv_state(0) is None
        full = cache.update_conv_state(x.transpose(1, 2), 0, conv_kernel_size=size)
        if is_first:
            full = F.pad(full, (size - 1, 0))
        mixed = F.conv1d(full, convolution.weight, convolution.bias, groups=full.shape[1])[..., -x.shape[1] :]
        activated: Tensor = self._module.act(mixed).transpose(1, 2).contiguous()
        return activated

    def _parameters(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the step of time [n, T, channels], and input and output weights [n, T, state size], in float32."""
        module = self._module
        sizes = [module.time_step_rank, module.ssm_state_size, module.ssm_state_size]
        parts = list(module.x_proj(x).split(sizes, dim=-1))
        for index, name in enumerate(("dt_layernorm", "b_layernorm", "c_layernorm")):
            if hasattr(module, name):
                parts[index] = getattr(module, name)(parts[index])
        rows = self._time_step(parts[0].reshape(-1, sizes[0]).contiguous()).view(*x.shape[:2], -1)
        return F.softplus(rows.float() + self._time_bias), parts[1].float(), parts[2].float()
