"""Replaces transformers' modules by our layers, which compute the same faster: linear layers that read the same input
become one product, and gated MLPs are computed whole."""

import copy
import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.pytorch_utils import Conv1D

from ...checkpoint.weights import Adapt, LayerPart, indices
from ...layers.activation import ACTIVATIONS
from ...layers.linear import Linear, report_share
from ...layers.norm import rms_norm
from ...ops.ops import Ops
from ...parallel.sharding import Dimension, length, total
from .division import EXCHANGES, ModulePart, part_of
from .experts import ModuleExperts, can_group
from .paged_attention import UnservableModel
from .states import UNPACKED, is_selective_scan
from .stored_weights import make_layer

_READABLE = {
    Tensor.size,
    Tensor.dim,
    Tensor.__repr__,
    *(
        getattr(Tensor, name).__get__
        for name in ("dtype", "device", "shape", "ndim", "is_meta", "is_mkldnn", "requires_grad")
    ),
}


class AbsentWeight(Tensor):
    """Has a shape, a dtype and a device, but no values: a module that computes with it is refused.

    Without this, a product with it would return what happens to be in memory.
    """

    @classmethod
    def like(cls, tensor: Tensor) -> "AbsentWeight":
        """Return the stand-in of ``tensor``. Its device is ``meta``."""
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta").as_subclass(cls)

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if function not in _READABLE:
            raise UnservableModel("computes with the weight of a linear layer itself, instead of calling the layer")
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))


def _check_dtype(x: Tensor, dtype: torch.dtype) -> None:
    """Raise ``TypeError``, as transformers' layers do, for rows that the kernels would read as another dtype."""
    if x.dtype is not dtype:
        raise TypeError(f"rows of {x.dtype} for a linear layer of {dtype}")


_MLP = ("gate_proj", "up_proj")
_TOGETHER = (("q_proj", "k_proj", "v_proj"), _MLP)
"""Names of a module's layers that read the same input."""


class MergedLinear:
    """Computes several layers at the first call for an input, and keeps the result until each has taken its part.

    A layer that is called with another input than the others still gets its own product, at the cost of all.
    """

    def __init__(self, linear: Linear, sizes: Sequence[int]) -> None:
        """``linear`` has the outputs of all layers, of which each has one of ``sizes``."""
        self.linear = linear
        ends = itertools.accumulate(sizes)
        self._columns = [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]
        self._input: Tensor | None = None
        self._result: Tensor | None = None
        self._waiting: set[int] = set()

    def part(self, index: int, x: Tensor) -> Tensor:
        """Return the output [..., size] of layer ``index`` for x [..., in]."""
        # Before projections were merged, a Llama of 8 layers took 1.36 times the CPU of the built-in decoder for one
        # request, and takes 1.29 now, mostly in calls.
        if x is not self._input or index not in self._waiting:
            result = self.linear(x.reshape(-1, x.shape[-1]))
            self._input, self._result = x, result.view(*x.shape[:-1], result.shape[-1])
            self._waiting = set(range(len(self._columns)))
        assert self._result is not None
        found = self._result[..., self._columns[index]]
        self._waiting.discard(index)
        if not self._waiting:
            self._input = self._result = None
        return found


class MergedPart(nn.Module):
    """Replaces one of the merged layers."""

    def __init__(self, merged: MergedLinear, index: int, layer: nn.Linear) -> None:
        super().__init__()
        self.__dict__["merged"] = merged
        self._index = index
        self.out_features, self.in_features = layer.weight.shape
        self._dtype = layer.weight.dtype
        self.weight = AbsentWeight.like(layer.weight)
        self.bias = None if layer.bias is None else AbsentWeight.like(layer.bias)
        self.__dict__["part"] = part_of(layer)

    def forward(self, x: Tensor) -> Tensor:
        _check_dtype(x, self._dtype)
        merged: MergedLinear = self.__dict__["merged"]
        return merged.part(self._index, x)


