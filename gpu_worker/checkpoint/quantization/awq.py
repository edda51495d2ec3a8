"""Reads AWQ checkpoints in the "gemm" layout: 4-bit integers packed along the outputs, in an order of their own.

For a layer of ``in`` inputs and ``out`` outputs the file holds ``qweight`` int32 [in, out / 8], ``qzeros`` int32
[groups, out / 8] and ``scales`` [groups, out].
"""

from collections.abc import Mapping
from functools import partial

from torch import Tensor

from ..files.quantized_weight import unpack_words
from .entries import AWQ_BITS, Awq
from .scheme import Codes, Found, TensorFiles, check_part, find_layers, groups_of, packed_codes, part_shape

_PER_WORD = 8
_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""At which place of a word, from the lowest bits, each of its eight outputs is stored."""


def find_awq(entries: Awq, files: TensorFiles) -> Mapping[str, Found]:
    """Return the quantized weights, as :mod:`.scheme` says."""
    return find_layers(files, ".qweight", partial(_find, entries))


def _find(entries: Awq, files: TensorFiles, layer: str) -> Found:
    weight, zeros, scales = (f"{layer}.{part}" for part in ("qweight", "qzeros", "scales"))
    inputs, words = part_shape(files, weight)
    outputs = words * _PER_WORD
    group, num_groups = groups_of(inputs, entries.group_size)
    check_part(files, scales, num_groups, outputs)
    if entries.zero_point:
        check_part(files, zeros, num_groups, words)

    def read(first: int, last: int) -> Codes:
        some = slice(first // _PER_WORD, -(-last // _PER_WORD))
        codes = _unpack(files.read(weight)[:, some])
        zero = _unpack(files.read(zeros)[:, some]) if entries.zero_point else None
        return Codes(codes, zero, files.read(scales)[:, first:last].t())

    packed = packed_codes((outputs, inputs), AWQ_BITS, group, entries.zero_point, read)
    return Found(packed, (weight, zeros, scales))


def _unpack(words: Tensor) -> Tensor:
    """Return int32 words [n, m] as uint8 [8 * m, n]: outputs first."""
    codes = unpack_words(words, AWQ_BITS)
    ordered = codes.view(len(codes), -1, _PER_WORD)[..., _PLACES]
    return ordered.flatten(1).t().contiguous()
