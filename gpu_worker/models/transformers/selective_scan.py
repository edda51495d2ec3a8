"""Computes the mixers of Mamba's first kind (Mamba, Falcon-Mamba, Jamba) from any state, one token after the other.

transformers' modules begin every call of more than one token with an empty state, without an error. Here nothing that a
token's state is computed from depends on where its prompt was cut: not on the other tokens of the call, and not on
whether the token is of a prompt or decoded.
"""

from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...layers.linear import make_linear


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
