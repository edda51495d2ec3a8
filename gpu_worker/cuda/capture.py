"""Captures CUDA graphs."""

import gc
from collections.abc import Callable

import torch


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
