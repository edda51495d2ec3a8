"""Reads checkpoints of integers with a scale for each group of inputs, in the layouts of GPTQ and of AWQ.

For a layer of ``in`` inputs and ``out`` outputs, a file of GPTQ holds ``qweight`` int32 [in * bits / 32, out], packed
along the inputs, ``qzeros`` int32 [groups, out * bits / 32], ``scales`` [groups, out] and ``g_idx`` int32 [in], the
group of each input. In the "gemm" layout of AWQ, 4-bit integers are packed along the outputs, in an order of their own:
``qweight`` int32 [in, out / 8], ``qzeros`` int32 [groups, out / 8] and ``scales`` [groups, out].
"""

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from ..files.quantized_weight import unpack_words
from .entries import AWQ_BITS, Awq, Gptq
from .scheme import Codes, Found, TensorFiles, check_part, find_layers, groups_of, packed_codes, part_shape, read_order


def find_gptq(entries: Gptq, files: TensorFiles) -> Mapping[str, Found]:
    """Return the quantized weights, as :mod:`.scheme` says."""
    return find_layers(files, ".qweight", partial(_find, entries))


def _find(entries: Gptq, files: TensorFiles, layer: str) -> Found:
    parts = {part: f"{layer}.{part}" for part in ("qweight", "qzeros", "scales", "g_idx")}
    per_word = 32 // entries.bits
    words, outputs = part_shape(files, parts["qweight"])
    inputs = words * per_word
    group, num_groups = groups_of(inputs, entries.group_size)
    check_part(files, parts["qzeros"], num_groups, outputs // per_word)
    check_part(files, parts["scales"], num_groups, outputs)
    order = read_order(files, parts["g_idx"], inputs, num_groups)

    def read(first: int, last: int) -> Codes:
        codes = unpack_words(files.read(parts["qweight"])[:, first:last].t(), entries.bits)
        zeros = _zeros(entries, files.read(parts["qzeros"]), parts["qzeros"])[:, first:last].t()
        return Codes(codes, zeros, files.read(parts["scales"])[:, first:last].t())

    packed = packed_codes((outputs, inputs), entries.bits, group, not entries.symmetric, read, order)
    return Found(packed, tuple(parts.values()))


def _zeros(entries: Gptq, words: Tensor, name: str) -> Tensor:
    """Return the zero points [groups, out] uint8. Those of symmetric checkpoints are in the middle by definition;
    some say the first version and store the second."""
    stored, middle = unpack_words(words, entries.bits), 1 << (entries.bits - 1)
    if entries.symmetric:
        if not bool((stored == middle - 1).all()) and not bool((stored == middle).all()):
            raise ValueError(f"{name} holds other zero points than {middle}, but quantization_config: sym is true")
        return torch.full_like(stored, middle)
    return stored + entries.zero_shift & (1 << entries.bits) - 1


_PER_WORD = 8
_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""At which place of a word, from the lowest bits, each of its eight outputs is stored."""


def find_awq(entries: Awq, files: TensorFiles) -> Mapping[str, Found]:
    """Return the quantized weights, as :mod:`.scheme` says."""
    return find_layers(files, ".qweight", partial(_find_awq, entries))


def _find_awq(entries: Awq, files: TensorFiles, layer: str) -> Found:
    weight, zeros, scales = (f"{layer}.{part}" for part in ("qweight", "qzeros", "scales"))
    inputs, words = part_shape(files, weight)
    outputs = words * _PER_WORD
    group, num_groups = groups_of(inputs, entries.group_size)
    check_part(files, scales, num_groups, outputs)
    if entries.zero_point:
        check_part(files, zeros, num_groups, words)

    def read(first: int, last: int) -> Codes:
        some = slice(first // _PER_WORD, -(-last // _PER_WORD))
        codes = _unpack_awq(files.read(weight)[:, some])
        zero = _unpack_awq(files.read(zeros)[:, some]) if entries.zero_point else None
        return Codes(codes, zero, files.read(scales)[:, first:last].t())

    packed = packed_codes((outputs, inputs), AWQ_BITS, group, entries.zero_point, read)
    return Found(packed, (weight, zeros, scales))


def _unpack_awq(words: Tensor) -> Tensor:
    """Return int32 words [n, m] as uint8 [8 * m, n]: outputs first."""
    codes = unpack_words(words, AWQ_BITS)
    ordered = codes.view(len(codes), -1, _PER_WORD)[..., _PLACES]
    return ordered.flatten(1).t().contiguous()
