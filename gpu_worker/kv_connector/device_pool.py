"""Gives transports the KV pool of a device: copies between it and the host, and the pools of other processes."""

import ctypes
import functools
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, Protocol

import msgspec
import numpy as np
import torch
from torch import Tensor

from tokenloom.engine_core.kv_cache.pool_memory import BlockIds, Bytes, Wait
from tokenloom.engine_core.kv_transfer.kv_transport import KVPool, KVRegion, KVTransferError
from tokenloom.process.fall_backs import OF_PROCESS

from ..attention.attention_backend import KVCache
from ..device.device_link import DeviceArray
from .socket_frames import decoded

CopyBlocks = Callable[[Tensor, Tensor, Tensor, Tensor], None]
"""Copies blocks of a pool, see ``cuda.row_kernels.copy_pool_blocks``."""


class Mapping(Protocol):
    """Holds memory of another process, mapped into this one."""

    def words(self, shape: tuple[int, int, int]) -> Tensor:
        """Return the memory as int64 words of this shape."""

    def close(self) -> None:
        """Release the mapping. No tensor over it may be used from now on. Idempotent."""


class IpcLayer(Protocol):
    """Passes memory of a device between processes of one host. Raises ``OSError`` where that does not work."""

    def export(self, memory: Tensor) -> bytes:
        """Return a handle of the memory that ``memory`` begins."""

    def open(self, handle: bytes, device: torch.device) -> Mapping:
        """Map what another process exported, for kernels on ``device``."""


