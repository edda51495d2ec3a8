"""Tensors of the host that say that they lie on a GPU: what the driver would refuse fails, and the rest computes.

An operation on tensors of both sides fails, and so does whatever asks for the address of one: a kernel of the host
would read it as its own.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from tokenloom.gpu_worker.attention import attention_backends
from tokenloom.gpu_worker.layers import fp8_linear, linear
from tokenloom.gpu_worker.lora import slots
from tokenloom.gpu_worker.models import experts
from tokenloom.gpu_worker.ops import cpu_ops

CUDA = torch.device("cuda", 0)
_MIXING = {"copy_", "__set__", "__setitem__", "__getitem__", "to", "cpu", "cuda", "type_as"}
"""May have tensors of both sides."""


class CudaTensor(torch.Tensor):
    """Lies on a GPU, as far as anybody can see."""

    device = property(lambda self: CUDA)  # type: ignore[assignment]
    is_cuda = property(lambda self: True)  # type: ignore[assignment]
    is_cpu = property(lambda self: False)  # type: ignore[assignment]

    def data_ptr(self) -> int:
        raise AssertionError("a kernel of the host would read an address of the GPU")

    def numpy(self, *, force: bool = False) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first")

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return _call(func, args, kwargs or {})


class OnCuda(TorchFunctionMode):
    """Lets functions make such tensors for the device ``cuda``."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return _call(func, args, kwargs or {})


def _call(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    name = getattr(func, "__name__", "")
    tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
    on_gpu = [each for each in tensors if isinstance(each, CudaTensor)]
    if on_gpu and name in ("numpy", "__array__"):
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first")
    if name == "pin_memory":
        return args[0]
    if name in ("cpu", "cuda"):
        return _moved(args[0], torch.device(name))
    if on_gpu and name not in _MIXING and any(not isinstance(each, CudaTensor) and each.dim() for each in tensors):
        raise RuntimeError(f"Expected all tensors to be on the same device, in {name}")
    if on_gpu and not isinstance(args[0], CudaTensor) and name == "__getitem__":
        raise RuntimeError("indices should be either on cpu or on the same device as the indexed tensor (cpu)")
    target = _target(name, args, kwargs)
    args = tuple(_without_device(each) for each in args)
    kwargs = {key: _without_device(value) for key, value in kwargs.items() if key != "pin_memory"}
    with torch._C.DisableTorchFunctionSubclass():
        if func is torch.mm and "out_dtype" in kwargs:  # which only GPUs have
            result = (args[0].double() @ args[1].double()).to(kwargs["out_dtype"])
        else:
            result = func(*args, **kwargs)
        if target is None:
            return _on_gpu(result) if on_gpu and name != "copy_" else result
        if name == "to":
            is_moved = isinstance(args[0], CudaTensor) != (target.type == "cuda")
            return _moved(result.clone() if is_moved and result is args[0] else result, target)
        return _on_gpu(result) if target.type == "cuda" else result


def _target(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device | None:
    """Return the device that a call names, or that of a tensor whose device and dtype ``to`` takes over."""
    if name == "to" and len(args) > 1 and isinstance(args[1], torch.Tensor):
        return args[1].device
    found = [each for each in (*args, *kwargs.values()) if isinstance(each, torch.device)]
    if isinstance(device := kwargs.get("device"), str):
        found.append(torch.device(device))
    if name == "to" and len(args) > 1 and isinstance(args[1], str):
        found.append(torch.device(args[1]))
    return found[0] if found else None


def _without_device(each: Any) -> Any:
    is_gpu = (isinstance(each, torch.device) and each.type == "cuda") or (isinstance(each, str) and each[:4] == "cuda")
    return torch.device("cpu") if is_gpu else each


def _moved(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        if device.type == "cuda":
            return tensor if isinstance(tensor, CudaTensor) else tensor.clone().as_subclass(CudaTensor)
        return tensor.as_subclass(torch.Tensor).clone() if isinstance(tensor, CudaTensor) else tensor


def _on_gpu(result: Any) -> Any:
    if isinstance(result, torch.Tensor):
        return result if isinstance(result, CudaTensor) else result.as_subclass(CudaTensor)
    if isinstance(result, (list, tuple)) and not isinstance(result, torch.Size):
        return type(result)(map(_on_gpu, result))
    return map(_on_gpu, list(result)) if isinstance(result, Iterator) else result


@pytest.fixture
def on_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    """Provide a GPU on which PyTorch computes, without Triton."""
    for module in (attention_backends, experts, fp8_linear, linear, cpu_ops, slots):
        monkeypatch.setattr(module, "uses_triton", lambda device: False)
    monkeypatch.setattr(linear, "computes_fp8", lambda device: False)
    with OnCuda():
        yield CUDA
