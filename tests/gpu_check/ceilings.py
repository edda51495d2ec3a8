"""What the device can do at most: the rest is divided by it."""

import time

import torch

from tests.gpu_check.rows import Rows
from tests.gpu_check.target import GPU, Target

READ = "read (sum)"
PRODUCT = "product of 8192 x 8192, bf16"


def run(rows: Rows, target: Target = GPU) -> None:
    big = target.random(target.pick(1 << 30, 1 << 10))
    other = torch.empty_like(big)
    rows.add("copy", gb_per_s=2 * big.nbytes / target.ms(lambda: other.copy_(big)) / 1e6)
    rows.add(READ, gb_per_s=big.nbytes / target.ms(lambda: torch.sum(big.view(torch.int32))) / 1e6)
    size = target.pick(8192, 32)
    a, b = target.random(2, size, size)
    rows.add(PRODUCT, tflop_per_s=2 * size**3 / target.ms(lambda: a @ b) / 1e9)
    small = torch.zeros(1, device=target.device)
    started = time.perf_counter()
    for _ in range(1000):
        small.add_(1.0)
    launch_us = (time.perf_counter() - started) * 1e3
    rows.add("launch", host_us=launch_us, in_graph_us=target.graph_ms(lambda: small.add_(1.0), 100) * 1e3)
    _replay(rows, target, small)
    pinned = target.pinned(target.pick(1 << 28, 1 << 10))
    on_device = torch.empty_like(pinned, device=target.device)
    ms = target.ms(lambda: on_device.copy_(pinned, non_blocking=True), 5)
    rows.add("pinned memory to the device", gb_per_s=pinned.nbytes / ms / 1e6)
    ms = target.ms(lambda: pinned.copy_(on_device, non_blocking=True), 5)
    rows.add("the device to pinned memory", gb_per_s=pinned.nbytes / ms / 1e6)


def _replay(rows: Rows, target: Target, small: torch.Tensor) -> None:
    """The host's part of replaying a graph of as many kernels as a step of an 8B has."""
    if not target.has_gpu:
        return
    small.add_(1.0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(300):
            small.add_(1.0)
    graph.replay()
    torch.cuda.synchronize()
    started = time.perf_counter()
    graph.replay()
    host_us = (time.perf_counter() - started) * 1e6
    torch.cuda.synchronize()
    rows.add("graph of 300 kernels", host_us=host_us, device_us=target.ms(graph.replay, 10) * 1e3)
