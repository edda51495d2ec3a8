"""Blocks of devices over every transport: the memory of a device is a tensor of the CPU, and the driver a fake."""

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.gpu_worker.kv_connector.fake_device import LAYOUT, NUM_LAYERS, FakeIpc, NoIpc, fake_pool
from tokenloom.engine_core.kv_cache.pool_memory import PoolMemory
from tokenloom.engine_core.kv_transfer.kv_service import Endpoints
from tokenloom.engine_core.kv_transfer.kv_transport import KVPool, KVRegion, KVTransferError, KVTransport
from tokenloom.gpu_worker.kv_connector import shared_memory, staging
from tokenloom.gpu_worker.kv_connector.device_transport import DeviceReader, DeviceTransport
from tokenloom.gpu_worker.kv_connector.shared_memory import SharedMemoryTransport
from tokenloom.gpu_worker.kv_connector.staging import parts_of
from tokenloom.gpu_worker.kv_connector.tcp_socket import SocketTransport

MAKE: dict[str, Callable[[], KVTransport]] = {
    "cuda": DeviceTransport,
    "shm": SharedMemoryTransport,
    "unix": SocketTransport,
    "tcp": lambda: SocketTransport("127.0.0.1:0"),
}
BLOCK_BYTES = 256
PAIRS = [("cuda", "device", "device")] + [
    (name, *sides)
    for name in ("shm", "unix", "tcp")
    for sides in (("device", "device"), ("device", "host"), ("host", "device"))
]


def host_pool(num_blocks: int, seed: int = 0) -> KVPool:
    regions = tuple(KVRegion(i * num_blocks * BLOCK_BYTES, BLOCK_BYTES) for i in range(2 * NUM_LAYERS))
    memory = PoolMemory.allocate(num_blocks * BLOCK_BYTES * 2 * NUM_LAYERS, shared=True)
    memory.buffer[:] = np.random.default_rng(seed).bytes(memory.nbytes)
    return KVPool(memory, regions, num_blocks, LAYOUT)


def make(kind: str, num_blocks: int, seed: int = 0) -> KVPool:
    return host_pool(num_blocks, seed) if kind == "host" else fake_pool(num_blocks, seed=seed)


def block(pool: KVPool, block_id: int) -> bytes:
    if pool.device is None:
        return b"".join(view[block_id].tobytes() for view in pool.views)
    packed = np.empty((len(pool.regions), 1, BLOCK_BYTES), dtype=np.uint8)
    pool.device.start_read(np.array([block_id]), slice(0, len(pool.regions)), packed)()
    return packed.tobytes()


def blocks(pool: KVPool) -> list[bytes]:
    return [block(pool, block_id) for block_id in range(pool.num_blocks)]


@pytest.fixture
def make_transport() -> Iterator[Callable[[str], KVTransport]]:
    made = []

    def make(name: str) -> KVTransport:
        made.append(MAKE[name]())
        return made[-1]

    yield make
    for transport in made:
        transport.close()


@pytest.fixture
def small_parts(monkeypatch):
    """Several parts even of a few blocks: two regions at a time over sockets, one block at a time in the window."""
    monkeypatch.setattr(staging, "HALF_BYTES", 5 * BLOCK_BYTES)
    monkeypatch.setattr(shared_memory, "HALF_BYTES", 4096)


@pytest.mark.parametrize(("name", "owner_kind", "reader_kind"), PAIRS)
@pytest.mark.parametrize("count", [2, 7])
def test_reads_blocks_and_touches_no_others(make_transport, small_parts, name, owner_kind, reader_kind, count) -> None:
    owner, pool = make(owner_kind, 23, 1), make(reader_kind, 17, 2)
    reader = make_transport(name).open(make_transport(name).serve(owner), LAYOUT)
    source, target = [22, 3, 4, 5, 0, 9, 9][:count], [0, 7, 8, 9, 16, 2, 3][:count]
    expected = blocks(pool)
    for there, here in zip(source, target, strict=True):
        expected[here] = block(owner, there)
    reader.read([], [], pool)
    reader.read(source, target, pool)
    assert blocks(pool) == expected


@pytest.mark.parametrize(("name", "owner_kind", "reader_kind"), PAIRS)
def test_reads_at_once_from_several_threads(make_transport, small_parts, name, owner_kind, reader_kind) -> None:
    owner = make(owner_kind, 9, 1)
    reader = make_transport(name).open(make_transport(name).serve(owner), LAYOUT)
    pools = [make(reader_kind, 9, seed) for seed in range(3)]

    def read(pool: KVPool) -> None:
        for _ in range(5):
            reader.read(range(9), range(9), pool)

    threads = [threading.Thread(target=read, args=(pool,)) for pool in pools]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(blocks(pool) == blocks(owner) for pool in pools)


