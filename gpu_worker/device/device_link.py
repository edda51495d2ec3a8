"""Defines how the host and a device exchange memory without waiting for each other."""

from typing import Protocol

import torch
from torch import Tensor


class Event(Protocol):
    """Occurs once the device has done what it had been given before."""

    def query(self) -> bool:
        """Return whether it has occurred, at once."""

    def synchronize(self) -> None:
        """Wait for it."""


class DeviceLink(Protocol):
    """Copies between the host and one device. Every copy and every wait of a step passes through it."""

    def host_memory(self, num_bytes: int) -> Tensor:
        """Return memory of the host, uint8, which the device reads and writes by itself."""

    def send(self, target: Tensor, source: Tensor) -> None:
        """Copy ``source`` on the host to ``target`` on the device, after what the device has been given so far."""

    def fetch(self, target: Tensor, source: Tensor) -> None:
        """Copy ``source`` on the device to ``target`` on the host, which holds nothing until a later event."""

    def event(self) -> Event:
        """Return what occurs once the device has done all that it has been given so far."""


class CUDALink:
    """Fulfils :class:`DeviceLink` on the current stream of a GPU."""

    def host_memory(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def send(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def fetch(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def event(self) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record()
        return event


class HostLink:
    """Fulfils :class:`DeviceLink` where the device is the host itself: what it is given is done at once."""

    def host_memory(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def send(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source)

    def fetch(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source)

    def event(self) -> "Past":
        return Past()


class Past:
    """Fulfils :class:`Event`: it has occurred."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


def link_of(device: torch.device) -> DeviceLink:
    """Return the link to a device."""
    return CUDALink() if device.type == "cuda" else HostLink()
