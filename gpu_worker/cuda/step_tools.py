"""What a platform offers to compute the steps of a device: copies, kernels and graphs."""

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from ..device.device_link import DeviceLink
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


class GraphCapture:
    """Captures graphs that share one pool of memory: only the results of the graph replayed last may be read."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, compute: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """Run ``compute`` once, which compiles its kernels, and then capture it."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            compute()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # A graph that the collector frees during a capture would end it with an error.
        gc.collect()
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            # Other threads of the process, such as those of transports, may use the device meanwhile.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                compute()
        finally:
            if was_enabled:
                gc.enable()
        return graph
