"""Describes how the devices differ that a model may run on, apart from the operations."""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from tokenloom.engine_core.kv_transfer.kv_transport import KVPool
from tokenloom.process.control_groups import CpuGroups

from ..attention.attention_backend import KVCache
from ..cuda.step_tensors import Capture, StepTools
from ..device import memory
from ..device.cpu_watch import CpuWatch, ProcessThreads, cores_within
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
    def pool_is_on_host(self) -> bool:
        """Whether the KV pool is memory of the host, which transports can read, or of the device."""

    def make_sampler(self) -> DeviceSampler | None:
        """Return what draws tokens on the device, so that only their ids come to the host; None: the host draws."""

    def make_step_tools(self) -> StepTools | None:
        """Return what keeps the rows of the batch on the device, so that a step is one copy; None: steps are on the
        host."""

    def make_capture(self) -> Capture | None:
        """Return what captures steps, so that one call gives the device all of a step; None: the device cannot."""

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