class DevicePool:
    """Fulfils :class:`tokenloom.engine_core.kv_cache.pool_memory.DeviceMemory` over the caches of a worker.

    Copies run on a stream of their own, next to steps. Each waits for the steps that were given to the device before
    it: those may still write blocks that it reads, or read blocks that it fills.
    """

    def __init__(self, words: Tensor, copy: CopyBlocks, ipc: IpcLayer) -> None:
        """``words`` [regions, num_blocks, words of a block] int64: the pool. It must not move while this is used."""
        self._words = words
        self._copy = copy
        self._ipc = ipc
        self._device = words.device
        self._lock = threading.Lock()  # held while copies are launched: one stream serves all threads
        self._stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None

    @property
    def nbytes(self) -> int:
        return self._words.nbytes

    def copy_first(self) -> None:
        """Copy the first block to memory of its own: a GPU compiles the kernel for that, and no transfer waits for
        it."""
        self.start_read(np.zeros(1, dtype=np.int64), slice(None), self.staging(self.nbytes // self._words.shape[1]))()

    def start_read(self, block_ids: BlockIds, regions: slice, packed: Bytes) -> Wait:
        source = self._words[regions]
        with self._launching():
            gathered = torch.empty(
                (len(source), len(block_ids), source.shape[2]), dtype=torch.int64, device=self._device
            )
            self._copy(source, gathered, self._ids(block_ids), self._range(len(block_ids)))
            _words_of(packed, gathered).copy_(gathered, non_blocking=True)
            return self._ended(gathered)

    def start_write(self, block_ids: BlockIds, regions: slice, packed: Bytes) -> Wait:
        target = self._words[regions]
        shape = (len(target), len(block_ids), target.shape[2])
        with self._launching():
            arrived = torch.empty(shape, dtype=torch.int64, device=self._device)
            arrived.copy_(_words_of(packed, arrived), non_blocking=True)
            self._copy(arrived, target, self._range(len(block_ids)), self._ids(block_ids))
            return self._ended(arrived)

    def staging(self, nbytes: int) -> Bytes:
        staged: Bytes = torch.empty(nbytes, dtype=torch.uint8, pin_memory=self._stream is not None).numpy()
        return staged

    def pin(self, memory: Bytes) -> None:
        if self._stream is not None:
            status = torch.cuda.cudart().cudaHostRegister(memory.ctypes.data, memory.nbytes, 0)
            if int(status):
                OF_PROCESS.begin("unpinned_memory", f"CUDA error {status}")

    def unpin(self, memory: Bytes) -> None:
        if self._stream is not None:
            torch.cuda.cudart().cudaHostUnregister(memory.ctypes.data)

    def settle(self) -> None:
        if self._stream is not None:
            torch.cuda.default_stream(self._device).synchronize()

    def export(self) -> bytes:
        try:
            return self._ipc.export(self._words)
        except OSError as error:
            raise KVTransferError("transport", f"the pool cannot be shared with other processes: {error}") from error

    def map_peer(self, handle: bytes, num_blocks: int) -> "MappedPool":
        regions, _, words = self._words.shape
        try:
            mapping = self._ipc.open(handle, self._device)
            return MappedPool(mapping, mapping.words((regions, num_blocks, words)), self)
        except (OSError, RuntimeError, ValueError) as error:
            raise KVTransferError("transport", f"the owner's memory cannot be mapped: {error}") from error

    def copy_from(self, source: Tensor, source_ids: BlockIds, target_ids: BlockIds) -> None:
        """Copy blocks of another pool [regions, its blocks, words] over blocks of this one; wait for the end."""
        with self._launching():
            self._copy(source, self._words, self._ids(source_ids), self._ids(target_ids))
            ended = self._ended()
        ended()

    def _launching(self) -> Any:
        """Return a context in which work goes to the stream of copies, behind the steps of this moment."""
        return _OnStream(self._lock, self._stream, self._device) if self._stream is not None else nullcontext()

    def _ended(self, *used: Tensor) -> Wait:
        """Return what waits for the work launched so far. It keeps the tensors that the work uses."""
        if self._stream is None:
            return lambda: None
        event = torch.cuda.Event()
        event.record(self._stream)

        def wait() -> None:
            try:
                event.synchronize()
            except RuntimeError as error:
                raise KVTransferError("transport", f"the device failed: {error}") from error
            kept.clear()

        kept = list(used)
        return wait

    def _ids(self, block_ids: BlockIds) -> Tensor:
        ids = torch.from_numpy(np.ascontiguousarray(block_ids, dtype=np.int64))
        if self._stream is None:
            return ids
        # From memory that is not pinned CUDA may copy before it returns, and hold up this thread.
        return ids.pin_memory().to(self._device, non_blocking=True)

    def _range(self, count: int) -> Tensor:
        return torch.arange(count, device=self._device)


class _OnStream:
    """Holds the lock of a stream, and makes it the current one of this thread."""

    def __init__(self, lock: threading.Lock, stream: torch.cuda.Stream, device: torch.device) -> None:
        self._lock = lock
        self._stream = stream
        self._device = device
        self._context = torch.cuda.stream(stream)

    def __enter__(self) -> None:
        self._lock.acquire()
        try:
            torch.cuda.set_device(self._device)  # a thread of transports begins with the first device
            self._context.__enter__()
            self._stream.wait_stream(torch.cuda.default_stream(self._device))
        except BaseException:
            self._lock.release()
            raise

    def __exit__(self, *error: Any) -> None:
        try:
            self._context.__exit__(*error)
        finally:
            self._lock.release()


class MappedPool:
    """Fulfils :class:`tokenloom.engine_core.kv_cache.pool_memory.PeerMemory`."""

    def __init__(self, mapping: Mapping, words: Tensor, own: DevicePool) -> None:
        self._mapping = mapping
        self._words: Tensor | None = words
        self._own = own

    def copy(self, source_ids: BlockIds, target_ids: BlockIds) -> None:
        assert self._words is not None, "the mapping is released"
        self._own.copy_from(self._words, source_ids, target_ids)

    def close(self) -> None:
        self._words = None
        self._mapping.close()


def copy_with_torch(source: Tensor, target: Tensor, source_blocks: Tensor, target_blocks: Tensor) -> None:
    """Do what ``cuda.row_kernels.copy_pool_blocks`` does, where Triton is not installed."""
    target.index_copy_(1, target_blocks, source.index_select(1, source_blocks.to(source.device)).to(target.device))


def make_device_pool(
    caches: Sequence[KVCache], num_blocks: int, layout: str, copy: CopyBlocks, ipc: IpcLayer
) -> KVPool:
    """Describe the caches of all layers, which ``allocate_kv_caches`` made at once, to transports.

    Layers that share a tensor are one. For each tensor there is the region of its keys, then of its values.
    """
    distinct = {cache.data_ptr(): cache for cache in caches}
    first = distinct[min(distinct)]
    words = _words(first, len(distinct), num_blocks)
    ends = {first.data_ptr() + index * first.nbytes for index in range(len(distinct))}
    if ends != distinct.keys():
        raise ValueError("the KV caches of the layers do not lie behind each other")
    block_bytes = words.shape[2] * words.itemsize
    regions = tuple(KVRegion(index * num_blocks * block_bytes, block_bytes) for index in range(len(words)))
    device_pool = DevicePool(words, copy, ipc)
    device_pool.copy_first()
    return KVPool(device_pool, regions, num_blocks, layout)


def _words(first: KVCache, count: int, num_blocks: int) -> Tensor:
    """Return ``count`` caches from ``first`` on as [planes * count, num_blocks, words] int64."""
    size = first.nbytes * count
    begin = first.storage_offset() * first.itemsize
    flat = torch.empty(0, dtype=torch.uint8, device=first.device).set_(first.untyped_storage(), begin, (size,), (1,))
    # Blocks move as words of 8 bytes, so that one kernel copies every dtype of a cache.
    words: Tensor = flat.view(torch.int64).view(len(first) * count, num_blocks, -1)
    return words


def _words_of(packed: Bytes, like: Tensor) -> Tensor:
    """Return memory of the host as a tensor of the shape of ``like``."""
    return torch.from_numpy(packed.reshape(-1)).view(torch.int64).view(like.shape)


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
    """Fulfils :class:`IpcLayer` through CUDA's driver."""

    # The driver's functions are public and stable, unlike PyTorch's own for tensors that processes share, which also
    # count references in files. Memory of PyTorch's expandable segments cannot be shared in this way: the driver
    # refuses it.

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
    """Fulfils :class:`Mapping`."""

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
        tensor: Tensor = torch.as_tensor(DeviceArray(self._base + self._exported.offset, shape, "<i8"))
        return tensor

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            driver = _driver(self._device)
            driver.cuIpcCloseMemHandle(ctypes.c_uint64(self._base))


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
