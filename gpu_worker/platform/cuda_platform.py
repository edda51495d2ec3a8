"""Describes a CUDA device, and how much of its memory the KV pool may use."""

import gc
from collections.abc import Callable, Sequence

import torch

from tokenloom.engine_core.kv_transfer.kv_transport import KVPool

from ..attention.attention_backend import KVCache
from ..cuda.step_tensors import Capture, GraphCapture, StepTools
from ..device.device_link import CUDALink
from ..kernels.library import uses_triton
from ..kv_connector.cuda_ipc import CudaIpc
from ..kv_connector.device_pool import copy_with_torch, make_device_pool
from ..sampler.device.device_sampler import DeviceSampler

_FP8_CAPABILITY = (8, 9)
"""Of the first GPUs whose tensor cores multiply 8-bit floats (Ada); Hopper has 9.0."""


class CUDAPlatform:
    """Fulfils :class:`~.platform.Platform` for one GPU."""

    pool_is_on_host = False
    cpu_watch: None = None

    def __init__(self, memory_share: float, device: torch.device | None = None) -> None:
        """``memory_share``: of the device's memory, for weights, activations and KV of all engines together.

        Raises ``ValueError`` if this PyTorch finds no GPU.
        """
        if not torch.cuda.is_available():
            raise ValueError(f"device cuda: this PyTorch ({torch.__version__}) finds no GPU")
        self.device = device or torch.device("cuda", 0)
        self._memory_share = memory_share

    def start(self, num_threads: int, num_engines: int) -> None:
        torch.cuda.set_device(self.device)
        torch.backends.cuda.matmul.allow_tf32 = False  # float32 stays float32
        if num_threads:
            torch.set_num_threads(num_threads)

    def peak_of(self, call: Callable[[], None]) -> int:
        before = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        call()
        torch.cuda.synchronize(self.device)
        peak = torch.cuda.max_memory_allocated(self.device)
        self.return_freed()
        return max(0, peak - before)

    def make_sampler(self) -> DeviceSampler | None:
        if not uses_triton(self.device):
            return None
        from ..sampler.device.sampler_kernels import TritonSamplerKernels

        return DeviceSampler(TritonSamplerKernels())

    def make_step_tools(self) -> StepTools | None:
        if not uses_triton(self.device):
            return None
        from ..cuda.row_kernels import TritonRowKernels

        return StepTools(CUDALink(), TritonRowKernels())

    def make_capture(self) -> Capture | None:
        return GraphCapture() if uses_triton(self.device) else None

    def device_pool(self, caches: Sequence[KVCache], num_blocks: int, layout: str) -> KVPool:
        copy = copy_with_torch
        if uses_triton(self.device):
            from ..cuda.block_copy import copy_pool_blocks as copy
        return make_device_pool(caches, num_blocks, layout, copy, CudaIpc())

    @property
    def computes_fp8(self) -> bool:
        return torch.cuda.get_device_capability(self.device) >= _FP8_CAPABILITY

    @property
    def hardware(self) -> str:
        name: str = torch.cuda.get_device_name(self.device)
        return name.replace("/", "-").replace(" ", "-")

    def kv_memory(self, activations: int, num_engines: int) -> int:
        free, total = torch.cuda.mem_get_info(self.device)
        usable = int(self._memory_share * total)
        return kv_share(free, total, usable, activations, num_engines, torch.cuda.memory_reserved(self.device))

    def return_freed(self) -> None:
        gc.collect()
        torch.cuda.empty_cache()

    def bytes_in_use(self) -> int:
        return torch.cuda.memory_reserved(self.device)


def kv_share(free: int, total: int, usable: int, activations: int, num_engines: int = 1, own: int = 0) -> int:
    """Return the KV memory of an engine, next to a step's ``activations``, in bytes.

    The device has ``total`` bytes, of which ``free`` are free and engines may use ``usable``. ``num_engines`` engines
    use it, and this one has allocated ``own`` bytes, which are its weights.
    """
    # Two bounds: an equal part less the own weights, and what is left now, because an engine that started earlier may
    # have filled more than its part.
    part = usable // num_engines - own
    left = usable - (total - free)
    return max(0, min(part, left) - activations)