class _GatedForward:
    """Computes down(activation(gate(x)) * up(x)) in place of a module's own forward pass."""

    def __init__(self, module: nn.Module, merged: MergedLinear, activation: str, ops: Ops) -> None:
        self._module = module
        self._merged = merged
        self._activation = activation
        self._ops = ops

    def __call__(self, x: Tensor) -> Tensor:
        gated = self._ops.gate(self._merged.linear(x.reshape(-1, x.shape[-1])), self._activation)
        down: nn.Module = self._module._modules["down_proj"]  # type: ignore[assignment]
        result: Tensor = down(gated)
        return result.view(*x.shape[:-1], result.shape[-1])


def merge_layers(module: nn.Module, quantization: str | None, ops: Ops) -> None:
    """Merge those layers of ``module`` that read the same input; ``quantization`` is that of :func:`make_linear`."""
    for names in _TOGETHER:
        layers = [module._modules.get(name) for name in names]
        if not _can_merge(layers):
            continue
        activation = _activation(module) if names == _MLP else None
        merged = _merge(layers, quantization)
        for index, (name, layer) in enumerate(zip(names, layers, strict=True)):
            assert isinstance(layer, nn.Linear)
            setattr(module, name, MergedPart(merged, index, layer))
        if activation is not None:
            module.__dict__["forward"] = _GatedForward(module, merged, activation, ops)


def _can_merge(layers: Sequence[nn.Module | None]) -> bool:
    if any(type(layer) is not nn.Linear for layer in layers):
        return False
    linears: list[Any] = list(layers)
    if not all(part is None or part.is_merged for part in map(part_of, linears)):
        return False
    kinds = {(layer.in_features, layer.bias is None, layer.weight.dtype, layer.weight.device) for layer in linears}
    return len(kinds) == 1


def _merge(layers: Sequence[Any], quantization: str | None) -> MergedLinear:
    weight = torch.cat([layer.weight.detach() for layer in layers])
    bias = None if layers[0].bias is None else torch.cat([layer.bias.detach() for layer in layers])
    return MergedLinear(make_layer(weight, bias, quantization), [layer.out_features for layer in layers])


_LARGE = (30.0, 1e3, 1e6)
"""The sizes of inputs at which a module is probed, beside those of a normal distribution: clamps, such as those of
gpt-oss at 7 and others at 1e4, act on nothing smaller."""


