"""Replaces transformers' modules by our layers, which compute the same faster."""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.pytorch_utils import Conv1D

from ...layers.linear import Linear, make_linear
from ...layers.norm import rms_norm
from ...ops.ops import Ops
from .experts import ModuleExperts, can_group
from .merged import AbsentWeight, merge_layers

_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


class LinearModule(nn.Module):
    """Computes one of our linear layers where transformers has ``nn.Linear``."""

    def __init__(self, linear: Linear, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self._linear = linear
        self.out_features, self.in_features = weight.shape
        self.weight = AbsentWeight.like(weight)
        self.bias = None if bias is None else AbsentWeight.like(bias)

    def forward(self, x: Tensor) -> Tensor:
        shape = x.shape
        return self._linear(x.reshape(-1, self.in_features)).view(*shape[:-1], self.out_features)


class NormModule(nn.Module):
    """Computes RMSNorm with our operation."""

    def __init__(self, weight: Tensor, eps: float, ops: Ops) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self._eps = eps
        self._ops = ops

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        return self._ops.add_norm(rows.contiguous(), None, self.weight, self._eps).view(x.shape)


def replace_modules(model: nn.Module, head: nn.Module | None, ops: Ops, quantization: str | None) -> None:
    """Replace linear layers, norms and experts, one after the other, so that at most one is in memory twice; those that
    read the same input become one.

    ``head`` is the output layer, which keeps its dtype under ``quantization``.
    """
    for parent in list(model.modules()):
        if can_group(parent):
            ModuleExperts.take_over(parent, quantization)
        merge_layers(parent, quantization, ops)
        for name, module in list(parent.named_children()):
            new = _replacement(module, None if module is head else quantization, ops)
            if new is not None:
                setattr(parent, name, new)


def _replacement(module: nn.Module, quantization: str | None, ops: Ops) -> nn.Module | None:
    if type(module) is nn.Linear or type(module) is Conv1D:
        weight = module.weight.detach() if type(module) is nn.Linear else module.weight.detach().t().contiguous()
        bias = None if module.bias is None else module.bias.detach()
        return LinearModule(make_linear(weight, bias, quantization), weight, bias)
    if type(module).__name__.endswith("RMSNorm"):
        return _replace_norm(module, ops)
    return None


def _replace_norm(module: Any, ops: Ops) -> nn.Module | None:
    """Return our norm if it computes the same as ``module`` does, with the weight or with one plus the weight."""
    weight = getattr(module, "weight", None)
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not isinstance(weight, Tensor) or weight.dim() != 1 or not isinstance(eps, float):
        return None
    if weight.dtype not in _TOLERANCE or [name for name, _ in module.named_parameters()] != ["weight"]:
        return None
    weight = weight.detach()
    x = torch.randn(3, len(weight), generator=torch.Generator().manual_seed(0)).to(weight.device, weight.dtype)
    expected, tolerance = module(x), _TOLERANCE[weight.dtype]
    for candidate in (weight, (1.0 + weight.float()).to(weight.dtype)):
        if expected.dtype == x.dtype and torch.allclose(rms_norm(x, candidate, eps), expected, tolerance, tolerance):
            return NormModule(candidate, eps, ops)
    return None


class _Output(BaseModelOutputWithPast):
    """Holds the last hidden states; every other field of a model's output is None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("_"):
            raise AttributeError(name)


class _GivenBody(nn.Module):
    """Replaces the inner part of a model: returns the hidden states that it was given, and computes nothing."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.__dict__["body"] = body
        self.__dict__["hidden"] = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["body"], name)

    def forward(self, *_: Any, **__: Any) -> _Output:
        return _Output(last_hidden_state=self.__dict__["hidden"])


class Head:
    """Computes what a causal model does after its inner part."""

    def __init__(self, model: Any, body_name: str, hidden_size: int, device: torch.device, dtype: torch.dtype) -> None:
        self._body = _GivenBody(model._modules[body_name])
        self._shell = copy.copy(model)
        self._shell.__dict__["_modules"] = {**model._modules, body_name: self._body}
        self._ids = torch.zeros(1, 1, dtype=torch.int64, device=device)
        self._plain: LinearModule | None = None
        output = model.get_output_embeddings()
        if isinstance(output, LinearModule):
            x = torch.randn(3, hidden_size, generator=torch.Generator().manual_seed(0)).to(device, dtype)
            if torch.equal(output(x).float(), self._through_model(x)):
                self._plain = output

    def __call__(self, hidden: Tensor) -> Tensor:
        """Turn hidden states [R, hidden_size] into float32 logits [R, vocab_size]."""
        return self._plain(hidden).float() if self._plain is not None else self._through_model(hidden)

    def _through_model(self, hidden: Tensor) -> Tensor:
        self._body.__dict__["hidden"] = hidden[None]
        logits: Tensor = self._shell(input_ids=self._ids.expand(1, len(hidden)), use_cache=False).logits[0]
        self._body.__dict__["hidden"] = None
        return logits.float()
