"""Names how this processor rounds the inputs of quantized layers: engines that round differently give other logits."""

from ..kernels.compiler import KernelsUnavailable
from ..kernels.library import load_int8, load_quantized


def input_rounding() -> str:
    """Return ``by-row`` where the matrix unit (AMX) computes int8 layers, ``by-group`` where the kernel of
    :mod:`.quantized_linear` does, and ``no-kernels`` where PyTorch computes all quantized layers.

    Layers of 4 bits round by group in the first two cases; shapes decide the rest, and they are the model's.
    """
    for load, name in ((load_int8, "by-row"), (load_quantized, "by-group")):
        try:
            load()
        except KernelsUnavailable:
            continue
        return name
    return "no-kernels"
