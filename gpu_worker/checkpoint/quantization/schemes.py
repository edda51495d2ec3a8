"""Reads a configuration's ``quantization_config`` with the module of its method."""

from collections.abc import Callable

from ..files.config_reader import ConfigReader
from . import awq, compressed_tensors, fp8, gptq
from .scheme import Scheme

_ENTRY = "quantization_config"

METHODS: dict[str, tuple[Callable[[ConfigReader], Scheme], frozenset[str]]] = {
    "gptq": (gptq.read_gptq, gptq.HARMLESS),
    "awq": (awq.read_awq, awq.HARMLESS),
    "compressed-tensors": (compressed_tensors.read_compressed_tensors, compressed_tensors.HARMLESS),
    "fp8": (fp8.read_fp8, fp8.HARMLESS),
}
"""By ``quant_method``: what reads the other entries, and the entries that change nothing."""


def read_scheme(reader: ConfigReader) -> Scheme | None:
    """Return how the checkpoint's weights are quantized; None: they are not.

    Raises ``ValueError`` naming a method or an entry that is not supported.
    """
    method_reader = reader.take_object(_ENTRY)
    if method_reader is None:
        return None
    method = method_reader.take("quant_method")
    if method not in METHODS:
        wanted = f"is not supported: must be one of {', '.join(METHODS)}; an unquantized or GGUF checkpoint also loads"
        raise method_reader.error("quant_method", wanted)
    read, harmless = METHODS[method]
    entries = reader.take_object(_ENTRY, harmless | {"quant_method"})
    assert entries is not None
    scheme = read(entries)
    entries.refuse_rest()
    return scheme
