"""Runs the operations as Triton kernels on a GPU."""

from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor

from ..attention.attention_backend import FP8_KV, AttentionPlan, KVCache
from ..attention.states import SentChunks, SentRuns, StatePlan
from ..checkpoint.mixer_config import STATE_CHUNK, StatePrompts
from ..checkpoint.weights import Linear
from ..device.device_link import copy_packed
from ..kernels.triton import launch, mamba2_chunks, power_of_2, state_chunks
from ..kernels.triton import states as kernels
from ..kernels.triton.kv_cache import rotate_and_write
from ..kernels.triton.rows import add_norm, gate
from ..layers.fp8_linear import Fp8Linear
from ..layers.triton_linear import KINDS, TritonLinear, are_few, multiply_few
from .ops import HeadNorm, Layer, LayerParts, Rotation
from .state_ops import LENGTH_EPS, Convolution, Mamba2Weights, StateOps, dense_rows
from .torch_ops import TorchOps

_HEADS = 8
"""Heads that one program rotates."""
_GATE_WIDTH = 1024
_FUSED = (torch.bfloat16,)
"""In float16 rows that are multiplied by the weights of a norm before they are scaled could be infinite."""


_CHANNELS = 256
"""Channels of a convolution that one program computes."""
_CONV_TOKENS = 32
"""Tokens of a prompt that it computes: a prompt has as many programs as that allows."""
_STATE_ROWS = 8
"""Rows, or columns, of a head's state that one warp keeps in registers."""
_CHUNK_VALUES = 16
"""Columns of a head's state that one program of the gated delta rule keeps in registers from chunk to chunk."""
_CHUNK_ROWS = 32
"""Rows of a head's state that one program of Mamba-2 does."""
_CHUNK_CHANNELS = 32
"""Channels of keys, or of values, that are multiplied at once where a chunk is computed alone."""
_CHUNK_STATES = 64
"""Elements of a row of Mamba-2's state that are."""
_NARROW_STATE = 128
"""Elements of a row up to which two chunks at once find room."""
_LEAST_SIDE = 16
"""Of a matrix that tensor cores multiply."""


