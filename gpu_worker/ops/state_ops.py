"""Computes layers that keep a state between tokens: the gated delta rule, Mamba-2, short convolutions.

Each takes the rows of a step's tokens and the states of a layer in all slots, and reads and writes the slots that a
plan names. Tokens are computed one after the other, in float32: no result depends on how a prompt is cut.
"""

from collections.abc import Callable, Iterator
from ctypes import CDLL, byref
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..attention.states import FROM_ZERO, StatePlan
from ..checkpoint.mixer_config import StatePrompts
from ..kernels.library import ConvArgs, DeltaArgs, GatedNormArgs, Mamba2Args, load_fused, load_states
from ..kernels.threads import kernel_threads

MOST_KEY_SIZE = 512
"""Elements of a key, or of a state's row, that the kernels compute."""
LENGTH_EPS = 1e-6
"""Added to the squared length of a query or key before it is divided by the length."""


class Convolution(NamedTuple):
    """Holds the weights of a short convolution of each channel alone."""

    weight: Tensor
    """[taps + 1, C] in the model's dtype, that of the newest token last."""
    bias: Tensor | None
    """[C]; None: zero."""
    has_silu: bool
    """Whether silu is applied to the result."""


class Mamba2Weights(NamedTuple):
    """Holds the parameters of Mamba-2's H heads, [H] float32 each."""

    a: Tensor
    """The rate of decay, negative."""
    d: Tensor
    dt_bias: Tensor
    dt_limits: tuple[float, float] = (0.0, float("inf"))


