"""Says whether a device computes with the Triton kernels, without importing Triton."""

import functools
import importlib.util

import torch


def uses_triton(device: torch.device) -> bool:
    """Return whether the kernels of ``kernels.triton`` compute on this device: on a GPU where Triton is installed."""
    return device.type == "cuda" and _is_installed()


@functools.cache
def _is_installed() -> bool:
    return importlib.util.find_spec("triton") is not None
