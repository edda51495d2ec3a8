"""Reads the ``quantization_config`` of a checkpoint: which method stored its linear layers, and how. It does not import
torch: the checks before a start read the same entries as the engine.

A method is added here as a class of its entries, a function that reads them, and a row of ``METHODS``; what finds and
unpacks its tensors is a module of its own beside this one, with a row in ``directory_source``. What a reader cannot
take it refuses with ``reader.error``, which names entry, wanted and found value: preflight and engine then both say so.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tokenloom.gguf.gguf_file import is_gguf

from ..files.config_reader import ConfigReader

_GPTQ_FORMATS = {"gptq": 1, "gptq_v2": 0}
"""What is added to a stored zero point. The first version stores every zero point less one."""

_GPTQ_NAMES = """
    desc_act act_group_aware static_groups true_sequential damp_percent damp_auto_increment model_name_or_path
    model_file_base_name model_seqlen max_input_length block_name_to_quantize module_name_preceding_first_block
    modules_in_block_to_quantize batch_size pad_token_id cache_block_outputs use_cuda_fp16 use_exllama exllama_config
    disable_exllama backend tokenizer dataset meta quantizer mse iters nsamples seqlen lr minmax_lr provider
    autoround_version low_gpu_mem_usage enable_quanted_input enable_minmax_tuning scale_dtype
    """
_GPTQ_HARMLESS = frozenset(_GPTQ_NAMES.split())
"""Describe how the weights were computed or which kernel of another program reads them. The order of the inputs
(``desc_act``) is read from the tensor ``g_idx``."""


@dataclass(frozen=True, slots=True)
class Gptq:
    """Holds the entries of GPTQ."""

    bits: int
    group_size: int
    symmetric: bool
    zero_shift: int
    """What is added to a stored zero point."""

    @property
    def name(self) -> str:
        return f"gptq-int{self.bits}"


def _read_gptq(reader: ConfigReader) -> Gptq:
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
    if not isinstance(spelled, str) or spelled not in _GPTQ_FORMATS:
        raise reader.error("checkpoint_format", f"must be one of {', '.join(_GPTQ_FORMATS)}")
    return Gptq(bits, group_size, reader.take_bool("sym", True), _GPTQ_FORMATS[spelled])


AWQ_BITS = 4
_AWQ_NAMES = """
    backend do_fuse fuse_max_seq_len exllama_config modules_to_fuse modules_to_not_convert tokenizer dataset meta
    model_seqlen damp_percent desc_act act_group_aware true_sequential block_name_to_quantize max_input_length
    module_name_preceding_first_block batch_size pad_token_id cache_block_outputs modules_in_block_to_quantize quantizer
    """
_AWQ_HARMLESS = frozenset(_AWQ_NAMES.split())
"""Name kernels of other programs, how the weights were computed, or layers that are stored unquantized, which the
tensors show. Newer writers also write the entries of GPTQ's configuration that mean nothing here."""


@dataclass(frozen=True, slots=True)
class Awq:
    """Holds the entries of AWQ in the "gemm" layout."""

    group_size: int
    zero_point: bool

    @property
    def name(self) -> str:
        return "awq-int4"


def _read_awq(reader: ConfigReader) -> Awq:
    """Read the entries of a ``quantization_config`` whose method is awq. Raises ``ValueError`` naming a wrong one."""
    if (bits := _either(reader, "bits", "w_bit")) and reader.take_int(bits) != AWQ_BITS:
        raise reader.error(bits, "must be 4")
    group, group_size = _either(reader, "group_size", "q_group_size"), 128
    if group and (group_size := reader.take(group)) != -1:
        group_size = reader.take_int(group)
    for name in ("version", "format", "checkpoint_format"):
        spelled = reader.take(name)
        if spelled is not None and str(spelled).lower() != "gemm":
            raise reader.error(name, "must be gemm, the one layout that is supported")
    if reader.take("lm_head"):
        raise reader.error("lm_head", "must be false: quantized output layers are not supported")
    reader.take_bool("sym", False)  # what zero_point also says
    return Awq(group_size, reader.take_bool("zero_point", True))


def _either(reader: ConfigReader, name: str, older: str) -> str | None:
    """Return which of two names of an entry the file holds; None: neither. The older one is llm-awq's and AutoAWQ's.

    Raises ``ValueError`` if they differ.
    """
    held = [each for each in (name, older) if reader.take(each) is not None]
    if len(held) > 1 and reader.take(name) != reader.take(older):
        raise reader.error(older, f"must equal {name} = {reader.take(name)}")
    return held[0] if held else None


_FP8_HARMLESS = frozenset(
    ("activation_scheme", "modules_to_not_convert", "ignored_layers", "dequantize", "kv_cache_scheme")
)
"""Say how activations and the KV cache were rounded, or which layers are stored unquantized, which the tensors show."""


@dataclass(frozen=True, slots=True)
class Fp8:
    """Holds the entries of FP8."""

    block: tuple[int, int] | None
    """How many outputs and inputs share a scale; None: the scale's own shape says tensor or channel."""

    @property
    def name(self) -> str:
        return "fp8"