class StateOps:
    """Computes with PyTorch, on every device: the oracle of the kernels."""

    prompts: StatePrompts = "scan"
    """How prompts of layers with a recurrence are computed."""

    def short_conv(
        self,
        x: Tensor,
        convolution: Convolution,
        states: Tensor,
        plan: StatePlan,
        gates: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """Convolve each channel of ``x`` [T, C] with the tokens before it; ``states`` [slots, taps, C] hold those
        before the runs. ``gates``, of the shape and strides of x: what x is multiplied by, and what the result is."""
        weight, out = convolution.weight.float(), torch.empty(x.shape, dtype=x.dtype, device=x.device)
        if gates is not None:
            x = x * gates[0]
        for read, written, tokens in _runs(plan):
            before = torch.zeros_like(states[0]) if read == FROM_ZERO else states[read]
            rows = torch.cat((before, x[tokens]))
            windows = rows.float().unfold(0, len(weight), 1)
            result = (windows * weight.t()).sum(-1)
            result = result if convolution.bias is None else result + convolution.bias.float()
            out[tokens] = (F.silu(result) if convolution.has_silu else result).to(x.dtype)
            states[written] = rows[len(rows) - len(before) :]
        return out if gates is None else out * gates[1]

    def delta_gates(self, a: Tensor, b: Tensor, rates: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logarithms of decays, rates · softplus(a + bias), and sigmoid(b), both [T, H] float32."""
        return rates * F.softplus(a.float() + bias), b.float().sigmoid()

    def gated_delta(
        self, query: Tensor, key: Tensor, value: Tensor, gates: tuple[Tensor, Tensor], states: Tensor, plan: StatePlan
    ) -> Tensor:
        """Apply the gated delta rule: S = decay S + k (beta (v - k decay S)), and return q S, [T, H, V].

        Queries and keys [T, HK, K] are brought to unit length, and the queries are divided by √K; H / HK heads of the
        values [T, H, V] share each. ``gates``: the logarithms of the decays, [T, H], or [T, H, K] for each channel of
        a key, and beta [T, H], float32. ``states`` [slots, H, K, V] float32.
        """
        heads, (decay, beta) = value.shape[1], gates
        query, key = (_unit(each).repeat_interleave(heads // each.shape[1], 1) for each in (query, key))
        query = query * query.shape[-1] ** -0.5
        decays = decay.exp().view(len(decay), heads, -1, 1)
        out = torch.empty(value.shape, dtype=value.dtype, device=value.device)

        def step(state: Tensor, t: int) -> Tensor:
            state = state * decays[t]
            memory = (state * key[t, :, :, None]).sum(1)
            state = state + key[t, :, :, None] * ((value[t].float() - memory) * beta[t, :, None])[:, None]
            out[t] = (state * query[t, :, :, None]).sum(1).to(out.dtype)
            return state

        _scan(states, plan, step)
        return out

    def mamba2(
        self, x: Tensor, b: Tensor, c: Tensor, dt: Tensor, weights: Mamba2Weights, states: Tensor, plan: StatePlan
    ) -> Tensor:
        """Apply Mamba-2: S = exp(dt a) S + dt x b, and return S c + d x, [T, H, P].

        ``x`` [T, H, P], ``b`` and ``c`` [T, G, N], each shared by H / G heads; dt = softplus(``dt`` [T, H] + dt_bias),
        within its limits. ``states`` [slots, H, P, N] float32.
        """
        heads = x.shape[1]
        b, c = (each.float().repeat_interleave(heads // each.shape[1], 1) for each in (b, c))
        steps = F.softplus(dt.float() + weights.dt_bias).clamp(*weights.dt_limits)
        decays = (steps * weights.a).exp()
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)

        def step(state: Tensor, t: int) -> Tensor:
            inputs = x[t].float()
            state = state * decays[t, :, None, None] + (inputs * steps[t, :, None])[..., None] * b[t, :, None]
            out[t] = ((state * c[t, :, None]).sum(-1) + weights.d[:, None] * inputs).to(out.dtype)
            return state

        _scan(states, plan, step)
        return out

    def gated_norm(self, x: Tensor, gate: Tensor, weight: Tensor, eps: float, *, norm_first: bool) -> Tensor:
        """Return RMSNorm of each group of ``x`` [T, groups, size], times silu of ``gate`` [T, groups, size]:
        ``norm_first``: of the norm, otherwise of what the norm is applied to. ``weight`` [size] or [groups, size]."""
        rows, gated = x.float(), F.silu(gate.float())
        inner = rows if norm_first else rows * gated
        normed = inner * torch.rsqrt(inner.square().mean(-1, keepdim=True) + eps) * weight.float()
        return (normed * gated if norm_first else normed).to(x.dtype)


def _unit(heads: Tensor) -> Tensor:
    heads = heads.float()
    return heads * torch.rsqrt(heads.square().sum(-1, keepdim=True) + LENGTH_EPS)


def _runs(plan: StatePlan) -> Iterator[tuple[int, int, slice]]:
    bounds = plan.cu_lens.tolist()
    for read, written, start, end in zip(plan.read.tolist(), plan.written.tolist(), bounds, bounds[1:], strict=False):
        yield read, written, slice(start, end)


def _scan(states: Tensor, plan: StatePlan, step: Callable[[Tensor, int], Tensor]) -> None:
    for read, written, tokens in _runs(plan):
        state = torch.zeros_like(states[0]) if read == FROM_ZERO else states[read]
        for t in range(tokens.start, tokens.stop):
            state = step(state, t)
        states[written] = state


class CPUStateOps(StateOps):
    """Computes with the C++ kernels, for float32 and bfloat16. A token has the same bits in any batch and chunk, with
    any number of threads. Raises ``KernelsUnavailable`` without a compiler."""

    def __init__(self, march: str = "native") -> None:
        self._kernels: CDLL = load_states(march)
        self._fused = load_fused(march)

    def short_conv(
        self,
        x: Tensor,
        convolution: Convolution,
        states: Tensor,
        plan: StatePlan,
        gates: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        x = dense_rows(x)
        assert gates is None or {gate.stride() for gate in gates} == {x.stride()}
        out = torch.empty(x.shape, dtype=x.dtype)
        args = ConvArgs(
            x=x.data_ptr(),
            weight=convolution.weight.data_ptr(),
            bias=None if convolution.bias is None else convolution.bias.data_ptr(),
            gate_in=None if gates is None else gates[0].data_ptr(),
            gate_out=None if gates is None else gates[1].data_ptr(),
            states=states.data_ptr(),
            out=out.data_ptr(),
            channels=x.shape[1],
            taps=len(convolution.weight) - 1,
            row_stride=x.stride(0),
            has_silu=convolution.has_silu,
            **_common(x, plan),
        )
        self._kernels.short_conv(byref(args))
        return out

    def delta_gates(self, a: Tensor, b: Tensor, rates: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        assert a.stride() == b.stride()
        assert a.stride(1) == 1
        decay, beta = torch.empty(a.shape, dtype=torch.float32), torch.empty(a.shape, dtype=torch.float32)
        pointers = (each.data_ptr() for each in (a, b, rates, bias, decay, beta))
        self._kernels.delta_gates(a.dtype == torch.bfloat16, *pointers, *a.shape, a.stride(0))
        return decay, beta

    def gated_delta(
        self, query: Tensor, key: Tensor, value: Tensor, gates: tuple[Tensor, Tensor], states: Tensor, plan: StatePlan
    ) -> Tensor:
        query, key, value = (dense_rows(each) for each in (query, key, value))
        if query.stride(0) != key.stride(0):
            query, key = query.contiguous(), key.contiguous()
        (_, key_heads, key_size), heads, value_size = key.shape, *value.shape[1:]
        assert key_size <= MOST_KEY_SIZE
        assert states.is_contiguous()
        assert all(gate.is_contiguous() and gate.dtype == torch.float32 for gate in gates)
        out = torch.empty(value.shape, dtype=value.dtype)
        args = DeltaArgs(
            query=query.data_ptr(),
            key=key.data_ptr(),
            value=value.data_ptr(),
            decay=gates[0].data_ptr(),
            beta=gates[1].data_ptr(),
            states=states.data_ptr(),
            out=out.data_ptr(),
            num_heads=heads,
            num_key_heads=key_heads,
            key_size=key_size,
            value_size=value_size,
            key_stride=key.stride(0),
            value_stride=value.stride(0),
            by_channel=gates[0].dim() == 3,
            **_common(value, plan),
        )
        self._kernels.gated_delta(byref(args))
        return out

    def mamba2(
        self, x: Tensor, b: Tensor, c: Tensor, dt: Tensor, weights: Mamba2Weights, states: Tensor, plan: StatePlan
    ) -> Tensor:
        x, b, c, dt = (dense_rows(each) for each in (x, b, c, dt))
        # The strides of a single row mean nothing.
        assert len(x) == 1 or x.stride(0) == b.stride(0) == c.stride(0), "parts of the same rows"
        (_, heads, head_size), (groups, state_size) = x.shape, b.shape[1:]
        assert state_size <= MOST_KEY_SIZE
        assert states.is_contiguous()
        out = torch.empty(x.shape, dtype=x.dtype)
        args = Mamba2Args(
            x=x.data_ptr(),
            b=b.data_ptr(),
            c=c.data_ptr(),
            dt=dt.data_ptr(),
            a=weights.a.data_ptr(),
            d=weights.d.data_ptr(),
            dt_bias=weights.dt_bias.data_ptr(),
            states=states.data_ptr(),
            out=out.data_ptr(),
            num_heads=heads,
            num_groups=groups,
            head_size=head_size,
            state_size=state_size,
            row_stride=x.stride(0),
            dt_stride=dt.stride(0),
            least_dt=weights.dt_limits[0],
            most_dt=weights.dt_limits[1],
            **_common(x, plan),
        )
        self._kernels.mamba2(byref(args))
        return out

    def gated_norm(self, x: Tensor, gate: Tensor, weight: Tensor, eps: float, *, norm_first: bool) -> Tensor:
        gate = dense_rows(gate)
        assert x.is_contiguous()
        assert weight.is_contiguous()
        out = torch.empty(x.shape, dtype=x.dtype)
        args = GatedNormArgs(
            x=x.data_ptr(),
            gate=gate.data_ptr(),
            weight=weight.data_ptr(),
            out=out.data_ptr(),
            num_rows=x.shape[0],
            num_groups=x.shape[1],
            size=x.shape[2],
            gate_stride=gate.stride(0),
            weight_stride=x.shape[2] if weight.dim() == 2 else 0,
            eps=eps,
            norm_first=norm_first,
            is_bf16=x.dtype == torch.bfloat16,
            num_threads=kernel_threads(),
        )
        self._fused.gated_norm(byref(args))
        return out


def dense_rows(x: Tensor) -> Tensor:
    """Return ``x`` [T, ...] with each token's elements next to each other."""
    is_dense = x[:1].is_contiguous()
    return x if is_dense else x.contiguous()


def _common(x: Tensor, plan: StatePlan) -> dict[str, Any]:
    """Return the arguments that say which runs of tokens read and write which slots, and how."""
    return {
        "read": plan.read.data_ptr(),
        "written": plan.written.data_ptr(),
        "starts": plan.cu_lens.data_ptr(),
        "num_runs": len(plan.read),
        "is_bf16": x.dtype == torch.bfloat16,
        "num_threads": kernel_threads(),
    }
