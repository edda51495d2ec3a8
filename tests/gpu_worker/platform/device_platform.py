"""A platform that treats the CPU as a device apart: what a GPU's worker does runs on tensors of the CPU."""

import torch

from tests.gpu_worker.kv_connector.fake_device import FakeIpc
from tests.gpu_worker.sampler.device.host_draw import make_device_sampler
from tokenloom.engine_core.kv_transfer.kv_transport import KVPool
from tokenloom.gpu_worker.kv_connector.device_pool import copy_with_torch, make_device_pool
from tokenloom.gpu_worker.sampler.device.device_sampler import DeviceSampler
from tokenloom.process.memory import status_bytes


class ApartPlatform:
    """As a GPU's: the pool is the device's, tokens are drawn there."""

    device = torch.device("cpu")
    num_devices = 1
    pool_is_on_host = False
    cpu_watch = None
    hardware = "apart"
    computes_fp8 = True

    def __init__(self, kv_memory: int = 1 << 22) -> None:
        self._kv_memory = kv_memory
        self.num_returned = 0

    def make_sampler(self) -> DeviceSampler:
        return make_device_sampler()

    def make_step_tools(self) -> None:
        return None

    def make_capture(self) -> None:
        return None

    def device_pool(self, caches, num_blocks: int, layout: str) -> KVPool:
        return make_device_pool(caches, num_blocks, layout, copy_with_torch, FakeIpc())

    def start(self, num_threads: int, num_engines: int) -> None:
        torch.set_num_threads(num_threads or 1)

    def peak_of(self, call) -> int:
        call()
        return 1 << 20

    def kv_memory(self, activations: int, num_engines: int) -> int:
        return (self._kv_memory - activations) // num_engines

    def bytes_in_use(self) -> int:
        return status_bytes("RssAnon")

    def return_freed(self) -> None:
        self.num_returned += 1
