"""Defines what a platform offers to compute the steps of a device."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from .device_link import DeviceLink
from .step_tensors import RowKernels


class Graph(Protocol):
    """Holds work of the device that can be given to it again."""

    def replay(self) -> None: ...


Capture = Callable[[Callable[[], None]], Graph]
"""Captures what a call gives the device to do. The call runs before that, too, so that its kernels are compiled."""


@dataclass(frozen=True, slots=True)
class StepTools:
    """Holds the means of a device that keeps the rows of the batch: a step is one copy to it."""

    link: DeviceLink
    kernels: RowKernels
