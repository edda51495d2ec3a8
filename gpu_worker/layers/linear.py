"""Loads linear layers, packed for the CPU if that is possible."""

import logging
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from tokenloom.process.fall_backs import OF_PROCESS

from ..checkpoint.files.quantized_weight import (
    Float4Weight,
    FloatWeight,
    PackedFloats4,
    PackedWeight,
    QuantizedWeight,
    round_to_4_bits,
    round_to_8_bits,
    take_part,
)
from ..checkpoint.layer_state import LayerState, check_state, present, shapes_of
from ..checkpoint.model_config import FP8, INT4, INT8_DYNAMIC
from ..checkpoint.quantization.small_floats import PackedFloats
from ..checkpoint.weights import Checkpoint
from ..checkpoint.weights import Linear as Linear
from ..kernels.compiler import KernelsUnavailable, warn_unavailable
from ..kernels.library import computes_fp8, uses_triton
from ..parallel.group import ALONE, RankGroup
from ..parallel.sharding import Dimension, length, total
from .fp8_linear import MULTIPLE, Fp8Linear, WidenedLinear, can_round, round_weight
from .panel_linear import PackedLinear, PanelLinear, can_pack, outruns_onednn
from .quantized_linear import (
    GROUP,
    Int8Linear,
    QuantizedLinear,
    SharedInt8Linear,
    make_shared_int8,
    round_rows,
    rounds_rows,
)

log = logging.getLogger(__name__)
Cut: TypeAlias = tuple[Dimension, Dimension]
"""The outputs and inputs of a weight that a rank has."""


