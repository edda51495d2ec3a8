"""Takes the place of launches: checks what the kernels would get, on a device that computes nothing."""

from typing import Any

import torch

from tokenloom.gpu_worker.attention import attention_backends
from tokenloom.gpu_worker.device.device_link import Past
from tokenloom.gpu_worker.layers import linear
from tokenloom.gpu_worker.models import experts as grouped_experts
from tokenloom.gpu_worker.ops import cpu_ops

META = torch.device("meta")


class MetaLink:
    """Fulfils ``cuda.device_link.DeviceLink`` without content on either side."""

    def host_memory(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=META)

    def send(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source)

    def fetch(self, target: torch.Tensor, source: torch.Tensor) -> None:
        assert source.device == META
        target.copy_(source)

    def event(self) -> Past:
        return Past()


def use_kernels_on_meta(monkeypatch, modules) -> list[str]:
    """Makes the kernels those of the device ``meta``. Returns the names of the kernels that are launched later."""
    launched: list[str] = []

    def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
        names = kernel.arg_names
        wrong = [
            (name, each.device)
            for name, each in zip(names, arguments, strict=False)
            if isinstance(each, torch.Tensor) and each.device != META
        ]
        assert not wrong, f"{kernel.__name__} gets tensors of another device: {wrong}"
        options = {"num_warps", "num_stages", "enable_fp_fusion"}
        assert {*names[: len(arguments)], *(constants.keys() - options)} == set(names)
        assert all(0 <= size < 1 << 31 for size in grid)
        assert all(size < 1 << 16 for size in grid[1:]), f"CUDA has no grid {grid}"
        launched.append(kernel.__name__)

    for module in modules:
        monkeypatch.setattr(module, "launch", launch)
    for module in (attention_backends, grouped_experts, linear, cpu_ops):
        monkeypatch.setattr(module, "uses_triton", lambda device: device == META)
    return launched
