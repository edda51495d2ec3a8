"""Describes how the devices differ that a model may run on, apart from the operations, how much of their memory the KV
pool may use, and refuses options that a device does not support, before anything is loaded."""

import gc
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from tokenloom.engine_core.data.config import EngineConfig
from tokenloom.engine_core.kv_transfer.kv_transport import KVPool
from tokenloom.process import memory
from tokenloom.process.control_groups import CpuGroups

from ..attention.attention_backend import KVCache
from ..checkpoint.local_config import LIBRARIES, check_apart, check_host
from ..cuda.step_tensors import Capture, GraphCapture, StepTools
from ..device.cpu_watch import CpuWatch, ProcessThreads, cores_within
from ..device.device_link import CUDALink
from ..kernels.library import computes_fp8, uses_triton
from ..kv_connector.device_pool import CudaIpc, copy_with_torch, make_device_pool
from ..sampler.device.device_sampler import DeviceSampler

# Pools fill lazily: four engines that each planned half of what was free promised 39.9 GiB on a host with 20 free,
# which ran out of memory only under load. Now they plan 10 GiB in all, and at full load took at most 0.6 % more than
# planned.
_SHARE = 0.5
"""The share of the free memory for the KV pools of all engines on a host. The rest is for the page cache, the other
services, and the weights of engines that have not loaded theirs yet."""


class Platform(Protocol):
    """Describes one device and its memory, in bytes."""

    @property
    def device(self) -> torch.device: ...

    @property
    def hardware(self) -> str:
        """The device's model, if other models round differently; empty: all of the kind compute alike."""

    @property
    def num_devices(self) -> int:
        """How many devices of the kind the process sees, which the workers of the host take in turn."""

    @property
    def pool_is_on_host(self) -> bool:
        """Whether the KV pool is memory of the host, which transports can read, or of the device."""

    def make_sampler(self) -> DeviceSampler | None:
        """Return what draws tokens on the device, so that only their ids come to the host; None: the host draws."""

    def make_step_tools(self) -> StepTools | None:
        """Return what keeps the rows of the batch on the device, so that a step is one copy; None: steps are on the
        host."""

    def make_capture(self) -> Capture | None:
        """Return what captures steps, so that one call gives the device all of a step; None: the device cannot. It
        serves one engine, whose earlier graphs are dropped."""

    def kept_by(self, call: Callable[[], None]) -> int:
        """Run the call and return how much memory of the device stays in use after it. Called if graphs are made."""

    def start(self, num_threads: int, num_engines: int) -> None:
        """Prepare the device before anything is loaded. ``num_threads`` of the host; 0: the library decides.
        ``num_engines`` share the host."""

    @property
    def cpu_watch(self) -> CpuWatch | None:
        """What the thread that computes steps calls before each; None: the host computes little."""

    def peak_of(self, call: Callable[[], None]) -> int:
        """Run the call and return how much memory it needs at its peak beyond what was in use."""

    def kv_memory(self, activations: int, num_engines: int) -> int:
        """Return how much the KV pool of one of ``num_engines`` engines that share the memory may take, if a step of
        each needs ``activations`` in addition."""

    def device_pool(self, caches: Sequence[KVCache], num_blocks: int, layout: str) -> KVPool:
        """Return the pool of these caches, of all layers, for transports. Called if the pool is not on the host."""

    @property
    def computes_fp8(self) -> bool:
        """Whether the device multiplies 8-bit floats."""

    def return_freed(self) -> None:
        """Return free memory to the system."""

    def bytes_in_use(self) -> int:
        """Return how much memory of the device this process uses."""


class CPUPlatform:
    """Fulfils :class:`Platform` for the CPU of this process."""

    device = torch.device("cpu")
    num_devices = 1
    hardware = ""
    pool_is_on_host = True
    computes_fp8 = False

    def __init__(self) -> None:
        self.cpu_watch: CpuWatch | None = None

    def start(self, num_threads: int, num_engines: int) -> None:
        """Prepare torch's threads: ``num_threads``, or as many as this engine's part of a CPU limit can keep busy if
        that is less."""
        most = num_threads or torch.get_num_threads()
        torch.set_num_threads(cores_within(CpuGroups().limit(), most, num_engines))
        self.cpu_watch = CpuWatch(ProcessThreads(most), most, num_engines)

    def peak_of(self, call: Callable[[], None]) -> int:
        return memory.peak_of(call)

    def make_sampler(self) -> None:
        return None

    def make_step_tools(self) -> None:
        return None

    def make_capture(self) -> None:
        return None

    def kept_by(self, call: Callable[[], None]) -> int:
        raise AssertionError("no graphs are made here")

    def device_pool(self, caches: Sequence[KVCache], num_blocks: int, layout: str) -> KVPool:
        raise AssertionError("the pool of a CPU is memory of the host")

    def kv_memory(self, activations: int, num_engines: int) -> int:
        """Return this engine's part of half of what the host (or control group) has free after a step of every
        engine."""
        return int(_SHARE * max(0, memory.available_memory() - num_engines * activations)) // num_engines

    def return_freed(self) -> None:
        memory.return_freed()

    def bytes_in_use(self) -> int:
        return memory.status_bytes("VmRSS")


