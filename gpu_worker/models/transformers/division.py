"""Divides transformers' modules among the ranks of an engine: linear layers and experts as the tensor-parallel plan of
their class says, and layers among the stages of a pipeline."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...checkpoint.files.quantized_weight import take_part
from ...layers.linear import ROUNDS_ROWS, Join, Linear, SummedLinear, make_part
from ...layers.quantized_linear import SharedInt8Linear
from ...parallel.group import RankGroup
from ...parallel.sharding import Dimension, RankPlace, Shard, length
from .paged_attention import UnservableModel
from .stored_weights import make_layer

_BY_OUTPUT = {"colwise": False, "colwise_gather_output": True}
"""Styles that cut a layer's outputs, and whether every rank then gets all of them."""
_BY_INPUT = {"rowwise": False, "rowwise_split_input": True}
"""Styles that cut a layer's inputs, and whether every rank is given all of them."""
_WHOLE = ("replicated_with_grad_allreduce", "embedding_rowwise", "replicate")
"""Styles of what is whole here on every rank, embeddings among them."""
_EXPERTS = {"gate_up_proj": "packed_colwise", "down_proj": "rowwise"}
"""The styles of the stacked matrices of experts, [experts, out, in], by their names."""
_ATTRIBUTE = "tokenloom_part"


@dataclass(frozen=True, slots=True)
class ModulePart:
    """Says which part of a linear layer a rank has."""

    whole: Tensor
    """The weight of all ranks, [out, in]."""
    outputs: Dimension
    inputs: Dimension
    gathers: bool
    """Whether every rank gets the outputs of all."""
    splits: bool
    """Whether the layer is given the inputs of all."""
    group: RankGroup

    @property
    def shape(self) -> tuple[int, int]:
        """Return how many outputs and inputs the module has, seen from the modules around it."""
        outputs, inputs = self.whole.shape
        return outputs if self.gathers else length(self.outputs), inputs if self.splits else length(self.inputs)

    @property
    def is_merged(self) -> bool:
        """Return whether it may be computed as one with others that read the same input."""
        return isinstance(self.inputs, int) and not self.gathers

    def make(self, weight: Tensor, bias: Tensor | None, quantization: str | None) -> Linear:
        """Make the layer from this rank's part of the weight, and the part of the bias that belongs to it."""
        if isinstance(self.inputs, int):
            layer = make_layer(weight, bias, quantization)
            return GatheredLinear(layer, self.group) if self.gathers else layer
        join = Join(self.group)
        if quantization in ROUNDS_ROWS:
            whole = self.whole.to(weight.device)
            layer = make_part(whole, (len(weight), self.inputs), bias, quantization, join)
        else:
            layer = make_layer(weight, join.bias(bias, self.inputs), quantization)
        if not isinstance(layer, SharedInt8Linear):
            layer = SummedLinear(layer, self.group)
        return SplitLinear(layer, self.inputs) if self.splits else layer


