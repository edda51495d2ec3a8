"""What differs between the devices that a model may run on, beside the operations themselves."""

from collections.abc import Callable
from typing import Protocol

import torch

from . import memory

_SHARE = 0.5
"""Of the memory that is left: the operating system's page cache and the other services need the rest."""


class Platform(Protocol):
    """One device, and its memory in bytes."""

    @property
    def device(self) -> torch.device: ...

    @property
    def pool_is_on_host(self) -> bool:
        """Whether the KV pool is memory of the host, which transports can read; else it is the device's."""

    @property
    def draws_on_device(self) -> bool:
        """Whether tokens are drawn where the logits are, so that only ids come to the host."""

    def start(self, num_threads: int) -> None:
        """Takes the device, before anything is loaded. ``num_threads`` of the host compute; 0: as many as it likes."""

    def peak_of(self, call: Callable[[], None]) -> int:
        """Runs the call; returns how much memory it needs at its peak beyond what was in use."""

    def kv_memory(self, activations: int) -> int:
        """How much a KV pool may take, when a step needs ``activations`` beside it."""

    def return_freed(self) -> None:
        """Gives what is free back to the system."""


class CPUPlatform:
    """Fulfils :class:`Platform` for the CPU of this process."""

    device = torch.device("cpu")
    pool_is_on_host = True
    draws_on_device = False

    def start(self, num_threads: int) -> None:
        if num_threads:
            torch.set_num_threads(num_threads)

    def peak_of(self, call: Callable[[], None]) -> int:
        return memory.peak_of(call)

    def kv_memory(self, activations: int) -> int:
        """Half of what this host (or control group) has left beside the weights and a step's largest activations."""
        return int(_SHARE * max(0, memory.available_memory() - activations))

    def return_freed(self) -> None:
        memory.return_freed()