def _probe(size: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return inputs [3, size] of a normal distribution, the same each time."""
    return torch.randn(3, size, generator=torch.Generator().manual_seed(0)).to(device, dtype)


def _activation(module: Any) -> str | None:
    """Return the activation of a gated MLP, or None if ``module`` computes anything else."""
    children = dict(module.named_children())
    if children.keys() - {"act_fn"} != {*_MLP, "down_proj"} or type(children["down_proj"]) is not nn.Linear:
        return None
    if len(inspect.signature(module.forward).parameters) != 1:
        return None
    if module.down_proj.in_features != module.up_proj.out_features:  # of ranks that exchange what lies between
        return None
    weight = module.gate_proj.weight
    x = _probe(weight.shape[1], weight.device, weight.dtype)
    # To these sizes the probe brings gates and inputs of the gate, whatever the size of the weights is.
    largest = [float(layer(x).abs().max()) or 1.0 for layer in (module.gate_proj, module.up_proj)]
    x = torch.cat([x, *(x * (size / each) for size in _LARGE for each in largest)])
    expected, gate, up = module(x), module.gate_proj(x), module.up_proj(x)
    # The name of a module's class proves nothing, so its own result decides: the fused operation replaces only what it
    # equals bit for bit.
    for name, function in ACTIVATIONS.items():
        if torch.equal(module.down_proj(function(gate) * up), expected):
            return name
    return None


_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


class LinearModule(nn.Module):
    """Computes one of our linear layers where transformers has ``nn.Linear``."""

    def __init__(self, linear: Linear, weight: Tensor, bias: Tensor | None, part: ModulePart | None = None) -> None:
        """``part``: which part of a layer ``linear`` computes; None: all of it."""
        super().__init__()
        self._linear = linear
        self.__dict__["part"] = part
        self.out_features, self.in_features = weight.shape
        self._dtype = weight.dtype
        self.weight = AbsentWeight.like(weight)
        self.bias = None if bias is None else AbsentWeight.like(bias)

    def forward(self, x: Tensor) -> Tensor:
        shape = x.shape
        _check_dtype(x, self._dtype)
        return self._linear(x.reshape(-1, self.in_features)).view(*shape[:-1], self.out_features)


class NormModule(nn.Module):
    """Computes RMSNorm with our operation, for rows of the weight's dtype."""

    def __init__(self, weight: Tensor, eps: float, ops: Ops, own: nn.Module) -> None:
        """``own`` is transformers' module, which computes rows of another dtype."""
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self._eps = eps
        self._ops = ops
        self.__dict__["own"] = own

    def forward(self, x: Tensor) -> Tensor:
        # Mamba-2 keeps its residuals in float32 beside bfloat16 weights (residual_in_fp32); the operation would read
        # such rows as bfloat16 and return garbage without an error.
        if x.dtype is not self.weight.dtype:
            result: Tensor = self.__dict__["own"](x)
            return result
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
            if name == UNPACKED and is_selective_scan(parent):
                continue
            new = _replacement(module, None if module is head else quantization, ops)
            if new is not None:
                setattr(parent, name, new)
    if quantization is not None:
        report_share(_rounded(model), quantization)


def _rounded(model: nn.Module) -> Iterator[tuple[str, int, int]]:
    """Yield name, outputs and inputs of each linear layer of ``model`` for which a quantization was asked."""
    head = getattr(model, "get_output_embeddings", lambda: None)()
    for name, module in model.named_modules():
        if isinstance(module, LinearModule | MergedPart) and module is not head:
            yield name, module.out_features, module.in_features
        for experts in (each for each in vars(module).values() if isinstance(each, ModuleExperts)):
            yield from ((f"{name}.{part}", *shape) for part, shape in experts.shapes)


def _replacement(module: nn.Module, quantization: str | None, ops: Ops) -> nn.Module | None:
    if type(module) is nn.Linear or type(module) is Conv1D:
        weight = module.weight.detach() if type(module) is nn.Linear else module.weight.detach().t().contiguous()
        bias = None if module.bias is None else module.bias.detach()
        if (part := part_of(module)) is not None:
            seen = torch.empty(part.shape, dtype=weight.dtype, device="meta")
            return LinearModule(part.make(weight, bias, quantization), seen, bias, part)
        return LinearModule(make_layer(weight, bias, quantization), weight, bias)
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
    x = _probe(len(weight), weight.device, weight.dtype)
    x = torch.cat([x * size for size in (1e-3, 1.0, *_LARGE)])
    expected, tolerance = module(x), _TOLERANCE[weight.dtype]
    for candidate in (weight, (1.0 + weight.float()).to(weight.dtype)):
        if expected.dtype == x.dtype and torch.allclose(rms_norm(x, candidate, eps), expected, tolerance, tolerance):
            return NormModule(candidate, eps, ops, module)
    return None


class _Layer(NamedTuple):
    """Names where one of our layers is, and the linear layers of transformers that it computes. Of a layer that ranks
    exchange rows around, it is the product between."""

    owner: Any
    attribute: str
    modules: list[tuple[str, Any]]
    """Names in the model, and what stands in the place of the layers."""

    def get(self) -> Linear:
        found: Linear = getattr(self.owner, self.attribute)
        return found

    def set(self, linear: Linear) -> None:
        setattr(self.owner, self.attribute, linear)


def _layers_of(model: nn.Module) -> list[_Layer]:
    """Return our layers in a model."""
    found: dict[int, _Layer] = {}
    for name, module in model.named_modules():
        if isinstance(module, LinearModule):
            found[id(module)] = _Layer(*_product(module), [(name, module)])
        elif isinstance(module, MergedPart):
            merged = module.__dict__["merged"]
            found.setdefault(id(merged), _Layer(merged, "linear", [])).modules.append((name, module))
    return list(found.values())


def _product(module: LinearModule) -> tuple[Any, str]:
    """Return the object, and its attribute, that is the product of a layer without exchanges."""
    owner: Any = module
    attribute = "_linear"
    while isinstance(inner := getattr(owner, attribute), EXCHANGES):
        owner, attribute = inner, "_part"
    return owner, attribute


def _seen_by_adapters(name: str, module: Any) -> tuple[LayerPart, Dimension]:
    """Return what adapters see of a linear layer, and its inputs."""
    part: ModulePart | None = module.__dict__["part"]
    if part is None:
        return LayerPart(name, module.out_features, name, module.out_features), module.in_features
    columns = indices(part.inputs)
    adds_bias = columns is None or part.group.rank == 0
    rows, count, of_all = indices(part.outputs), length(part.outputs), total(part.outputs)
    return LayerPart(name, count, name, of_all, rows, columns=columns, adds_bias=adds_bias), part.inputs


def adapt_layers(model: Any, probe: Callable[[], int], adapt: Adapt, dtype: torch.dtype) -> None:
    """Let LoRA adapters change the linear layers that compute one row for each token of a step, and the output layer.
    ``probe`` computes some tokens with the part of the model below that, and returns how many."""
    # An adapter is found by the number of a row in the step. A layer that is called for some of the rows alone, as an
    # expert is, or several times, would give rows the adapters of others.
    layers, calls = _layers_of(model), dict[int, list[int]]()
    plain = [layer.get() for layer in layers]
    for number, layer in enumerate(layers):
        layer.set(_counting(plain[number], calls.setdefault(number, [])))
    try:
        count = probe()
    finally:
        for layer, linear in zip(layers, plain, strict=True):
            layer.set(linear)
    output = model.get_output_embeddings()
    for number, layer in enumerate(layers):
        is_output = layer.owner is output and layer.modules[0][0] == "lm_head"
        if is_output or (calls[number] == [count] and not any(".experts." in name for name, _ in layer.modules)):
            seen = [_seen_by_adapters(name, module) for name, module in layer.modules]
            layer.set(adapt.wrap(layer.get(), [part for part, _ in seen], seen[0][1], dtype))


def _counting(linear: Linear, calls: list[int]) -> Linear:
    """Return a layer that also notes how many rows it is called with."""

    def compute(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        calls.append(len(x))
        return linear(x, dtype)

    return compute


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
        self._dtype = dtype
        self._plain: LinearModule | None = None
        output = model.get_output_embeddings()
        if isinstance(output, LinearModule):
            x = _probe(hidden_size, device, dtype)
            x = torch.cat([x * size for size in (1.0, *_LARGE)])
            if torch.equal(output(x).float(), self._through_model(x)):
                self._plain = output

    def __call__(self, hidden: Tensor) -> Tensor:
        """Turn hidden states [R, hidden_size] into float32 logits [R, vocab_size]."""
        if self._plain is None or hidden.dtype is not self._dtype:  # float32 rows: the model rounds them itself
            return self._through_model(hidden)
        logits: Tensor = self._plain(hidden)
        return logits.float()

    def _through_model(self, hidden: Tensor) -> Tensor:
        self._body.__dict__["hidden"] = hidden[None]
        logits: Tensor = self._shell(input_ids=self._ids.expand(1, len(hidden)), use_cache=False).logits[0]
        self._body.__dict__["hidden"] = None
        return logits.float()
