"""Defines what captures the work of a device, and what gives it that work again."""

from collections.abc import Callable
from typing import Protocol


class Graph(Protocol):
    """Holds work of the device that can be given to it again."""

    def replay(self) -> None: ...


Capture = Callable[[Callable[[], None]], Graph]
"""Captures what a call gives the device to do. The call runs before that, too, so that its kernels are compiled."""