class PlainLinear:
    """Computes the product with PyTorch."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight = weight
        self._bias = bias

    def __call__(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        result = F.linear(x, self._weight, self._bias)
        return result if dtype is None else result.to(dtype)

    def unpacked(self) -> Tensor:
        """Return the weight [out, in]."""
        return self._weight

    def state(self) -> LayerState:
        return LayerState([self._weight, *present(self._bias)], [])

    def with_state(self, state: LayerState) -> Linear:
        check_state(state, shapes_of(self.state().tensors), 0)
        weight, *bias = (each.to(self._weight.device) for each in state.tensors)
        return PlainLinear(weight, bias[0] if bias else None)

    def take(self, other: Linear) -> Linear:
        return other


class SummedLinear:
    """Adds the products of all ranks, of which each has a part of the inputs."""

    def __init__(self, part: Linear, group: RankGroup) -> None:
        self._part = part
        self._group = group

    def __call__(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        return self._group.all_reduce(self._part(x, dtype))


def make_linear(weight: Tensor, bias: Tensor | None = None, quantization: str | None = None) -> Linear:
    """Make a layer of ``weight`` [out, in] and ``bias`` [out] or None; packing, if possible, copies the weight."""
    return _make_joined([weight], bias, quantization)


def _make_joined(parts: Sequence[Tensor], bias: Tensor | None, quantization: str | None) -> Linear:
    """Make a layer of weights [out, in] of which the outputs follow each other."""
    device, dtype = parts[0].device, parts[0].dtype
    if quantization is None and not uses_triton(device):
        return make_unquantized(parts, bias)
    weight = _merge(parts)
    if quantization == INT8_DYNAMIC:
        return Int8Linear(weight, bias)
    if quantization == INT4 and _can_group(weight):
        return make_quantized(round_to_4_bits(weight), bias, dtype)
    if quantization == FP8 and can_round(weight):
        return Fp8Linear(weight, bias)
    if uses_triton(device):
        from .triton_linear import TritonLinear

        return TritonLinear(weight, bias)
    return make_unquantized([weight], bias)


def make_unquantized(parts: Sequence[Tensor], bias: Tensor | None) -> Linear:
    """Make a layer that computes in the dtype of its weights [out, in], packed if that is possible; the outputs of the
    weights follow each other."""
    if not outruns_onednn(parts[0].dtype) and can_pack(parts[0].device, parts[0].dtype):
        return PackedLinear(_merge(parts), bias)
    try:
        return PanelLinear(parts, bias)
    except KernelsUnavailable:
        return make_plain(parts, bias)


def check_products(dtype: torch.dtype) -> None:
    """Raise ``ValueError`` unless kernels compute the products with weights of ``dtype``, whose rows depend on no other
    rows; those of PyTorch choose how to add by the number of rows."""
    layer = make_unquantized([torch.ones(1, 64, dtype=dtype)], None)
    if not isinstance(layer, PanelLinear):
        raise ValueError(f"batch_invariant: PyTorch computes products of {dtype} on this processor: choose float32")


def make_plain(parts: Sequence[Tensor], bias: Tensor | None) -> Linear:
    """Make a layer of the same parts that PyTorch computes."""
    return PlainLinear(_merge(parts), bias)


def make_output(weight: Tensor, quantization: str | None = None) -> Linear:
    """Make the layer of the logits: of 8 bits where the other layers have 4, because every logit counts."""
    if quantization == INT4 and _can_group(weight):
        # No later layer evens out an error of a logit. In Qwen3-0.6B this layer is a quarter of all weights, which is
        # what its 8 bits cost a single stream.
        return make_quantized(round_to_8_bits(weight), None, weight.dtype)
    return make_linear(weight)


def make_quantized(weight: QuantizedWeight, bias: Tensor | None, dtype: torch.dtype) -> Linear:
    """Make a layer that computes with the integers of ``weight``, or in ``dtype`` where no kernel can."""
    try:
        return QuantizedLinear(weight, bias)
    except KernelsUnavailable as error:
        if not weight.values.is_meta:  # which a check of new weights builds, and nothing computes with
            warn_unavailable(f"layers of {weight.values.dtype} computed in {dtype}: {error}")
        return make_linear(weight.dequantize(dtype), bias)


def _can_group(weight: Tensor) -> bool:
    """Return whether ``weight`` can be rounded; a layer without content or of odd inputs stays as it is."""
    return weight.device.type == "cpu" and weight.shape[1] % GROUP == 0


_STEPS = {INT4: (1, GROUP), FP8: (MULTIPLE, MULTIPLE)}
"""Of what outputs and inputs of a layer must be multiples, for a quantization to take it; others take each layer."""


def report_share(layers: Iterable[tuple[str, int, int]], quantization: str) -> None:
    """Log how much of the weights of ``layers``, each a name with its outputs and inputs, a quantization takes. Layers
    that keep their dtype are a fall-back of this process, with their names."""
    step_out, step_in = _STEPS.get(quantization, (1, 1))
    taken, total, left = 0, 0, Counter[str]()
    for name, outputs, inputs in layers:
        fits = outputs % step_out == 0 and inputs % step_in == 0
        total += outputs * inputs
        taken += outputs * inputs * fits
        if not fits:
            left[re.sub(r"\d+", "N", name)] += 1
    share = f"{quantization} takes {taken / max(total, 1):.0%} of the weights of linear layers"
    if not left:
        log.info("%s", share)
        return
    sizes = f"multiples of {step_in}" if step_out == 1 else f"and outputs multiples of {step_in}"
    names = ", ".join(f"{name} ({count})" if count > 1 else name for name, count in left.items())
    OF_PROCESS.begin("unquantized", f"{share}; these keep their dtype, because their inputs are not {sizes}: {names}")


def load_linear(
    checkpoint: Checkpoint,
    names: Sequence[str],
    inputs: Dimension,
    outputs: Sequence[Dimension],
    bias: bool,
    quantization: str | None = None,
    *,
    sums: bool = True,
    unbiased: Sequence[str] = (),
) -> Linear:
    """Load the layers ``names``, of ``outputs`` rows each, as one layer, so that one product reads the input once.
    ``unbiased``: those that have no bias though the others have one.

    If the ranks of the checkpoint's group have parts of ``inputs``, the layer adds their products; without ``sums`` the
    caller does.

    Weights that the checkpoint stores as integers are computed as such where a kernel fits them, unless
    ``quantization`` names another way or the model computes in float32. The checkpoint says whether adapters can change
    the layer.
    """
    if quantization is not None:
        name = "+".join((names[0], *(each.rpartition(".")[2] for each in names[1:])))
        checkpoint.rounded.append((name, sum(map(length, outputs)), length(inputs)))
    # Behind an adapter's change of a part there is a sum of floats in any case.
    join = Join(checkpoint.group, adds=sums and checkpoint.adapt is None)
    layer = _load_linear(checkpoint, names, inputs, outputs, bias, quantization, unbiased, join)
    if checkpoint.adapt is not None:
        # Before the sum over ranks: each rank adds the product of its own part of an adapter's matrices.
        parts = [checkpoint.part(name, rows, inputs) for name, rows in zip(names, outputs, strict=True)]
        layer = checkpoint.adapt(layer, parts, inputs, checkpoint.dtype)
    return _summed(layer, checkpoint, inputs) if sums else layer


class Join(NamedTuple):
    """Says how the ranks that have parts of a layer's inputs join their products."""

    group: RankGroup
    adds: bool = True
    """Whether the layer may add them itself. Otherwise who calls it does."""

    def bias(self, bias: Tensor | None, inputs: Dimension) -> Tensor | None:
        """Return the bias that this rank adds, before products are: added on each rank, it would count as often as
        there are ranks."""
        return bias if isinstance(inputs, int) or self.group.rank == 0 else None


