"""Reads GPTQ checkpoints: integers packed along the inputs, scales and zero points by group, inputs in any order.

For a layer of ``in`` inputs and ``out`` outputs the file holds ``qweight`` int32 [in * bits / 32, out], ``qzeros``
int32 [groups, out * bits / 32], ``scales`` [groups, out] and ``g_idx`` int32 [in], the group of each input.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..files.config_reader import ConfigReader
from ..files.quantized_weight import unpack_words
from .scheme import Codes, Found, TensorFiles, check_part, find_layers, groups_of, packed_codes, part_shape

_FORMATS = {"gptq": 1, "gptq_v2": 0}
"""What is added to a stored zero point. The first version stores every zero point less one."""

_HARMLESS_NAMES = """
    desc_act act_group_aware static_groups true_sequential damp_percent damp_auto_increment model_name_or_path
    model_file_base_name model_seqlen max_input_length block_name_to_quantize module_name_preceding_first_block
    modules_in_block_to_quantize batch_size pad_token_id cache_block_outputs use_cuda_fp16 use_exllama exllama_config
    disable_exllama backend tokenizer dataset meta quantizer mse iters nsamples seqlen lr minmax_lr provider
    autoround_version low_gpu_mem_usage enable_quanted_input enable_minmax_tuning scale_dtype
    """
HARMLESS = frozenset(_HARMLESS_NAMES.split())
"""Describe how the weights were computed or which kernel of another program reads them. The order of the inputs
(``desc_act``) is read from the tensor ``g_idx``."""


@dataclass(frozen=True, slots=True)
class Gptq:
    """Fulfils :class:`.scheme.Scheme`."""

    bits: int
    group_size: int
    symmetric: bool
    zero_shift: int
    """What is added to a stored zero point."""

    @property
    def name(self) -> str:
        return f"gptq-int{self.bits}"

    def find(self, files: TensorFiles) -> Mapping[str, Found]:
        return find_layers(files, ".qweight", self._find)

    def _find(self, files: TensorFiles, layer: str) -> Found:
        parts = {part: f"{layer}.{part}" for part in ("qweight", "qzeros", "scales", "g_idx")}
        per_word = 32 // self.bits
        words, outputs = part_shape(files, parts["qweight"])
        inputs = words * per_word
        group, num_groups = groups_of(inputs, self.group_size)
        check_part(files, parts["qzeros"], num_groups, outputs // per_word)
        check_part(files, parts["scales"], num_groups, outputs)
        order = None
        if parts["g_idx"] in files.names:
            check_part(files, parts["g_idx"], inputs)
            order = files.read(parts["g_idx"])
            if order.numel() and (int(order.min()) < 0 or int(order.max()) >= num_groups):
                name = parts["g_idx"]
                raise ValueError(f"{name} names a group that scales does not have: it must be below {num_groups}")

        def read(first: int, last: int) -> Codes:
            codes = unpack_words(files.read(parts["qweight"])[:, first:last].t(), self.bits)
            zeros = self._zeros(files.read(parts["qzeros"]), parts["qzeros"])[:, first:last].t()
            return Codes(codes, zeros, files.read(parts["scales"])[:, first:last].t())

        packed = packed_codes((outputs, inputs), self.bits, group, not self.symmetric, read, order)
        return Found(packed, tuple(parts.values()))

    def _zeros(self, words: Tensor, name: str) -> Tensor:
        """Return the zero points [groups, out] uint8. Those of symmetric checkpoints are in the middle by definition;
        some say the first version and store the second."""
        stored, middle = unpack_words(words, self.bits), 1 << (self.bits - 1)
        if self.symmetric:
            if not bool((stored == middle - 1).all()) and not bool((stored == middle).all()):
                raise ValueError(f"{name} holds other zero points than {middle}, but quantization_config: sym is true")
            return torch.full_like(stored, middle)
        return stored + self.zero_shift & (1 << self.bits) - 1


def read_gptq(reader: ConfigReader) -> Gptq:
    """Read the entries of a ``quantization_config`` whose method is gptq. Raises ``ValueError`` naming a wrong one."""
    bits, group_size = reader.take_int("bits"), reader.take("group_size", 128)
    if bits not in (4, 8):
        raise reader.error("bits", "must be 4 or 8")
    if group_size != -1:
        group_size = reader.take_int("group_size", 128)
    if reader.take("dynamic"):
        raise reader.error("dynamic", "is not supported: all layers must have the same number of bits")
    if reader.take("lm_head"):
        raise reader.error("lm_head", "must be false: quantized output layers are not supported")
    if reader.take("pack_dtype", "int32") != "int32":
        raise reader.error("pack_dtype", "must be int32")
    if reader.take("data_type", "int") != "int":
        raise reader.error("data_type", "must be int")
    legacy = reader.take("format", "gptq")
    spelled = reader.take("checkpoint_format") or legacy or "gptq"
    if spelled not in _FORMATS:
        raise reader.error("checkpoint_format", f"must be one of {', '.join(_FORMATS)}")
    return Gptq(bits, group_size, reader.take_bool("sym", True), _FORMATS[spelled])
