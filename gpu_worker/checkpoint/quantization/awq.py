"""Reads AWQ checkpoints in the "gemm" layout: 4-bit integers packed along the outputs, in an order of their own.

For a layer of ``in`` inputs and ``out`` outputs the file holds ``qweight`` int32 [in, out / 8], ``qzeros`` int32
[groups, out / 8] and ``scales`` [groups, out].
"""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from ..files.config_reader import ConfigReader
from ..files.quantized_weight import unpack_words
from .scheme import Codes, Found, TensorFiles, check_part, find_layers, groups_of, packed_codes, part_shape

_BITS, _PER_WORD = 4, 8
_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""At which place of a word, from the lowest bits, each of its eight outputs is stored."""

_HARMLESS_NAMES = """
    backend do_fuse fuse_max_seq_len exllama_config modules_to_fuse modules_to_not_convert tokenizer dataset meta
    model_seqlen damp_percent desc_act act_group_aware true_sequential block_name_to_quantize max_input_length
    module_name_preceding_first_block batch_size pad_token_id cache_block_outputs modules_in_block_to_quantize quantizer
    """
HARMLESS = frozenset(_HARMLESS_NAMES.split())
"""Name kernels of other programs, how the weights were computed, or layers that are stored unquantized, which the
tensors show. Newer writers also write the entries of GPTQ's configuration that mean nothing here."""


@dataclass(frozen=True, slots=True)
class Awq:
    """Fulfils :class:`.scheme.Scheme`."""

    group_size: int
    zero_point: bool

    @property
    def name(self) -> str:
        return "awq-int4"

    def find(self, files: TensorFiles) -> Mapping[str, Found]:
        return find_layers(files, ".qweight", self._find)

    def _find(self, files: TensorFiles, layer: str) -> Found:
        weight, zeros, scales = (f"{layer}.{part}" for part in ("qweight", "qzeros", "scales"))
        inputs, words = part_shape(files, weight)
        outputs = words * _PER_WORD
        group, num_groups = groups_of(inputs, self.group_size)
        check_part(files, scales, num_groups, outputs)
        if self.zero_point:
            check_part(files, zeros, num_groups, words)

        def read(first: int, last: int) -> Codes:
            some = slice(first // _PER_WORD, -(-last // _PER_WORD))
            codes = _unpack(files.read(weight)[:, some])
            zero = _unpack(files.read(zeros)[:, some]) if self.zero_point else None
            return Codes(codes, zero, files.read(scales)[:, first:last].t())

        packed = packed_codes((outputs, inputs), _BITS, group, self.zero_point, read)
        return Found(packed, (weight, zeros, scales))


def read_awq(reader: ConfigReader) -> Awq:
    """Read the entries of a ``quantization_config`` whose method is awq. Raises ``ValueError`` naming a wrong one."""
    if reader.take_int("bits", _BITS) != _BITS:
        raise reader.error("bits", "must be 4")
    group_size = reader.take("group_size", 128)
    if group_size != -1:
        group_size = reader.take_int("group_size", 128)
    for name in ("version", "format", "checkpoint_format"):
        spelled = reader.take(name)
        if spelled is not None and str(spelled).lower() != "gemm":
            raise reader.error(name, "must be gemm, the one layout that is supported")
    if reader.take("lm_head"):
        raise reader.error("lm_head", "must be false: quantized output layers are not supported")
    reader.take_bool("sym", False)  # what zero_point also says
    return Awq(group_size, reader.take_bool("zero_point", True))


def _unpack(words: Tensor) -> Tensor:
    """Return int32 words [n, m] as uint8 [8 * m, n]: outputs first."""
    codes = unpack_words(words, _BITS)
    ordered = codes.view(len(codes), -1, _PER_WORD)[..., _PLACES]
    return ordered.flatten(1).t().contiguous()