ONE_RANK: Final = Join(ALONE)


def _summed(layer: Linear, checkpoint: Checkpoint, inputs: Dimension) -> Linear:
    is_added = isinstance(layer, SharedInt8Linear) and layer.adds
    return layer if isinstance(inputs, int) or is_added else SummedLinear(layer, checkpoint.group)


def _load_linear(
    checkpoint: Checkpoint,
    names: Sequence[str],
    inputs: Dimension,
    outputs: Sequence[Dimension],
    bias: bool,
    quantization: str | None,
    unbiased: Sequence[str],
    join: Join,
) -> Linear:
    pairs = list(zip(names, outputs, strict=True))
    biases = [_take_bias(checkpoint, name, rows, unbiased) for name, rows in pairs] if bias else []
    merged_bias = _merge(biases) if biases else None
    if quantization is None and checkpoint.dtype != torch.float32:
        taken = [checkpoint.take_packed(f"{name}.weight", total(rows), total(inputs)) for name, rows in pairs]
        packed = [each for each in taken if each is not None]
        if len(packed) == len(pairs):
            cuts = [(rows, inputs) for rows in outputs]
            if (layer := make_packed(packed, merged_bias, checkpoint.device, cuts, join)) is not None:
                return layer
    if quantization in ROUNDS_ROWS and join.group.size > 1:
        weight = _merge([checkpoint.take(f"{name}.weight", rows, total(inputs)) for name, rows in pairs])
        return make_part(weight, (sum(map(total, outputs)), inputs), merged_bias, quantization, join)
    weights = [checkpoint.take(f"{name}.weight", rows, inputs) for name, rows in pairs]
    return _make_joined(weights, join.bias(merged_bias, inputs), quantization)


ROUNDS_ROWS = (INT8_DYNAMIC, FP8)
"""Quantizations that give each row of a weight, and of inputs, a scale by its largest number: ranks that have parts of
it need the one of all parts."""


def make_part(
    weight: Tensor, whole: tuple[int, Dimension], bias: Tensor | None, quantization: str, join: Join
) -> Linear:
    """Make the layer of a rank of several from the rows of ``weight`` that it has, [own outputs, all inputs].
    ``whole``: the outputs of all ranks, and which inputs this rank has."""
    outputs, inputs = whole
    cut = (len(weight), inputs)
    if quantization == INT8_DYNAMIC:
        values, scales = round_rows(weight)
        if isinstance(inputs, int):
            return Int8Linear(values, bias, scales, by_row=rounds_rows(outputs, inputs))
        return make_shared_int8(take_part(values, cut), scales, bias, total(inputs), join.group, adds=join.adds)
    part, partial = take_part(weight, cut), join.bias(bias, inputs)
    if not can_round(part):
        return _make_joined([part], partial, quantization)
    values, scales = round_weight(weight)
    values = take_part(values.view(torch.uint8), cut).view(values.dtype)  # torch joins no parts of such floats
    return Fp8Linear(values, partial, scales, ALONE if isinstance(inputs, int) else join.group)