@pytest.mark.parametrize(("name", "owner_kind", "reader_kind"), PAIRS)
def test_refuses_what_does_not_fit(make_transport, name, owner_kind, reader_kind) -> None:
    owner, pool = make(owner_kind, 9, 1), make(reader_kind, 4, 2)
    endpoint, transport = make_transport(name).serve(owner), make_transport(name)
    with pytest.raises(KVTransferError, match=rf"{LAYOUT}.* bf16/16") as caught:
        transport.open(endpoint, "bf16/16")
    assert caught.value.reason == "layout"
    reader, before = transport.open(endpoint, LAYOUT), blocks(pool)
    for source, target in (([9], [0]), ([-1], [0]), ([0], [4]), ([0, 1], [0])):
        with pytest.raises(KVTransferError) as caught:
            reader.read(source, target, pool)
        assert caught.value.reason == "transport"
    with pytest.raises(KVTransferError) as caught:
        reader.read([0], [0], KVPool(pool.memory, pool.regions[:-1], 4, LAYOUT))
    assert caught.value.reason == "layout"
    assert blocks(pool) == before
    reader.read([0], [0], pool)  # and goes on
    assert block(pool, 0) == block(owner, 0)


@pytest.mark.parametrize(("name", "owner_kind", "reader_kind"), PAIRS)
def test_a_closed_reader_reads_no_more(make_transport, name, owner_kind, reader_kind) -> None:
    reader = make_transport(name).open(make_transport(name).serve(make(owner_kind, 4)), LAYOUT)
    reader.close()
    reader.close()
    with pytest.raises(KVTransferError):
        reader.read([0], [0], make(reader_kind, 4))


@pytest.mark.parametrize("name", ["cuda", "shm", "unix"])
def test_an_owner_that_closes_is_an_error(make_transport, name) -> None:
    owner = make_transport(name)
    reader = make_transport(name).open(owner.serve(make("device", 4)), LAYOUT)
    pool = make("device", 4, 1)
    reader.read([1], [1], pool)
    owner.close()
    if isinstance(reader, DeviceReader):
        reader.join(10)
    with pytest.raises(KVTransferError) as caught:
        reader.read([1], [1], pool)
    assert caught.value.reason == "transport"


def test_a_pool_of_the_host_is_none_of_a_gpu_s(make_transport) -> None:
    assert make_transport("cuda").serve(host_pool(4)) is None
    reader = make_transport("cuda").open(make_transport("cuda").serve(fake_pool(4)), LAYOUT)
    with pytest.raises(KVTransferError, match="a pool of the host"):
        reader.read([0], [0], host_pool(4))


def test_memory_that_cannot_be_exported_moves_over_the_others(make_transport, caplog) -> None:
    endpoints = Endpoints([make_transport("cuda"), make_transport("shm")])
    endpoints.serve(fake_pool(4, ipc=NoIpc()))
    assert endpoints.names == ["shm"]
    assert "invalid argument" in caplog.text


def test_a_mapping_ends_with_its_owner_s_process(make_transport, tmp_path: Path) -> None:
    """The owner's memory lies in a file, as that of a GPU lies in no process; its process is killed."""
    ipc, module = FakeIpc(), "tests.gpu_worker.kv_connector.fake_device"
    command = [sys.executable, "-m", module, str(tmp_path / "pool")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as owner:
        endpoint = bytes.fromhex(owner.stdout.readline().decode())
        reader = make_transport("cuda").open(endpoint, LAYOUT)
        assert isinstance(reader, DeviceReader)
        pool = fake_pool(4, ipc=ipc)
        reader.read([7, 2], [0, 3], pool)
        assert ipc.num_open == 1
        owner.kill()
    assert [block(pool, 0), block(pool, 3)] == [block(fake_pool(8, seed=1), each) for each in (7, 2)]
    reader.join(10)
    assert ipc.num_open == 0
    with pytest.raises(KVTransferError, match="gone"):
        reader.read([1], [1], pool)


def test_checksums_and_damage_are_those_of_a_pool_of_the_host() -> None:
    pool = fake_pool(5, seed=3)
    twin = host_pool(5)
    for region, view in enumerate(twin.views):
        for block_id in range(5):
            view[block_id] = np.frombuffer(block(pool, block_id), np.uint8).reshape(-1, BLOCK_BYTES)[region]
    assert pool.checksums([4, 0, 2]) == twin.checksums([4, 0, 2])
    for each in (pool, twin):
        each.damage(2)
    assert blocks(pool) == blocks(twin)


@pytest.mark.parametrize(("regions", "count", "size", "most"), [(6, 7, 256, 1280), (6, 2, 256, 1280), (3, 1, 64, 1)])
def test_parts_follow_each_other_as_a_batch_travels(regions, count, size, most) -> None:
    order = [
        (region, place)
        for part in parts_of(regions, count, size, most)
        for region in range(regions)[part.regions]
        for place in range(count)[part.blocks]
    ]
    assert order == [(region, place) for region in range(regions) for place in range(count)]
    assert all(part.nbytes <= max(most, size) for part in parts_of(regions, count, size, most))
    assert not list(parts_of(regions, 0, size, most))
