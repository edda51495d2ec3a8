"""Tensors of the CPU that play the memory of devices, and what passes them between engines and processes."""

from pathlib import Path

import msgspec
import torch
from torch import Tensor

from tokenloom.engine_core.kv_transfer.kv_transport import KVPool
from tokenloom.gpu_worker.kv_connector.device_pool import CopyBlocks, Mapping, copy_with_torch, make_device_pool

LAYOUT = "HND/fp16/3x2x16/4"
NUM_LAYERS, BLOCK_SHAPE = 3, (2, 4, 16)
"""Heads, tokens and elements of a block: 256 bytes for the keys of a layer."""


class FakeMapping:
    """The memory of another engine."""

    def __init__(self, words: Tensor, ipc: "FakeIpc") -> None:
        self._words = words.flatten()
        self._ipc = ipc

    def words(self, shape: tuple[int, int, int]) -> Tensor:
        return self._words.view(shape)

    def close(self) -> None:
        self._ipc.num_open -= 1


class FakeIpc:
    """Maps tensors of this process, or of another one if they lie in a file that both map."""

    def __init__(self) -> None:
        self.num_open = 0
        self._files: dict[int, tuple[str, int]] = {}
        self._exported: list[Tensor] = []

    def zeros(self, count: int, file: Path) -> Tensor:
        """Return ``count`` int64 in a new file."""
        file.write_bytes(bytes(8 * count))
        made = torch.from_file(str(file), shared=True, size=count, dtype=torch.int64)
        self._files[made.data_ptr()] = str(file), count
        return made

    def export(self, memory: Tensor) -> bytes:
        if memory.data_ptr() in self._files:
            return msgspec.msgpack.encode(self._files[memory.data_ptr()])
        _EXPORTED.append(memory)
        return msgspec.msgpack.encode(("", len(_EXPORTED) - 1))

    def open(self, handle: bytes, device: torch.device) -> Mapping:
        file, number = msgspec.msgpack.decode(handle)
        words = torch.from_file(file, shared=True, size=number, dtype=torch.int64) if file else _EXPORTED[number]
        self.num_open += 1
        return FakeMapping(words, self)


class NoIpc(FakeIpc):
    """As where the driver refuses to export memory."""

    def export(self, memory: Tensor) -> bytes:
        raise OSError("CUDA error 1: invalid argument")


_EXPORTED: list[Tensor] = []


def fake_pool(
    num_blocks: int,
    *,
    seed: int = 0,
    ipc: FakeIpc | None = None,
    copy: CopyBlocks = copy_with_torch,
    file: Path | None = None,
    layout: str = LAYOUT,
) -> KVPool:
    """Return a pool of three layers on a device, whose blocks are random. ``file``: holds it, for other processes."""
    ipc = ipc or FakeIpc()
    count = NUM_LAYERS * 2 * num_blocks * 32
    words = ipc.zeros(count, file) if file else torch.zeros(count, dtype=torch.int64)
    words.random_(generator=torch.Generator().manual_seed(seed))
    caches = words.view(torch.float16).view(NUM_LAYERS, 2, num_blocks, *BLOCK_SHAPE).unbind()
    return make_device_pool(caches, num_blocks, layout, copy, ipc)


def main() -> None:
    """Serve a pool that lies in a file, print the endpoint, and wait to be killed: the owner in another process."""
    import sys

    from tokenloom.gpu_worker.kv_connector.device_transport import DeviceTransport

    transport = DeviceTransport()
    endpoint = transport.serve(fake_pool(8, seed=1, file=Path(sys.argv[1])))
    assert endpoint is not None
    print(endpoint.hex(), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