def _read_fp8(reader: ConfigReader) -> Fp8:
    """Read the entries of a ``quantization_config`` whose method is fp8. Raises ``ValueError`` naming a wrong one."""
    if reader.take("fmt", "e4m3") not in (None, "e4m3", "float8_e4m3fn"):
        raise reader.error("fmt", "must be e4m3")
    if reader.take("scale_fmt") not in (None, "float", "ue8m0"):
        raise reader.error("scale_fmt", "must be float or ue8m0")
    if reader.take("expert_dtype", "fp8") not in (None, "fp8"):
        raise reader.error("expert_dtype", "must be fp8")
    return Fp8(_read_block(reader, "weight_block_size"))


def _read_block(reader: ConfigReader, name: str) -> tuple[int, int] | None:
    """Return the entry ``name``, a list of two positive integers, or None if it is absent or null."""
    block = reader.take(name)
    if block is None:
        return None
    if not isinstance(block, list) or len(block) != 2 or any(type(size) is not int or size < 1 for size in block):
        raise reader.error(name, "must be a list of two positive integers")
    return block[0], block[1]


@dataclass(frozen=True, slots=True)
class Mxfp4:
    """Holds the entries of MXFP4: there are none beside ``_MXFP4_HARMLESS``."""

    @property
    def name(self) -> str:
        return "mxfp4"


_MXFP4_HARMLESS = frozenset(("modules_to_not_convert", "dequantize"))
"""Say which layers are stored unquantized, which the tensors show, and what transformers does with the others."""


def _read_mxfp4(reader: ConfigReader) -> Mxfp4:
    return Mxfp4()


Format = Literal["pack-quantized", "int-quantized", "float-quantized"]

_COMPRESSED_HARMLESS = frozenset(
    ("ignore", "global_compression_ratio", "version", "quantization_status", "kv_cache_scheme")
)
"""Say which layers are stored unquantized, which the tensors show, for which KV cache the checkpoint was made, or how
it came about."""
_COMPRESSED_ARGUMENTS = frozenset(("observer", "observer_kwargs", "actorder", "scale_dtype", "zp_dtype"))
"""Say how the scales were found and stored. The order of the inputs is read from the tensor ``weight_g_idx``."""


@dataclass(frozen=True, slots=True)
class CompressedTensors:
    """Holds the entries of compressed-tensors, for layers that are all stored in one format."""

    format: Format
    bits: int
    group_size: int
    """Inputs that share a scale; -1: all of an output's."""
    symmetric: bool
    block: tuple[int, int] | None
    """How many outputs and inputs share a scale of an FP8 weight; None: the scale's shape says tensor or channel."""
    rounds_inputs: bool
    """Whether the checkpoint was made for inputs of 8 bits, int8 or floats as its weights are."""

    @property
    def name(self) -> str:
        return f"compressed-tensors-{'fp' if self.format == 'float-quantized' else 'int'}{self.bits}"


