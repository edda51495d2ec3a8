"""What the device can do at most: the rest is divided by it."""

import time

import torch

from .rows import Rows, device_ms, graph_ms


def run(rows: Rows) -> None:
    big = torch.randn(1 << 30, device="cuda", dtype=torch.bfloat16)
    other = torch.empty_like(big)
    ms = device_ms(lambda: other.copy_(big))
    rows.add("copy", gb_per_s=2 * big.nbytes / ms / 1e6)
    ms = device_ms(lambda: torch.sum(big.view(torch.int32)))
    rows.add("read (sum)", gb_per_s=big.nbytes / ms / 1e6)
    a, b = torch.randn(2, 8192, 8192, device="cuda", dtype=torch.bfloat16)
    ms = device_ms(lambda: a @ b)
    rows.add("product of 8192 x 8192, bf16", tflop_per_s=2 * 8192**3 / ms / 1e9)
    small = torch.zeros(1, device="cuda")
    started = time.perf_counter()
    for _ in range(1000):
        small.add_(1.0)
    launch_us = (time.perf_counter() - started) * 1e3
    rows.add("launch", host_us=launch_us, in_graph_us=graph_ms(lambda: small.add_(1.0), 100) * 1e3)
    pinned = torch.empty(1 << 28, dtype=torch.uint8, pin_memory=True)
    on_device = torch.empty_like(pinned, device="cuda")
    ms = device_ms(lambda: on_device.copy_(pinned, non_blocking=True), 5)
    rows.add("pinned memory to the device", gb_per_s=pinned.nbytes / ms / 1e6)
    ms = device_ms(lambda: pinned.copy_(on_device, non_blocking=True), 5)
    rows.add("the device to pinned memory", gb_per_s=pinned.nbytes / ms / 1e6)
