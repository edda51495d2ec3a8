"""The operations that go with an attention backend."""

import torch

from ..attention.attention_backend import TOKENWISE
from ..checkpoint.local_config import LIBRARIES
from ..kernels.compiler import KernelsUnavailable, warn_unavailable
from ..kernels.library import uses_triton
from .cpu_ops import CPUOps, TokenwiseOps
from .ops import Ops
from .torch_ops import TorchOps


def make_ops(attention_backend: str, device: torch.device) -> Ops:
    """C++ kernels with ``auto`` and ``cpu`` on a CPU where they can be had, Triton's with ``auto``, ``triton`` and the
    attention of a library on a GPU, else PyTorch's operations. With ``tokenwise`` C++ kernels; raises ``ValueError`` if
    they cannot be had."""
    if attention_backend == TOKENWISE:
        try:
            return TokenwiseOps()
        except KernelsUnavailable as error:
            raise ValueError(f"batch_invariant: needs the C++ kernels: {error}") from error
    if attention_backend in ("auto", "triton", *LIBRARIES) and uses_triton(device):
        from .triton_ops import TritonOps

        return TritonOps()
    if attention_backend in ("auto", "cpu") and device.type == "cpu":
        try:
            return CPUOps()
        except KernelsUnavailable as error:
            warn_unavailable(str(error))
    return TorchOps()