def check_device(config: EngineConfig, platform: Platform) -> None:
    """Raise ``ValueError`` naming an option that is not supported on the device of ``platform``."""
    if platform.pool_is_on_host:
        check_host(config)
        return
    kind = platform.device.type
    check_apart(config, kind)
    num_workers, num_devices = config.parallel.world_size, platform.num_devices
    # Ray and executors of plugins show each worker a device of its own.
    if kind == "cuda" and config.parallel.distributed_executor_backend in ("auto", "mp") and num_workers > num_devices:
        raise ValueError(
            f"tensor_parallel_size, pipeline_parallel_size: NCCL needs a GPU for each of the {num_workers} workers of "
            f"an engine, and this host shows {num_devices}"
        )
    library = LIBRARIES.get(config.worker.attention_backend)
    if library is not None and torch.cuda.get_device_capability(platform.device) < library.capability:
        least = ".".join(map(str, library.capability))
        raise ValueError(
            f"attention_backend {config.worker.attention_backend} needs a GPU of compute capability {least} or more, "
            f"which {platform.hardware or kind} has not: choose auto"
        )
    if "fp8" in (config.worker.quantization, config.cache.dtype) and not platform.computes_fp8:
        option = "quantization" if config.worker.quantization == "fp8" else "kv_cache_dtype"
        raise ValueError(
            f"{option}: fp8 needs a GPU of compute capability 8.9 or more (Ada, Hopper or newer), "
            f"which {platform.hardware or kind} has not"
        )


class CUDAPlatform:
    """Fulfils :class:`~.platform.Platform` for one GPU."""

    pool_is_on_host = False
    cpu_watch: None = None

    def __init__(self, memory_share: float, number: int = 0) -> None:
        """``memory_share``: of the device's memory, for weights, activations and KV of all engines together.
        ``number`` of the worker on this host: workers take the GPUs in turn.

        Raises ``ValueError`` if this PyTorch finds no GPU.
        """
        if not torch.cuda.is_available():
            raise ValueError(f"device cuda: this PyTorch ({torch.__version__}) finds no GPU")
        self.num_devices = torch.cuda.device_count()
        self.device = torch.device("cuda", number % self.num_devices)
        self._memory_share = memory_share
        self._capture: Capture | None = None

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

        count = torch.cuda.get_device_properties(self.device).multi_processor_count
        return DeviceSampler(TritonSamplerKernels(multiprocessors=count))

    def make_step_tools(self) -> StepTools | None:
        if not uses_triton(self.device):
            return None
        from ..cuda.row_kernels import TritonRowKernels

        return StepTools(CUDALink(), TritonRowKernels())

    def make_capture(self) -> Capture | None:
        if self._capture is None and uses_triton(self.device):
            self._capture = GraphCapture()
        return self._capture

    def kept_by(self, call: Callable[[], None]) -> int:
        self.return_freed()
        before = torch.cuda.memory_reserved(self.device)
        call()
        torch.cuda.synchronize(self.device)
        self.return_freed()
        return max(0, torch.cuda.memory_reserved(self.device) - before)

    def device_pool(self, caches: Sequence[KVCache], num_blocks: int, layout: str) -> KVPool:
        copy = copy_with_torch
        if uses_triton(self.device):
            from ..cuda.row_kernels import copy_pool_blocks as copy
        return make_device_pool(caches, num_blocks, layout, copy, CudaIpc())

    @property
    def computes_fp8(self) -> bool:
        return computes_fp8(self.device)

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


class XPUPlatform:
    """Fulfils :class:`Platform` for one GPU of Intel, by PyTorch's own operations one after the other: the host draws,
    and nothing is captured. Nobody has run it on such a GPU; the tests take a fake one."""

    pool_is_on_host = False
    cpu_watch: None = None
    computes_fp8 = False

    def __init__(self, memory_share: float, number: int = 0, device: torch.device | None = None) -> None:
        """``memory_share``: of the device's memory, for weights, activations and KV of all engines together.
        ``number`` of the worker on this host: workers take the GPUs in turn. ``device``: None for that GPU.

        Raises ``ValueError`` if this PyTorch finds no such GPU.
        """
        if not torch.xpu.is_available():
            raise ValueError(f"device xpu: this PyTorch ({torch.__version__}) finds no GPU of Intel")
        self.num_devices = torch.xpu.device_count()
        self.device = device or torch.device("xpu", number % self.num_devices)
        self._memory_share = memory_share

    def start(self, num_threads: int, num_engines: int) -> None:
        torch.xpu.set_device(self.device)
        if num_threads:
            torch.set_num_threads(num_threads)

    def peak_of(self, call: Callable[[], None]) -> int:
        before = torch.xpu.memory_allocated(self.device)
        torch.xpu.reset_peak_memory_stats(self.device)
        call()
        torch.xpu.synchronize(self.device)
        peak = torch.xpu.max_memory_allocated(self.device)
        self.return_freed()
        return max(0, peak - before)

    def make_sampler(self) -> None:
        return None

    def make_step_tools(self) -> None:
        return None

    def make_capture(self) -> None:
        return None

    def kept_by(self, call: Callable[[], None]) -> int:
        raise AssertionError("no graphs are made here")

    def device_pool(self, caches: Sequence[KVCache], num_blocks: int, layout: str) -> KVPool:
        raise ValueError("kv_transports: KV on xpu does not move between engines: leave the option out")

    @property
    def hardware(self) -> str:
        name: str = torch.xpu.get_device_name(self.device)
        return name.replace("/", "-").replace(" ", "-")

    def kv_memory(self, activations: int, num_engines: int) -> int:
        free, total = torch.xpu.mem_get_info(self.device)
        own = torch.xpu.memory_reserved(self.device)
        return kv_share(free, total, int(self._memory_share * total), activations, num_engines, own)

    def return_freed(self) -> None:
        gc.collect()
        torch.xpu.empty_cache()

    def bytes_in_use(self) -> int:
        return torch.xpu.memory_reserved(self.device)


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
