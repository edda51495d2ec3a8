"""Shares memory of a GPU with other processes of the host, through CUDA's driver.

The driver's functions are public and stable, unlike PyTorch's own for tensors that processes share, which also count
references in files. Memory of PyTorch's expandable segments cannot be shared in this way: the driver refuses it.
"""

import ctypes
import functools
import os
from typing import Any

import msgspec
import torch
from torch import Tensor

from .socket_frames import decoded

_HANDLE_BYTES = 64
_LAZY_PEER_ACCESS = 1
"""Lets kernels of one GPU read the memory of another, if the two can."""


class _Handle(ctypes.Structure):
    """Mirrors ``CUipcMemHandle``."""

    _fields_ = (("reserved", ctypes.c_ubyte * _HANDLE_BYTES),)


class _Exported(msgspec.Struct, array_like=True):
    """Describes memory within an allocation, of which the driver exports only the whole."""

    handle: bytes
    offset: int
    nbytes: int
    pid: int


class CudaIpc:
    """Fulfils :class:`.device_pool.IpcLayer`."""

    def export(self, memory: Tensor) -> bytes:
        driver = _driver(memory.device)
        base, size, handle = ctypes.c_uint64(), ctypes.c_size_t(), _Handle()
        address = ctypes.c_uint64(memory.data_ptr())
        _check(driver, driver.cuMemGetAddressRange_v2(ctypes.byref(base), ctypes.byref(size), address))
        _check(driver, driver.cuIpcGetMemHandle(ctypes.byref(handle), base))
        offset = memory.data_ptr() - base.value
        return msgspec.msgpack.encode(_Exported(bytes(handle.reserved), offset, memory.nbytes, os.getpid()))

    def open(self, handle: bytes, device: torch.device) -> "CudaMapping":
        try:
            exported = decoded(handle, _Exported)
        except msgspec.DecodeError as error:
            raise OSError(f"the owner's handle: {error}") from error
        if exported.pid == os.getpid():
            raise OSError("CUDA maps memory of other processes only")
        if len(exported.handle) != _HANDLE_BYTES:
            raise OSError(f"a handle of {len(exported.handle)} bytes; CUDA's have {_HANDLE_BYTES}")
        driver, base = _driver(device), ctypes.c_uint64()
        opened = _Handle((ctypes.c_ubyte * _HANDLE_BYTES)(*exported.handle))
        _check(driver, driver.cuIpcOpenMemHandle_v2(ctypes.byref(base), opened, ctypes.c_uint(_LAZY_PEER_ACCESS)))
        return CudaMapping(base.value, exported, device)


class CudaMapping:
    """Fulfils :class:`.device_pool.Mapping`."""

    def __init__(self, base: int, exported: _Exported, device: torch.device) -> None:
        self._base = base
        self._exported = exported
        self._device = device
        self._is_open = True

    def words(self, shape: tuple[int, int, int]) -> Tensor:
        regions, blocks, words = shape
        if regions * blocks * words * 8 != self._exported.nbytes:
            self.close()
            raise ValueError(f"the owner's pool has {self._exported.nbytes} bytes, not {shape} words of 8")
        tensor: Tensor = torch.as_tensor(_Array(self._base + self._exported.offset, shape))
        return tensor

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            driver = _driver(self._device)
            driver.cuIpcCloseMemHandle(ctypes.c_uint64(self._base))


class _Array:
    """Describes memory of a GPU to PyTorch, which makes a tensor of it without a copy."""

    def __init__(self, address: int, shape: tuple[int, ...]) -> None:
        self.__cuda_array_interface__ = {
            "shape": shape,
            "typestr": "<i8",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


def _driver(device: torch.device) -> Any:
    """Return the driver, with the device's context current in this thread. Raises ``OSError``."""
    if device.type != "cuda":
        raise OSError(f"CUDA shares memory of GPUs, not of {device.type}")
    torch.cuda.set_device(device)
    torch.cuda.current_stream(device).query()  # makes PyTorch's context the thread's own
    return _library()


@functools.cache
def _library() -> Any:
    return ctypes.CDLL("libcuda.so.1")


def _check(driver: Any, status: int) -> None:
    if status:
        text = ctypes.c_char_p()
        driver.cuGetErrorString(status, ctypes.byref(text))
        raise OSError(f"CUDA error {status}: {(text.value or b'unknown').decode()}")