def _read_compressed_tensors(reader: ConfigReader) -> CompressedTensors:
    """Read the entries of a ``quantization_config`` of compressed-tensors.

    Raises ``ValueError`` naming what is wrong or not supported.
    """
    if reader.take("transform_config"):
        raise reader.error("transform_config", "is not supported: must be absent")
    sparsity = reader.take("sparsity_config") or {}
    if not isinstance(sparsity, dict) or sparsity.get("format", "dense") != "dense":
        raise reader.error("sparsity_config", "is not supported: its format must be dense")
    groups = reader.take("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise reader.error("config_groups", "must hold a group of layers")
    outer = reader.take("format")
    where = reader.take_object("config_groups")
    assert where is not None
    schemes = {_read_group(group, outer) for name in groups if (group := where.take_object(name)) is not None}
    if len(schemes) != 1:
        raise reader.error("config_groups", "is not supported: must store all layers in one format")
    return schemes.pop()


def _read_group(group: ConfigReader, outer_format: Any) -> CompressedTensors:
    targets = group.take("targets")
    if not isinstance(targets, list) or not targets:
        raise group.error("targets", "must be a list of layers")
    if group.take("output_activations"):
        raise group.error("output_activations", "is not supported: must be null")
    activations = group.take("input_activations")
    if activations and (not isinstance(activations, dict) or activations.get("num_bits", 8) != 8):
        raise group.error("input_activations", "must be null or have num_bits = 8")
    weights = group.take_object("weights", _COMPRESSED_ARGUMENTS)
    if weights is None:
        raise group.error("weights", "must be an object")
    declared = group.take("format") or outer_format
    scheme = _read_weights(weights, group, declared, rounds_inputs=bool(activations))
    weights.refuse_rest()
    group.refuse_rest()
    return scheme


def _read_weights(
    weights: ConfigReader, group: ConfigReader, declared: Any, *, rounds_inputs: bool
) -> CompressedTensors:
    bits, kind = weights.take_int("num_bits", 8), weights.take("type", "int")
    stored: Format
    match declared, kind, bits:
        case "pack-quantized", "int", 4 | 8:
            stored = "pack-quantized"
        case "int-quantized" | "naive-quantized", "int", 8:
            stored = "int-quantized"
        case "float-quantized" | "naive-quantized", "float", 8:
            stored = "float-quantized"
        case _:
            raise group.error(
                "format",
                f"is not supported: {declared!r} with weights of type {kind!r} and {bits} bits; must be pack-quantized "
                "(int, 4 or 8 bits), int-quantized (int, 8 bits) or float-quantized (float, 8 bits)",
            )
    if weights.take_bool("dynamic", False):
        raise weights.error("dynamic", "must be false: the weights are stored quantized")
    group_size, block = weights.take("group_size"), _read_block(weights, "block_structure")
    strategy = weights.take("strategy") or ("group" if group_size not in (None, -1) else "channel")
    allowed = ("tensor", "channel", "block") if stored == "float-quantized" else ("tensor", "channel", "group")
    if strategy not in allowed:
        raise weights.error("strategy", f"must be one of {', '.join(allowed)}")
    size = weights.take_int("group_size") if strategy == "group" else -1
    symmetric = weights.take_bool("symmetric", True)
    return CompressedTensors(stored, bits, size, symmetric, block, rounds_inputs and stored != "pack-quantized")


Scheme = Gptq | Awq | CompressedTensors | Fp8 | Mxfp4
"""Equal schemes read the same tensors in the same way; ``name`` is part of the engine's numerics."""

ENTRY = "quantization_config"

METHODS: dict[str, tuple[Callable[[ConfigReader], Scheme], frozenset[str]]] = {
    "gptq": (_read_gptq, _GPTQ_HARMLESS),
    "awq": (_read_awq, _AWQ_HARMLESS),
    "compressed-tensors": (_read_compressed_tensors, _COMPRESSED_HARMLESS),
    "fp8": (_read_fp8, _FP8_HARMLESS),
    "mxfp4": (_read_mxfp4, _MXFP4_HARMLESS),
}
"""By ``quant_method``: what reads the other entries, and the entries that change nothing."""


def read_scheme(reader: ConfigReader) -> Scheme | None:
    """Return how the checkpoint's weights are quantized; None: they are not.

    Raises ``ValueError`` naming a method or an entry that is not supported.
    """
    if reader.take_object("quantization") is not None:
        raise ValueError(
            f"{reader.where}: the weights are quantized by MLX (quantization), which is not read: use the model's "
            "unquantized checkpoint or its GGUF file"
        )
    method_reader = reader.take_object(ENTRY)
    if method_reader is None:
        return None
    method = method_reader.take("quant_method")
    if not isinstance(method, str) or method not in METHODS:
        raise ValueError(
            f"{method_reader.where}: quant_method {method!r} is not supported ({', '.join(METHODS)} are): use the "
            "model's unquantized checkpoint, with --quantization int8-dynamic or int4, or its GGUF file"
        )
    read, harmless = METHODS[method]
    entries = reader.take_object(ENTRY, harmless | {"quant_method"})
    assert entries is not None
    scheme = read(entries)
    entries.refuse_rest()
    return scheme


def scheme_for_modules(path: Path) -> Scheme | None:
    """Return what :func:`read_scheme` does for a checkpoint that transformers' modules compute; a GGUF file has none.

    Raises ``ValueError`` for a method whose tensors only the built-in code reads, too.
    """
    if is_gguf(path):
        return None
    reader = ConfigReader.open(path)
    scheme = read_scheme(reader)
    if isinstance(scheme, Mxfp4):
        raise reader.error(ENTRY, "is mxfp4, which transformers' modules do not compute here: choose model_impl auto")
    return scheme


_KV_SCALES = ("{0}_scale", "{0}_proj.{0}_scale", "qkv_proj.{0}_scale", "{0}_proj.output_scale", "kv_scale")
_LEAST_KV_SCALE, _LARGEST_KV_SCALE = 2.0**-126, 2.0**127
"""Of numbers that float32 has exactly, as has it what they become: the next power of two and its inverse."""


def kv_scale_names(kind: str) -> tuple[str, ...]:
    """Return what a tensor may be called, behind the name of an attention, by which its keys (``kind`` k) or values (v)
    are divided in a cache of 8-bit floats. The first that is there is read."""
    return tuple(name.format(kind) for name in _KV_SCALES)


_ENDINGS = tuple(f".{name}" for kind in "kv" for name in kv_scale_names(kind))


def reads_kv_scale(name: str) -> bool:
    """Return whether a tensor may be one by which keys or values are divided in a cache of 8-bit floats."""
    return name.endswith(_ENDINGS)


def check_kv_scale(name: str, scale: float) -> None:
    """Raise ``ValueError`` if keys or values cannot be divided by the only number of the tensor ``name``; NaN: it has
    none, or several."""
    if not _LEAST_KV_SCALE <= scale <= _LARGEST_KV_SCALE:
        raise ValueError(
            f"{name} must be one positive number of a float32, by which keys or values of a layer are divided; with "
            "kv_cache_dtype auto it is not read"
        )
