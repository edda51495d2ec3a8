"""What every transport owes its callers, over each of them."""

import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from tests.gpu_worker.kv_connector.conftest import LAYOUT, MakePool, block, blocks
from tokenloom.engine_core.kv_transfer.kv_transport import KVPool, KVReader, KVTransferError, KVTransport
from tokenloom.gpu_worker.kv_connector import nixl
from tokenloom.gpu_worker.kv_connector.nixl import NixlTransport
from tokenloom.gpu_worker.kv_connector.shared_memory import SharedMemoryTransport
from tokenloom.gpu_worker.kv_connector.tcp_socket import SocketTransport

MAKE = {
    "shm": SharedMemoryTransport,
    "unix": SocketTransport,
    "tcp": lambda: SocketTransport("127.0.0.1:0"),
    "nixl": NixlTransport,
}
needs_nixl = pytest.mark.skipif(not nixl.is_available(), reason="nixl is not installed")


@pytest.fixture(params=["shm", "unix", "tcp", pytest.param("nixl", marks=needs_nixl)])
def make_transport(request: pytest.FixtureRequest) -> Iterator[Callable[[], KVTransport]]:
    made = []

    def make() -> KVTransport:
        made.append(MAKE[request.param]())
        return made[-1]

    yield make
    for transport in made:
        transport.close()
        transport.close()


@pytest.fixture
def owner(make_pool: MakePool) -> KVPool:
    return make_pool(23, shared=True, seed=1)


@pytest.fixture
def served(make_transport: Callable[[], KVTransport], owner: KVPool) -> tuple[KVTransport, bytes]:
    transport = make_transport()
    endpoint = transport.serve(owner)
    assert endpoint is not None
    transport.attend(60)
    return transport, endpoint


@pytest.fixture
def reader(make_transport: Callable[[], KVTransport], served: tuple[KVTransport, bytes]) -> KVReader:
    return make_transport().open(served[1], LAYOUT)


@pytest.mark.parametrize("gap", [0, 64], ids=["same", "other"])
def test_reads_blocks_and_touches_no_others(reader: KVReader, owner: KVPool, make_pool: MakePool, gap: int) -> None:
    pool = make_pool(17, gap=gap, seed=2)
    before = blocks(pool)
    source, target = [22, 3, 4, 5, 0, 9, 9], [0, 7, 8, 9, 16, 2, 3]
    reader.read(source, target, pool)
    expected = list(before)
    for there, here in zip(source, target, strict=True):
        expected[here] = block(owner, there)
    assert blocks(pool) == expected


def test_reads_what_the_owner_has_written_since(reader: KVReader, owner: KVPool, make_pool: MakePool) -> None:
    pool = make_pool(4)
    for value in (1, 2):
        owner.views[0][5] = value
        reader.read(np.array([5], dtype=np.int32), np.array([1]), pool)
        assert block(pool, 1) == block(owner, 5)


def test_reads_nothing(reader: KVReader, make_pool: MakePool) -> None:
    pool = make_pool(4)
    before = blocks(pool)
    reader.read([], [], pool)
    assert blocks(pool) == before


def test_reads_at_once_from_several_threads(reader: KVReader, owner: KVPool, make_pool: MakePool) -> None:
    pools = [make_pool(23, seed=seed) for seed in range(4)]

    def read(pool: KVPool) -> None:
        for _ in range(20):
            reader.read(range(23), range(23), pool)

    threads = [threading.Thread(target=read, args=(pool,)) for pool in pools]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(blocks(pool) == blocks(owner) for pool in pools)


@pytest.mark.parametrize(
    ("source", "target"),
    [([23], [0]), ([-1], [0]), ([0], [4]), ([0], [-1]), ([0, 1], [0]), ([1 << 70], [0]), ([[0]], [0]), (["x"], [0])],
    ids=["source", "negative source", "target", "negative target", "lengths", "huge", "nested", "no number"],
)
def test_refuses_blocks_that_are_not_there(
    reader: KVReader, make_pool: MakePool, source: list[int], target: list[int]
) -> None:
    pool = make_pool(4)
    before = blocks(pool)
    with pytest.raises(KVTransferError) as caught:
        reader.read(source, target, pool)
    assert caught.value.reason == "transport"
    assert blocks(pool) == before
    reader.read([0], [0], pool)  # and goes on


def test_refuses_another_layout_naming_both(
    make_transport: Callable[[], KVTransport], served: tuple[KVTransport, bytes]
) -> None:
    with pytest.raises(KVTransferError, match=rf"{LAYOUT[:6]}.* bf16/16") as caught:
        make_transport().open(served[1], "bf16/16")
    assert caught.value.reason == "layout"


def test_refuses_a_pool_of_other_regions(reader: KVReader, make_pool: MakePool) -> None:
    whole = make_pool(4)
    part = KVPool(whole.memory, whole.regions[:-1], 4, LAYOUT)
    with pytest.raises(KVTransferError) as caught:
        reader.read([0], [0], part)
    assert caught.value.reason == "layout"


@pytest.mark.parametrize("endpoint", [b"", b"\xc1", b"\x92\xa1x\xc4\x01x", b"\x01"])
def test_refuses_an_endpoint_that_is_none(make_transport: Callable[[], KVTransport], endpoint: bytes) -> None:
    with pytest.raises(KVTransferError) as caught:
        make_transport().open(endpoint, LAYOUT)
    assert caught.value.reason == "transport"


def test_a_closed_reader_reads_no_more(reader: KVReader, make_pool: MakePool) -> None:
    pool = make_pool(4)
    reader.close()
    reader.close()
    with pytest.raises(KVTransferError):
        reader.read([0], [0], pool)