def _take_bias(checkpoint: Checkpoint, name: str, rows: Dimension, unbiased: Sequence[str]) -> Tensor:
    if name in unbiased:
        return torch.zeros(length(rows), dtype=checkpoint.dtype, device=checkpoint.device)
    return checkpoint.take(f"{name}.bias", rows)


def load_conv1d(
    checkpoint: Checkpoint, name: str, inputs: Dimension, outputs: Dimension, quantization: str | None = None
) -> Linear:
    """Load GPT-2's linear layer, which is stored as [in, out] and always has a bias."""
    join, bias = Join(checkpoint.group), checkpoint.take(f"{name}.bias", outputs)
    if quantization is not None:
        checkpoint.rounded.append((name, length(outputs), length(inputs)))
    if quantization in ROUNDS_ROWS and join.group.size > 1:
        weight = checkpoint.take(f"{name}.weight", total(inputs), outputs).t().contiguous()
        layer = make_part(weight, (total(outputs), inputs), bias, quantization, join)
    else:
        weight = checkpoint.take(f"{name}.weight", inputs, outputs).t().contiguous()
        layer = make_linear(weight, join.bias(bias, inputs), quantization)
    return _summed(layer, checkpoint, inputs)


def make_packed(
    packed: Sequence[PackedWeight],
    bias: Tensor | None,
    device: torch.device,
    cuts: Sequence[Cut] | None = None,
    join: Join = ONE_RANK,
) -> Linear | None:
    """Make one layer of weights that are stored in few bits, and whose outputs follow each other, which keeps them so;
    None if no kernel fits all of them. ``cuts``: the outputs and inputs of each that this rank has; None: all."""
    cuts = [each.shape for each in packed] if cuts is None else cuts
    partial = join.bias(bias, cuts[0][1])
    if device.type != "cpu":  # the kernels would read the device's addresses as the host's
        return _make_fp8(packed, partial, device, cuts) or _make_grouped(packed, partial, device, cuts)
    floats = [(each.floats(), cut) for each, cut in zip(packed, cuts, strict=True) if isinstance(each, PackedFloats)]
    weights = [each.part(*cut) for each, cut in floats if each is not None]
    try:
        if len(weights) == len(packed):
            return WidenedLinear(weights, partial)
        by_row = _make_by_row(packed, bias, cuts, join)
        return _make_integers(packed, partial, cuts) if by_row is None else by_row
    except KernelsUnavailable as error:
        if device.type != "meta":
            warn_unavailable(f"quantized layers are unpacked at load: {error}")
        return None


def _make_fp8(
    packed: Sequence[PackedWeight], bias: Tensor | None, device: torch.device, cuts: Sequence[Cut]
) -> Linear | None:
    """Make a layer of 8-bit floats with a scale for each output, as they are stored, for the tensor cores of a GPU;
    None: it has none for them, or the weights are not made for that."""
    # A rank with a part of the inputs would have to know the largest of a row, which others may not compute.
    if not isinstance(cuts[0][1], int):
        return None
    floats = [each.floats() for each in packed if isinstance(each, PackedFloats) and each.rounds_inputs]
    weights = [each for each in floats if each is not None and each.scales.shape[1] == 1]
    if len(weights) < len(packed) or not computes_fp8(device):
        return None
    pairs = list(zip(weights, cuts, strict=True))
    # As bytes: torch joins no 8-bit floats.
    values = _merge([take_part(each.values.view(torch.uint8), cut) for each, cut in pairs])
    scales = _merge([take_part(each.scales, (cut[0], 1)) for each, cut in pairs]).flatten()
    if not can_round(values):
        return None
    return Fp8Linear(values.to(device).view(torch.float8_e4m3fn), bias, scales.to(device))


