"""Runs the kernels of this folder in Triton's interpreter, on tensors of the CPU."""

import sys

import numpy as np
import pytest
import torch
import triton
from triton.runtime import interpreter

from tokenloom.gpu_worker.kernels import triton as launching

_patch_tensors = interpreter._patch_lang_tensor


def _patch(tensor, *scope):
    """Triton 3.6 turns an array of one element into an index in a way that numpy 2.4 refuses."""
    _patch_tensors(tensor, *scope)
    tensor.__index__ = lambda self: int(np.asarray(self.handle.data).item())


if triton.__version__.startswith("3.6."):
    interpreter._patch_lang_tensor = _patch


_convert = interpreter._convert_float


def _convert_to_fp8(data, source, target, rounding):
    """The interpreter loses the carry where a number is rounded up to a power of two, and does not round to even."""
    if target != triton.language.float8e4nv or source != triton.language.float32:
        return _convert(data, source, target, rounding)
    rounded = torch.from_numpy(np.ascontiguousarray(data).view(np.float32)).to(torch.float8_e4m3fn)
    return rounded.view(torch.uint8).numpy()


interpreter._convert_float = _convert_to_fp8


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    """Triton looks again when it meets a kind of argument for the first time."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with np.errstate(all="ignore"):  # on a GPU an infinity is no event
        yield


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """Fill what is allocated without content with NaN, so that an element that a kernel leaves out shows."""

    def poison(make):
        def made(*args, **kwargs):
            tensor = make(*args, **kwargs)
            if tensor.is_floating_point():
                return tensor.fill_(float("nan"))
            return tensor.fill_(0xA5 if tensor.dtype == torch.uint8 else -(1 << 20))

        return made

    empty = torch.empty

    def guarded(*args, **kwargs):
        tensor = empty(*args, **kwargs)
        if tensor.dtype == torch.float8_e4m3fn:
            tensor.view(torch.uint8).fill_(0x7F)  # NaN
            return tensor
        return tensor if tensor.dtype == torch.uint8 else poison(lambda: tensor)()

    monkeypatch.setattr(torch, "empty", guarded)
    monkeypatch.setattr(torch, "empty_like", poison(torch.empty_like))
    monkeypatch.setattr(torch.Tensor, "new_empty", poison(torch.Tensor.new_empty))


@pytest.fixture(autouse=True)
def refuse_bfloat16(monkeypatch):
    """The interpreter computes bfloat16 wrongly, even where it only stores it."""
    launch = launching.launch

    def checked(kernel, grid, *arguments, **constants):
        tensors = [each for each in arguments if isinstance(each, torch.Tensor)]
        assert all(each.dtype != torch.bfloat16 for each in tensors), "the interpreter computes bfloat16 wrongly"
        launch(kernel, grid, *arguments, **constants)

    for module in list(sys.modules.values()):
        if getattr(module, "launch", None) is launch:
            monkeypatch.setattr(module, "launch", checked)