class TritonOps(TorchOps):
    """Fulfils :class:`~.ops.Ops` for float32, float16 and bfloat16."""

    def __init__(self, prompts: StatePrompts = "scan") -> None:
        """``prompts``: how those of layers that keep a state are computed."""
        super().__init__()
        self._prompts = prompts

    @cached_property
    def states(self) -> StateOps:
        return FlaStateOps() if self._prompts == "fla" else TritonStateOps(self._prompts)

    def add_norm(
        self, residual: Tensor, delta: Tensor | None, weight: Tensor, eps: float, shift: float = 0.0
    ) -> Tensor:
        assert residual.is_contiguous()
        assert delta is None or delta.is_contiguous()
        out = torch.empty_like(residual)
        width = power_of_2(residual.shape[1])
        launch(
            add_norm,
            (residual.shape[0],),
            residual,
            residual if delta is None else delta,
            weight,
            out,
            residual.shape[1],
            eps,
            shift,
            HAS_DELTA=delta is not None,
            HAS_SHIFT=shift != 0.0,
            WIDTH=width,
            num_warps=min(16, max(1, width // 512)),
        )
        return out

    def gate(self, gate_up: Tensor, activation: str) -> Tensor:
        if activation not in KINDS:
            return super().gate(gate_up, activation)
        assert gate_up.is_contiguous()
        rows, size = gate_up.shape[0], gate_up.shape[1] // 2
        out = gate_up.new_empty(rows, size)
        grid = (rows, -(-size // _GATE_WIDTH))
        launch(gate, grid, gate_up, out, size, KIND=KINDS[activation], WIDTH=_GATE_WIDTH, num_warps=4)
        return out

    def gated(self, linear: Linear, x: Tensor, activation: str) -> Tensor:
        if activation in KINDS and isinstance(linear, (TritonLinear, Fp8Linear)) and linear.takes(x):
            return linear.gated(x, activation)
        return super().gated(linear, x, activation)

    def fused(self, layer: Layer, parts: LayerParts) -> Layer:
        linears = (*parts.attention, *parts.mlp)
        if parts.activation not in KINDS or not all(isinstance(each, (TritonLinear, Fp8Linear)) for each in linears):
            return layer
        return cast(Layer, FewRowsLayer(layer, parts, self))

    def rotate_and_write(
        self,
        heads: Tensor,
        norm: HeadNorm | None,
        rotation: Rotation,
        kv_cache: KVCache,
        plan: AttentionPlan,
    ) -> Tensor:
        if 2 * rotation[0].shape[2] < heads.shape[2]:
            return super().rotate_and_write(heads, norm, rotation, kv_cache, plan)
        assert heads.is_contiguous()
        assert rotation[0].is_contiguous()
        assert rotation[1].is_contiguous()
        num_tokens, num_all, head = heads.shape
        num_kv_heads, block_size, cache_head = kv_cache.shape[2:]
        num_heads = num_all - 2 * num_kv_heads
        weights, eps, shift = norm if norm is not None else (heads, 0.0, 0.0)
        launch(
            rotate_and_write,
            (num_tokens, -(-num_all // _HEADS)),
            heads,
            weights,
            *rotation,
            plan.slots_of(kv_cache),
            *kv_cache.unbind(),
            eps,
            shift,
            num_heads,
            num_kv_heads,
            HAS_NORM=norm is not None,
            HEAD=head,
            CACHE_HEAD=cache_head,
            PADDED_HALF=power_of_2(head // 2),
            BLOCK=block_size,
            HEADS=_HEADS,
            IS_FP8=kv_cache.dtype == FP8_KV,
            num_warps=4,
        )
        return heads[:, :num_heads]


class FewRowsLayer:
    """Computes a decoder layer of few rows with six kernels: products normalize the rows that they read, and add what
    they find to the residual stream. Of more rows it computes the layer as it is."""

    def __init__(self, layer: Any, parts: LayerParts, ops: TritonOps) -> None:
        self._layer = layer
        self._parts = parts
        self._ops = ops
        self.mlp = layer.mlp

    def __call__(
        self, residual: Tensor, delta: Tensor | None, rotation: Rotation, kv_cache: KVCache, plan: AttentionPlan
    ) -> Tensor | None:
        """Take and return what the layer does; None: nothing is left to be added to ``residual``."""
        if not are_few(residual) or residual.dtype not in _FUSED:
            delta = self._layer(residual, delta, rotation, kv_cache, plan)
            return delta
        if delta is not None:
            residual += delta
        parts = self._parts
        (qkv, out), (gate_up, down) = (_stored(pair) for pair in (parts.attention, parts.mlp))
        heads = multiply_few(residual, *qkv, norm=parts.norms[0]).view(len(residual), -1, parts.head_size)
        query = self._ops.rotate_and_write(heads, parts.head_norm, rotation, kv_cache, plan)
        multiply_few(plan.attend(query, kv_cache, parts.rule).flatten(1), *out, into=residual)
        inner = multiply_few(residual, *gate_up, KINDS[parts.activation], norm=parts.norms[1])
        multiply_few(inner, *down, into=residual)
        return None


def _stored(linears: tuple[Linear, Linear]) -> list[tuple[Tensor, Tensor | None, Tensor | None]]:
    """Return weight, scales and bias of each."""
    return [each.stored for each in linears if isinstance(each, (TritonLinear, Fp8Linear))]


class TritonStateOps(StateOps):
    """Computes layers that keep a state, for float32, float16 and bfloat16. A token has the same bits in any batch, and
    wherever its prompt is cut; if its chunks are computed at once, wherever it is cut between them."""

    def __init__(self, prompts: StatePrompts = "scan") -> None:
        self.prompts = prompts

    def short_conv(
        self,
        x: Tensor,
        convolution: Convolution,
        states: Tensor,
        plan: StatePlan,
        gates: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        runs, x = _sent(plan, states), dense_rows(x)
        assert gates is None or {gate.stride() for gate in gates} == {x.stride()}
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        before, after = (x, x) if gates is None else gates
        bias, (taps, channels) = convolution.bias, states.shape[1:]
        arrays, sizes = (runs.read, runs.written, runs.starts, runs.chains), (channels, x.stride(0))
        grid = (len(runs.chains), -(-channels // _CHANNELS))
        constants: dict[str, Any] = {"TAPS": taps, "HAS_GATES": gates is not None, "WIDTH": _CHANNELS, "num_warps": 4}
        num_parts = -(-runs.most_tokens // _CONV_TOKENS)
        launch(
            kernels.short_conv,
            (grid[0], num_parts, grid[1]),
            *(x, before, after, convolution.weight, convolution.weight if bias is None else bias, states, out),
            *arrays,
            *sizes,
            HAS_BIAS=bias is not None,
            HAS_SILU=convolution.has_silu,
            IS_ONE_PART=num_parts == 1,
            TOKENS=_CONV_TOKENS,
            **constants,
        )
        if num_parts > 1:
            launch(kernels.keep_inputs, grid, x, before, states, *arrays, *sizes, **constants)
        return out

    def delta_gates(self, a: Tensor, b: Tensor, rates: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        assert a.stride() == b.stride()
        assert a.stride(1) == 1
        rows, heads = a.shape
        decay, beta = (torch.empty(a.shape, dtype=torch.float32, device=a.device) for _ in range(2))
        width = min(_CHANNELS, power_of_2(heads))
        grid = (rows, -(-heads // width))
        launch(kernels.delta_gates, grid, a, b, rates, bias, decay, beta, heads, a.stride(0), WIDTH=width, num_warps=1)
        return decay, beta

    def gated_delta(
        self, query: Tensor, key: Tensor, value: Tensor, gates: tuple[Tensor, Tensor], states: Tensor, plan: StatePlan
    ) -> Tensor:
        runs, (decay, beta) = _sent(plan, states), gates
        query, key, value = (dense_rows(each) for each in (query, key, value))
        if query.stride(0) != key.stride(0):
            query, key = query.contiguous(), key.contiguous()
        (_, key_heads, key_size), (heads, value_size) = key.shape, value.shape[1:]
        assert all(each.is_contiguous() for each in (states, decay, beta))
        out = torch.empty(value.shape, dtype=value.dtype, device=value.device)
        if runs.chunks is not None:
            self._delta_of_prompts(query, key, value, gates, states, out, plan, runs.chunks)
        values = min(_STATE_ROWS, power_of_2(value_size))
        launch(
            kernels.gated_delta,
            (len(runs.scanned), heads, -(-value_size // values)),
            *(query, key, value, decay, beta, states, out),
            *(runs.read, runs.written, runs.starts, runs.scanned),
            *(key.stride(0), value.stride(0)),
            key_size**-0.5,
            LENGTH_EPS,
            HEADS=heads,
            GROUP=heads // key_heads,
            KEY=key_size,
            VALUE=value_size,
            BY_CHANNEL=decay.dim() == 3,
            PADDED_KEY=power_of_2(key_size),
            VALUES=values,
            num_warps=1,
        )
        return out

    def _delta_of_prompts(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        gates: tuple[Tensor, Tensor],
        states: Tensor,
        out: Tensor,
        plan: StatePlan,
        runs: SentChunks,
    ) -> None:
        """Compute the runs of prompts in chunks, into ``out``. The tensors are those of :meth:`gated_delta`, dense."""
        (decay, beta), (_, key_heads, key_size), (heads, value_size) = gates, key.shape, value.shape[1:]
        count, by_channel, parts = len(runs.chunks), decay.dim() == 3, _parts(key.dtype)
        grid, padded = (count, heads), power_of_2(key_size, _LEAST_SIDE)
        sizes: dict[str, Any] = {"HEADS": heads, "KEY": key_size, "PADDED_KEY": padded, "CHUNK": STATE_CHUNK}
        levels = STATE_CHUNK.bit_length() - 1
        shape = sizes | {"GROUP": heads // key_heads, "BY_CHANNEL": by_channel, "LEVELS": levels, "PARTS": parts}
        rests = decay
        if by_channel:
            sums, rests = torch.empty_like(decay), torch.empty_like(decay)
            launch(state_chunks.sum_decays, grid, decay, sums, rests, runs.chunks, **sizes, num_warps=8)
            decay = sums
        lower = beta.new_empty(count, heads, STATE_CHUNK, STATE_CHUNK)
        found = key.new_empty(count, heads, parts, STATE_CHUNK, STATE_CHUNK)
        factors = beta.new_empty(count, heads, 2, STATE_CHUNK)
        launch(
            state_chunks.delta_pairs,
            grid,
            *(query, key, decay, beta, lower, found, factors, runs.chunks, key.stride(0)),
            key_size**-0.5,
            LENGTH_EPS,
            **shape,
            BLOCK=min(_CHUNK_CHANNELS, padded),
            num_warps=8 if by_channel else 4,
        )
        reading, asking, writing = (key.new_empty(count, heads, parts, STATE_CHUNK, key_size) for _ in range(3))
        changes = beta.new_empty(count, heads, STATE_CHUNK, value_size)
        remaining = beta.new_empty(count, heads, key_size)
        launch(
            state_chunks.delta_solve,
            grid,
            *(query, key, value, decay, rests, beta, lower, factors, reading, asking, writing, changes, remaining),
            *(runs.chunks, key.stride(0), value.stride(0)),
            **shape,
            VALUE=value_size,
            PADDED_VALUE=power_of_2(value_size, _LEAST_SIDE),
            BLOCK=min(_CHUNK_CHANNELS, padded, power_of_2(value_size, _LEAST_SIDE)),
            num_warps=4,
        )
        values = min(_CHUNK_VALUES, power_of_2(value_size, _LEAST_SIDE))
        launch(
            state_chunks.delta_chunks,
            (len(runs.chains), heads, -(-value_size // values)),
            *(found, reading, asking, writing, changes, remaining, states, out),
            *(runs.read, runs.written, runs.run_chunks, runs.chains, runs.chunks),
            **sizes,
            VALUE=value_size,
            VALUES=values,
            PARTS=parts,
            num_warps=4,
            num_stages=1,  # two chunks at once need more shared memory than there is
        )

    def mamba2(
        self, x: Tensor, b: Tensor, c: Tensor, dt: Tensor, weights: Mamba2Weights, states: Tensor, plan: StatePlan
    ) -> Tensor:
        runs = _sent(plan, states)
        x, b, c, dt = (dense_rows(each) for each in (x, b, c, dt))
        assert len(x) == 1 or x.stride(0) == b.stride(0) == c.stride(0), "parts of the same rows"
        assert states.is_contiguous()
        (_, heads, head_size), (groups, state_size) = x.shape, b.shape[1:]
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        tensors = (x, b, c, dt, weights.a, weights.d, weights.dt_bias, states, out)
        numbers = (x.stride(0), dt.stride(0), *map(float, weights.dt_limits))
        sizes: dict[str, Any] = {"HEADS": heads, "GROUP": heads // groups, "HEAD": head_size, "STATE": state_size}
        if runs.chunks is not None:
            self._mamba2_of_prompts(tensors, numbers, sizes, runs.chunks)
        rows = min(_STATE_ROWS, power_of_2(head_size))
        launch(
            kernels.mamba2,
            (len(runs.scanned), heads, -(-head_size // rows)),
            *tensors,
            *(runs.read, runs.written, runs.starts, runs.scanned),
            *numbers,
            PADDED_STATE=power_of_2(state_size),
            ROWS=rows,
            **sizes,
            num_warps=1,
        )
        return out

    def _mamba2_of_prompts(
        self,
        tensors: tuple[Tensor, ...],
        numbers: tuple[float, ...],
        sizes: dict[str, Any],
        runs: SentChunks,
    ) -> None:
        """Compute the runs of prompts in chunks. The arguments are those of the kernel that scans."""
        x, b, c, dt, a, d, dt_bias, states, out = tensors
        heads, head_size = x.shape[1:]
        count, parts, padded = len(runs.chunks), _parts(x.dtype), power_of_2(sizes["STATE"], _LEAST_SIDE)
        shape = sizes | {"PADDED_STATE": padded, "CHUNK": STATE_CHUNK, "PARTS": parts}
        found = x.new_empty(count, heads, parts, STATE_CHUNK, STATE_CHUNK)
        factors = a.new_empty(count, heads, 3, STATE_CHUNK)
        of_pairs = {name: value for name, value in shape.items() if name != "HEAD"}
        launch(
            mamba2_chunks.mamba2_pairs,
            (count, heads),
            *(b, c, dt, a, dt_bias, found, factors, runs.chunks),
            *numbers,
            **of_pairs,
            BLOCK=min(_CHUNK_STATES, padded),
            num_warps=4,
        )
        # Wide states, and float32, leave no room for two chunks at once in the 99 KiB that the smallest GPUs have.
        is_narrow = padded <= _NARROW_STATE and parts == 2
        rows = min(_CHUNK_ROWS if is_narrow else _LEAST_SIDE, power_of_2(head_size, _LEAST_SIDE))
        launch(
            mamba2_chunks.mamba2_chunks,
            (len(runs.chains), heads, -(-head_size // rows)),
            *(x, b, c, d, found, factors, states, out),
            *(runs.read, runs.written, runs.run_chunks, runs.chains, runs.chunks),
            numbers[0],
            **shape,
            ROWS=rows,
            num_warps=8,
            num_stages=2 if is_narrow else 1,
        )

    def gated_norm(self, x: Tensor, gate: Tensor, weight: Tensor, eps: float, *, norm_first: bool) -> Tensor:
        gate, (rows, groups, size) = dense_rows(gate), x.shape
        assert x.is_contiguous()
        assert weight.is_contiguous()
        out, width = torch.empty_like(x), power_of_2(size)
        launch(
            kernels.gated_norm,
            (rows, groups),
            *(x, gate, weight, out, groups, size, gate.stride(0), size if weight.dim() == 2 else 0, eps),
            NORM_FIRST=norm_first,
            WIDTH=width,
            num_warps=min(16, max(1, width // 512)),
        )
        return out


class FlaStateOps(TritonStateOps):
    """Computes prompts of gated delta nets with ``fla-core``, in the model's dtype, and the rest as the others."""

    def __init__(self) -> None:
        """Raises ``ImportError`` if the package is missing or does not know the functions."""
        super().__init__("fla")
        # Imported here: it compiles nothing, and takes seconds. No lock file has it, so an editor does not find it.
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule  # pyright: ignore[reportMissingImports]
        from fla.ops.kda import chunk_kda  # pyright: ignore[reportMissingImports]

        self._rules = {2: chunk_gated_delta_rule, 3: chunk_kda}

    def _delta_of_prompts(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        gates: tuple[Tensor, Tensor],
        states: Tensor,
        out: Tensor,
        plan: StatePlan,
        runs: SentChunks,
    ) -> None:
        shared, device = value.shape[1] // key.shape[1], value.device
        for wave in plan.prompt_waves():
            tokens, starts, read, written = copy_packed(list(wave), device)
            q, k = (each.index_select(0, tokens).repeat_interleave(shared, 1) for each in (query, key))
            rest = [each.index_select(0, tokens)[None] for each in (value, *gates)]
            before = states.index_select(0, read.clamp(min=0)).masked_fill(read.lt(0)[:, None, None, None], 0.0)
            result, after = self._rules[gates[0].dim()](
                q=q[None],
                k=k[None],
                v=rest[0],
                g=rest[1],
                beta=rest[2],
                initial_state=before,
                output_final_state=True,
                use_qk_l2norm_in_kernel=True,
                cu_seqlens=starts,
            )
            out.index_copy_(0, tokens, result[0].to(out.dtype))
            states.index_copy_(0, written, after.to(states.dtype))


def _parts(dtype: torch.dtype) -> int:
    """Return as how many matrices of a dtype one in float32 is multiplied."""
    return 1 if dtype == torch.float32 else 2


def _sent(plan: StatePlan, states: Tensor) -> SentRuns:
    """Return the runs where the states are. The plans of warm-up steps are sent by each layer."""
    sent = plan.sent or plan.send(states.device).sent
    assert sent is not None
    return sent