class GatheredLinear:
    """Returns the outputs of all ranks, of which each computes equally many."""

    def __init__(self, part: Linear, group: RankGroup) -> None:
        self._part, self._group = part, group

    def __call__(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        gathered = self._group.all_gather(self._part(x, dtype))
        return gathered.transpose(0, 1).reshape(len(x), -1)


class SplitLinear:
    """Gives a layer those of all inputs that this rank has."""

    def __init__(self, part: Linear, inputs: Dimension) -> None:
        self._part, self._inputs = part, inputs

    def __call__(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        return self._part(take_part(x, (len(x), self._inputs)), dtype)


EXCHANGES = (SplitLinear, SummedLinear, GatheredLinear)
"""Layers around a product of this rank, which is their ``_part``."""


def part_of(module: nn.Module) -> ModulePart | None:
    """Return which part of a layer this module is; None: it is whole."""
    part: ModulePart | None = module.__dict__.get(_ATTRIBUTE)
    return part


def plan_lack(plan: Mapping[str, str]) -> str:
    """Return why a tensor-parallel plan of transformers, a style by patterns of names, does not say how layers are
    divided here; empty: it does."""
    styles = {style for name, style in plan.items() if "*" in name}
    known = {*_BY_OUTPUT, *_BY_INPUT, *_WHOLE, "packed_colwise", "moe_tp_experts"}
    if not styles & _BY_INPUT.keys():
        return "has no tensor-parallel plan in transformers: leave out tensor_parallel_size"
    if others := sorted(styles - known):
        return f"has a tensor-parallel plan with {', '.join(others)}: leave out tensor_parallel_size"
    return ""


def divide_layers(model: Any, place: RankPlace, group: RankGroup, quantization: str | None) -> None:
    """Let each linear layer and experts module of ``model``, which may have no memory for its tensors, hold this rank's
    part, as the plan of its class says.

    Raises :class:`UnservableModel` naming what cannot be divided.
    """
    if lack := plan_lack(model.tp_plan or {}):
        raise UnservableModel(lack)
    plan, shard = model.tp_plan, Shard(place.tensor_rank, place.tensor_size)
    whole = (model.get_output_embeddings(), model.get_input_embeddings())
    for name, module in list(model.named_modules()):
        style = plan.get(_pattern(name))
        if style == "moe_tp_experts":
            _divide_experts(name, module, plan, shard, quantization)
            module.__dict__[_ATTRIBUTE] = group
        elif style in _BY_OUTPUT | _BY_INPUT and module not in whole:
            _divide_linear(name, module, style, shard, group, _head_size(model, name))


def _pattern(name: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)


def _head_size(model: nn.Module, name: str) -> int:
    """Return the size of the heads of which the outputs of an attention module's projections consist; 1: another."""
    size = getattr(model.get_submodule(name.rpartition(".")[0]), "head_dim", 1)
    return size if isinstance(size, int) else 1


def _divide_linear(name: str, module: Any, style: str, shard: Shard, group: RankGroup, head_size: int) -> None:
    if type(module) is not nn.Linear:
        raise UnservableModel(f"divides {name}, which is no linear layer: leave out tensor_parallel_size")
    outputs, inputs = module.weight.shape
    if outputs % head_size:  # of another kind, such as a gate for each head
        head_size = 1
    unit = shard.size * (head_size if style == "colwise" else 1)
    if (outputs if style in _BY_OUTPUT else inputs) % unit:
        what = f"{outputs // head_size} heads" if style == "colwise" and head_size > 1 else f"{outputs} x {inputs}"
        raise UnservableModel(f"has {what} in {name}, which tensor_parallel_size {shard.size} does not divide")
    by_output = style in _BY_OUTPUT
    own = shard.part((outputs if by_output else inputs) // shard.size)
    cut: tuple[Dimension, Dimension] = (own, inputs) if by_output else (outputs, own)
    gathers, splits = _BY_OUTPUT.get(style, False), _BY_INPUT.get(style, False)
    weight = module.weight.detach()
    module.__dict__[_ATTRIBUTE] = ModulePart(weight, *cut, gathers, splits, group)
    module.weight = nn.Parameter(take_part(weight, cut), requires_grad=False)
    if module.bias is not None:
        module.bias = nn.Parameter(take_part(module.bias.detach(), cut[:1]), requires_grad=False)
    module.out_features, module.in_features = module.weight.shape


def _divide_experts(name: str, module: Any, plan: dict[str, str], shard: Shard, quantization: str | None) -> None:
    styles = {part: plan.get(_pattern(f"{name}.{part}")) for part in _EXPERTS}
    is_odd = getattr(module, "is_transposed", True) or getattr(module, "has_bias", True)
    if styles != _EXPERTS or is_odd or getattr(module, "has_post_expert_norm", False):
        raise UnservableModel(f"has experts in {name} that are not divided: leave out tensor_parallel_size")
    if quantization in ROUNDS_ROWS:
        raise UnservableModel(f"has experts in {name}, which {quantization} does not divide: leave out one of them")
    inner = module.down_proj.shape[2]
    if inner % shard.size:
        raise UnservableModel(f"has {inner} rows of an expert, which tensor_parallel_size {shard.size} does not divide")
    part = shard.part(inner // shard.size)
    packed = torch.cat([take_part(half, (len(half), part)) for half in module.gate_up_proj.detach().chunk(2, dim=1)], 1)
    module.gate_up_proj = nn.Parameter(packed, requires_grad=False)
    down = take_part(module.down_proj.detach(), (*module.down_proj.shape[:2], part))
    module.down_proj = nn.Parameter(down, requires_grad=False)


class PassedLayer(nn.Module):
    """Stands for a layer of another stage: returns the hidden states that it is given."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        plain = (name for name in vars(layer) if not name.startswith("_") and name not in vars(self))
        self.__dict__.update({name: vars(layer)[name] for name in plain})  # what a body reads of its layers

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        return hidden_states


def stage_names(body: Any) -> tuple[list[str], str, list[str]]:
    """Return the names of the parts of ``body`` before its layers, of its layers, and of those behind them, as the
    pipeline plan of its class says. Raises :class:`UnservableModel` if it has none."""
    names = list(getattr(body, "pp_plan", None) or {})
    lists = [name for name in names if isinstance(getattr(body, name, None), nn.ModuleList)]
    if len(lists) != 1 or any(not isinstance(getattr(body, name, None), nn.Module) for name in names):
        raise UnservableModel("has no pipeline plan in transformers: leave out pipeline_parallel_size")
    at = names.index(lists[0])
    return names[:at], lists[0], names[at + 1 :]


@torch.inference_mode()
def divide_stages(body: Any, place: RankPlace, hidden_size: int) -> int:
    """Let ``body`` compute the layers of one stage, and what stands before or behind all layers where the stage is the
    first or the last. Returns how many layers that are.

    Raises :class:`UnservableModel` if the plan of its class does not say how, or the body changes hidden states between
    its layers.
    """
    before, layers, behind = stage_names(body)
    modules = list(getattr(body, layers))
    if place.num_stages > len(modules):
        raise UnservableModel(f"has {len(modules)} layers for pipeline_parallel_size {place.num_stages}")
    others = {name: getattr(body, name) for name in (*before, *behind)}
    for name in others:
        setattr(body, name, nn.Identity())
    setattr(body, layers, nn.ModuleList(map(PassedLayer, modules)))
    _check_passed(body, hidden_size)
    own = place.layers(len(modules))
    for number in own:
        getattr(body, layers)[number] = modules[number]
    for name in (*(before if place.stage == 0 else ()), *(behind if place.stage == place.num_stages - 1 else ())):
        setattr(body, name, others[name])
    return len(own)


def _check_passed(body: Any, hidden_size: int) -> None:
    """Raise :class:`UnservableModel` unless a body without layers returns the hidden states that it is given."""
    given = torch.randn(1, 3, hidden_size, generator=torch.Generator().manual_seed(0))
    positions = torch.arange(3)[None]
    try:
        found = body(inputs_embeds=given.clone(), position_ids=positions, use_cache=False).last_hidden_state
    except Exception as error:  # a module may fail in any way
        raise UnservableModel(
            f"has no stages: its body fails without layers ({type(error).__name__}: {error}); leave out "
            "pipeline_parallel_size"
        ) from error
    if found.shape != given.shape or not torch.equal(found, given):
        raise UnservableModel(
            "has no stages: its body changes hidden states outside its layers; leave out pipeline_parallel_size"
        )


class LoadingGroup:
    """Fulfils :class:`~...parallel.group.RankGroup`: exchanges nothing until :meth:`open`, so that a rank that looks at
    its modules while it loads them waits for no other, which may have failed. Shapes are those of an exchange."""

    def __init__(self, inner: RankGroup) -> None:
        self.rank, self.size = inner.rank, inner.size
        self._inner = inner
        self._is_open = False

    def open(self) -> None:
        """Exchange tensors with the other ranks from now on."""
        self._is_open = True

    def all_reduce(self, x: Tensor) -> Tensor:
        return self._inner.all_reduce(x) if self._is_open else x

    def all_max(self, x: Tensor) -> Tensor:
        return self._inner.all_max(x) if self._is_open else x

    def all_gather(self, x: Tensor) -> Tensor:
        return self._inner.all_gather(x) if self._is_open else torch.stack([x] * self.size)

    def gather_columns(self, x: Tensor, out: Tensor | None = None, *, width: int) -> None:
        if self._is_open:
            self._inner.gather_columns(x, out, width=width)
        elif out is not None:
            out.zero_()


def group_of(module: nn.Module) -> RankGroup | None:
    """Return the ranks that have parts of an experts module; None: it is whole."""
    group: RankGroup | None = module.__dict__.get(_ATTRIBUTE)
    return group