def _make_grouped(
    packed: Sequence[PackedWeight], bias: Tensor | None, device: torch.device, cuts: Sequence[Cut]
) -> Linear | None:
    """Make a layer of 4-bit integers or 8-bit floats in groups, as they are stored, for a GPU; None: it has no kernel
    for them."""
    if not uses_triton(device):
        return None
    from .triton_linear import GroupedLinear

    weight: FloatWeight | QuantizedWeight | None = _merge_floats(packed, cuts)
    if weight is not None and not computes_fp8(device):
        return None
    groups = {each.group for each in packed}
    if weight is None and len(groups) == 1 and None not in groups and all(each.bits == 4 for each in packed):
        weight = _merge_quantized([each.quantized().part(*cut) for each, cut in zip(packed, cuts, strict=True)])
    try:
        return None if weight is None else GroupedLinear(weight, bias, device)
    except KernelsUnavailable as error:
        warn_unavailable(f"quantized layers are unpacked at load: {error}")
        return None


def _merge_floats(packed: Sequence[PackedWeight], cuts: Sequence[Cut]) -> FloatWeight | None:
    """Return weights of 8-bit floats whose outputs follow each other as one; None: they are others, or differ in their
    groups."""
    floats = [(each.floats(), cut) for each, cut in zip(packed, cuts, strict=True) if isinstance(each, PackedFloats)]
    parts = [each.part(*cut) for each, cut in floats if each is not None]
    if len(parts) < len(packed) or len({(each.group, each.scales.shape[1]) for each in parts}) > 1:
        return None
    values = _merge([each.values.view(torch.uint8) for each in parts]).view(parts[0].values.dtype)  # joined as bytes
    return FloatWeight(values, _merge([each.scales for each in parts]), parts[0].group)


def _make_by_row(packed: Sequence[PackedWeight], bias: Tensor | None, cuts: Sequence[Cut], join: Join) -> Linear | None:
    """Make a layer of integers for inputs that are rounded by row; None: the weights were not made for that."""
    inputs, own = packed[0].shape[1], cuts[0][1]
    by_channel = all(each.bits == 8 and each.group == inputs and not each.has_offsets for each in packed)
    if not by_channel or not all(each.rounds_inputs for each in packed):
        return None
    weights = [each.quantized().part(*cut) for each, cut in zip(packed, cuts, strict=True)]
    values, scales = _merge([each.values for each in weights]), _merge([each.scales for each in weights]).flatten()
    if not isinstance(own, int):
        return make_shared_int8(values, scales, bias, inputs, join.group, adds=join.adds)
    by_row = rounds_rows(sum(each.shape[0] for each in packed), inputs)
    return Int8Linear(values, bias, scales, by_row=by_row)


def _make_integers(packed: Sequence[PackedWeight], bias: Tensor | None, cuts: Sequence[Cut]) -> Linear | None:
    pairs = list(zip(packed, cuts, strict=True))
    floats = [each.whole().part(*cut) for each, cut in pairs if isinstance(each, PackedFloats4)]
    groups = {each.group for each in packed}
    if len(floats) < len(packed) and (len(groups) > 1 or (group := groups.pop()) is None or group % GROUP):
        return None
    if len(floats) == len(packed):
        merged = (_merge([each.blocks for each in floats]), _merge([each.exponents for each in floats]))
        return QuantizedLinear(Float4Weight(*merged), bias)
    # A rank unpacks the integers of one whole matrix, and keeps its part of them.
    return QuantizedLinear(_merge_quantized([each.quantized().part(*cut) for each, cut in pairs]), bias)


def _merge_quantized(weights: list[QuantizedWeight]) -> QuantizedWeight:
    """Return weights of the same inputs and groups as one."""
    offsets = None
    if any(each.offsets is not None for each in weights):
        # GGUF files mix types within a layer: V often has more bits than Q and K, and only some types have offsets.
        offsets = _merge([torch.zeros_like(each.scales) if each.offsets is None else each.offsets for each in weights])
    values, scales = _merge([each.values for each in weights]), _merge([each.scales for each in weights])
    return QuantizedWeight(values, scales, offsets, weights[0].group)


def _merge(tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))
