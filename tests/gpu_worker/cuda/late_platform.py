"""A platform whose device is always behind the host, on tensors of the CPU: a GPU's worker without a GPU."""

from collections.abc import Callable

import pytest

from tests.gpu_worker.cuda.host_rows import HostRowKernels
from tests.gpu_worker.cuda.late_link import LateLink
from tests.gpu_worker.cuda.op_capture import OpCapture
from tests.gpu_worker.cuda.tensor_backend import TensorBackend
from tests.gpu_worker.platform.device_platform import ApartPlatform
from tests.gpu_worker.sampler.device.host_draw import HostKernels
from tokenloom.gpu_worker.attention import attention_backends
from tokenloom.gpu_worker.cuda.step_tensors import StepTools
from tokenloom.gpu_worker.layers import linear
from tokenloom.gpu_worker.sampler.device.device_sampler import DeviceSampler

BYTES_OF_GRAPH = 1 << 12


class LatePlatform(ApartPlatform):
    """Draws on the device, keeps rows there, and captures graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.link = LateLink()
        self.capture = OpCapture()

    def make_sampler(self) -> DeviceSampler:
        return DeviceSampler(HostKernels(), self.link)

    def make_step_tools(self) -> StepTools:
        return StepTools(self.link, HostRowKernels())

    def make_capture(self) -> OpCapture:
        return self.capture

    def kept_by(self, call: Callable[[], None]) -> int:
        """Return as if each graph that the call makes kept some memory."""
        before = len(self.capture.graphs)
        call()
        return BYTES_OF_GRAPH * (len(self.capture.graphs) - before)


def use_tensor_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let workers attend as on a GPU, and multiply with operations that can be captured."""
    monkeypatch.setattr(
        attention_backends,
        "make_attention_backend",
        lambda name, config, block_size, device: TensorBackend(config, block_size, device),
    )
    monkeypatch.setattr(linear, "make_unquantized", linear.make_plain)
