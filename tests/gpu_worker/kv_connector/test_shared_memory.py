import gc
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from tests.engine_core.processes import wait_until
from tests.gpu_worker.kv_connector.conftest import LAYOUT, SIZES, MakePool, block
from tokenloom.engine_core.kv_cache.pool_memory import PoolMemory
from tokenloom.engine_core.kv_transfer.kv_transport import KVRegion, KVTransferError, ReadPairs
from tokenloom.gpu_worker.kv_connector.listener import Endpoint, KVListener
from tokenloom.gpu_worker.kv_connector.shared_memory import SharedMemoryTransport, _Offer, map_offer
from tokenloom.gpu_worker.kv_connector.staging import Stagings


@pytest.fixture
def transport():
    transport = SharedMemoryTransport()
    yield transport
    transport.close()


def test_private_memory_cannot_be_served(transport, make_pool: MakePool) -> None:
    assert transport.serve(make_pool(4)) is None


def test_a_wrong_token_gets_no_memory(transport, make_pool: MakePool) -> None:
    endpoint = msgspec.msgpack.decode(transport.serve(make_pool(4, shared=True)), type=Endpoint)
    wrong = msgspec.msgpack.encode(Endpoint(endpoint.name, b"x" * 16))
    with pytest.raises(KVTransferError, match="not passed") as caught:
        transport.open(wrong, LAYOUT)
    assert caught.value.reason == "transport"


def test_an_owner_that_is_gone_is_an_error(transport, make_pool: MakePool) -> None:
    endpoint = transport.serve(make_pool(4, shared=True))
    transport.close()
    with pytest.raises(KVTransferError, match="refused"):
        SharedMemoryTransport().open(endpoint, LAYOUT)


def test_no_memory_is_passed_after_it_was_closed(transport, make_pool: MakePool) -> None:
    pool = make_pool(4, shared=True)
    endpoint = transport.serve(pool)
    pool.memory.close()
    with pytest.raises(KVTransferError):
        transport.open(endpoint, LAYOUT)


def test_a_read_in_progress_outlives_its_owner(transport, make_pool: MakePool) -> None:
    owner, pool = make_pool(4, shared=True), make_pool(4, seed=1)
    expected = block(owner, 2)
    reader = SharedMemoryTransport().open(transport.serve(owner), LAYOUT)
    source = reader._source
    transport.close()
    owner.memory.close()
    assert wait_until(lambda: reader.is_closed, 30.0)
    source.read(ReadPairs(False, np.array([2]), np.array([0])), pool, Stagings())
    assert block(pool, 0) == expected


OWNER = f"""
import sys
from tokenloom.engine_core.kv_cache.pool_memory import PoolMemory
from tokenloom.engine_core.kv_transfer.kv_transport import KVPool, KVRegion
from tokenloom.gpu_worker.kv_connector.shared_memory import SharedMemoryTransport
pool = KVPool(PoolMemory.allocate(4 * {SIZES[0]}, shared=True), (KVRegion(0, {SIZES[0]}),), 4, {LAYOUT!r})
transport = SharedMemoryTransport()
print(transport.serve(pool).hex(), flush=True)
sys.stdin.read()
"""


def test_the_memory_of_an_owner_that_was_killed_is_unmapped(transport) -> None:
    gc.collect()
    before = _held()
    owner = subprocess.Popen([sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with owner:
        assert owner.stdout is not None
        reader = transport.open(bytes.fromhex(owner.stdout.readline()), LAYOUT)
        assert _held()[1] > before[1]
        owner.kill()
        owner.wait()
        assert wait_until(lambda: reader.is_closed, 30.0)
    with pytest.raises(KVTransferError, match="the owner has ended") as caught:
        reader.read([0], [0], None)
    assert caught.value.reason == "transport"
    assert wait_until(lambda: _held()[1] <= before[1], 30.0), "its memory is still mapped"


def test_readers_leave_no_descriptor_and_no_mapping(transport, make_pool: MakePool) -> None:
    endpoint = transport.serve(make_pool(4, shared=True))
    transport.open(endpoint, LAYOUT).close()
    gc.collect()
    before = _held()
    for _ in range(10):
        transport.open(endpoint, LAYOUT)
        with pytest.raises(KVTransferError):
            transport.open(endpoint, "other")
    gc.collect()
    assert wait_until(lambda: all(now <= then for now, then in zip(_held(), before, strict=True)), 30.0)


def _held() -> tuple[int, int]:
    return len(os.listdir("/proc/self/fd")), Path("/proc/self/maps").read_text().count("memfd")


@pytest.fixture
def connection() -> Iterator[socket.socket]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours


def offer(num_blocks: int = 4, regions: list[KVRegion] | None = None) -> _Offer:
    return _Offer(LAYOUT, num_blocks, [KVRegion(0, 8)] if regions is None else regions)


@pytest.mark.parametrize(
    "wrong",
    [
        offer(1 << 40),
        offer(-1),
        offer(1 << 70),
        offer(regions=[KVRegion(1 << 40, 8)]),
        offer(regions=[KVRegion(-8, 8)]),
    ],
)
def test_an_offer_beyond_the_memory_is_refused(connection: socket.socket, wrong: _Offer) -> None:
    memory = PoolMemory.allocate(4096, shared=True)
    with pytest.raises(KVTransferError, match="cannot be mapped"):
        map_offer(connection, memory.fd, wrong, LAYOUT)
    memory.close()


def test_memory_that_could_shrink_is_refused(connection: socket.socket) -> None:
    fd = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 4096)
    with pytest.raises(KVTransferError, match="not sealed"):
        map_offer(connection, fd, offer(), LAYOUT)
    os.close(fd)


@pytest.mark.parametrize("answer", [b"", b"x", msgspec.msgpack.encode(offer())])
def test_an_owner_that_passes_nothing_is_refused(transport, answer: bytes) -> None:
    name = f"tokenloom-test-{os.getpid()}"
    server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    server.bind(f"\0{name}")

    def respond(connection: socket.socket) -> None:
        connection.recv(4096)  # the reader's token: it would not reach an owner that has closed already
        connection.sendall(answer)

    owner = KVListener(server, respond, name="test", max_connections=1)
    try:
        with pytest.raises(KVTransferError, match="not passed"):
            transport.open(msgspec.msgpack.encode(Endpoint(name, b"x" * 16)), LAYOUT)
    finally:
        owner.close()


def test_another_process_reads(transport, make_pool: MakePool) -> None:
    owner = make_pool(4, shared=True)
    endpoint = transport.serve(owner)
    script = f"""
import sys
from tokenloom.engine_core.kv_transfer.kv_transport import KVPool, KVRegion
from tokenloom.engine_core.kv_cache.pool_memory import PoolMemory
from tokenloom.gpu_worker.kv_connector.listener import KVListener
from tokenloom.gpu_worker.kv_connector.shared_memory import SharedMemoryTransport
memory = PoolMemory.allocate(4096, shared=False)
sizes = {SIZES}
pool = KVPool(memory, tuple(KVRegion(4 * sum(sizes[:i]), size) for i, size in enumerate(sizes)), 4, {LAYOUT!r})
SharedMemoryTransport().open(bytes.fromhex(sys.argv[1]), {LAYOUT!r}).read([3], [1], pool)
print(b"".join(view[1].tobytes() for view in pool.views).hex())
"""
    found = subprocess.run([sys.executable, "-c", script, endpoint.hex()], capture_output=True, check=True, text=True)
    assert found.stdout.strip() == block(owner, 3).hex()
