"""Says where a section runs, and times work there. The tests run sections on tensors of the CPU, with tiny shapes."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch

Value = TypeVar("Value")


@dataclass(frozen=True)
class Target:
    """Holds a device and the size of what is measured on it."""

    device: torch.device
    is_tiny: bool = False

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of weights and KV: Triton's interpreter has no bfloat16."""
        return self.pick(torch.bfloat16, torch.float16)

    @property
    def has_gpu(self) -> bool:
        return self.device.type == "cuda"

    def pick(self, full: Value, tiny: Value) -> Value:
        """Return the value for a GPU, or the one for a test on the CPU."""
        return tiny if self.is_tiny else full

    def random(self, *size: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.randn(*size, device=self.device, dtype=dtype or self.dtype)

    def turns(self, nbytes: int) -> int:
        """Return how many copies of what has so many bytes take turns, so that none is still in the device's cache."""
        return turns(nbytes, torch.cuda.get_device_properties(self.device).L2_cache_size) if self.has_gpu else 1

    def synchronize(self) -> None:
        if self.has_gpu:
            torch.cuda.synchronize()

    def pinned(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=self.has_gpu)

    def ms(self, run: Callable[[], object], repeats: int = 20) -> float:
        """Return the median milliseconds that the device takes for a call, after three calls to warm up."""
        if not self.has_gpu:
            return _host_ms(run)
        for _ in range(3):
            run()
        times = []
        for _ in range(repeats):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            run()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end))
        return sorted(times)[len(times) // 2]

    def graph_ms(self, run: Callable[[], object], calls: int = 10) -> float:
        """Return the milliseconds of one call, from a graph of ``calls`` calls: without the host's part of a launch."""
        if not self.has_gpu:
            return _host_ms(run)
        run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(calls):
                run()
        return self.ms(graph.replay, 10) / calls


_CACHES = 4
"""How many times the cache's size is read before the same bytes are read again."""


def turns(nbytes: int, cache_bytes: int) -> int:
    """Return how many copies of ``nbytes`` are together at least as large as four caches of a device."""
    return max(1, -(-_CACHES * cache_bytes // nbytes))


GPU = Target(torch.device("cuda"))
CPU = Target(torch.device("cpu"), is_tiny=True)


def _host_ms(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    run()
    return (time.perf_counter() - started) * 1e3
