"""Workers that each keep, serve and read a part of a pool, over sockets: no process has the whole pool in memory."""

import contextlib
import itertools
import os
import re
import zlib
from collections.abc import Callable, Iterator, Sequence

import msgspec
import pytest

from tests.engine_core.kv_transfer.test_divided_pools import (
    DTYPES,
    KINDS,
    NUM_BLOCKS,
    content,
    fill,
    layout,
    make_pool,
)
from tokenloom.engine_core.data.errors import WorkerLostError
from tokenloom.engine_core.data.kv_groups import read_parts
from tokenloom.engine_core.data.kv_messages import KVTarget
from tokenloom.engine_core.executor.ranks import RankPool, crc_of_both, parts_pool
from tokenloom.engine_core.kv_cache.pool_memory import PoolMemory
from tokenloom.engine_core.kv_transfer.kv_copier import DividedPool
from tokenloom.engine_core.kv_transfer.kv_transport import KVPool, KVReader, KVRegion, KVTransferError, MemoryApart
from tokenloom.engine_core.kv_transfer.pool_parts import PartMessage, PartRead, WorkerPart
from tokenloom.gpu_worker.kv_connector.tcp_socket import SocketTransport

SOURCE, TARGET = [5, 0, 1, 6, 2], [1, 3, 4, 0, 6]


class Ranks:
    """The workers of an engine, in this process."""

    def __init__(self, pools: Sequence[KVPool], num_copies: int = 1) -> None:
        self.pools = list(pools)
        self.transports = [SocketTransport("127.0.0.1:0") for _ in pools]
        self.workers = [WorkerPart(pool, each) for pool, each in zip(pools, self.transports, strict=True)]
        self.is_lost = False
        parts = [
            RankPool(list(pool.regions), pool.num_blocks, pool.layout, pool.num_slots, endpoint=worker.serve())
            for pool, worker in zip(self.pools, self.workers, strict=True)
        ]
        self.pool = parts_pool(self.send, parts, max(pool.memory.nbytes for pool in pools), num_copies)

    def send(self, messages: Sequence[bytes]) -> Callable[[], list[bytes]]:
        if self.is_lost:
            raise WorkerLostError("worker 1 is lost")
        decoded = [msgspec.msgpack.decode(message, type=PartMessage) for message in messages]
        answers = [worker.answer(message) for worker, message in zip(self.workers, decoded, strict=False)]
        return lambda: [msgspec.msgpack.encode(answer) for answer in answers]

    @property
    def apart(self) -> MemoryApart:
        assert self.pool.apart is not None
        return self.pool.apart

    def target(self, source: Sequence[int]) -> KVTarget:
        endpoint = self.apart.endpoints["socket"]
        return KVTarget(b"", "socket", endpoint, list(source), [], 1, owner="owner", layout=self.pool.layout)

    def close(self) -> None:
        for transport in self.transports:
            transport.close()


def part_pools(name: str, dtype: str) -> list[KVPool]:
    """A pool for each part of this layout, in memory of its own."""
    pools = []
    for part, label in zip(read_parts(name), re.split(r"\+(?=HND)", name), strict=True):
        size = len(part.box[1]) * len(part.box[2]) * DTYPES[dtype]
        regions = tuple(KVRegion(n * size * NUM_BLOCKS, size) for n in range(2 * len(part.box[0])))
        memory = PoolMemory.allocate(len(regions) * size * NUM_BLOCKS, shared=False)
        pools.append(KVPool(memory, regions, NUM_BLOCKS, label))
    return pools


def rows(pools: Sequence[KVPool], block_id: int) -> list[bytes]:
    return [row.tobytes() for pool in pools for row in pool.rows(block_id)]


def filled(name: str, dtype: str) -> Ranks:
    ranks = Ranks(part_pools(name, dtype))
    for block_id in range(NUM_BLOCKS):
        pieces = iter(content(name, dtype, block_id))
        for pool in ranks.pools:
            for row in pool.rows(block_id):
                row[:] = memoryview(next(pieces))
    return ranks


def sums_of_torn(reader: Ranks, target: KVTarget) -> list[int] | None:
    """The checksums of a read whose last block is torn; None: two workers have read different bytes."""
    try:
        return reader.apart.read(target, TARGET, checksum=True, tears=True)
    except KVTransferError as error:
        if error.reason != "checksum":
            raise
        return None


@contextlib.contextmanager
def closing(*closed: Ranks | SocketTransport) -> Iterator[None]:
    try:
        yield
    finally:
        for each in closed:
            each.close()


def test_checksums_of_parts_join_to_that_of_all() -> None:
    for size in (0, 1, 7, 4096, 100_001):
        one, other = os.urandom(33), os.urandom(size)
        assert crc_of_both(zlib.crc32(one), zlib.crc32(other), size) == zlib.crc32(one + other)


@pytest.mark.parametrize(("theirs", "ours"), list(itertools.product(KINDS, KINDS)))
@pytest.mark.parametrize("dtype", DTYPES)
def test_each_worker_reads_its_part_from_the_workers_of_the_owner(theirs: str, ours: str, dtype: str) -> None:
    owner, reader = filled(layout(theirs, dtype), dtype), Ranks(part_pools(layout(ours, dtype), dtype))
    with closing(owner, reader):
        target = owner.target(SOURCE)
        sums = reader.apart.read(target, TARGET, checksum=True, tears=False)
        for there, here in zip(SOURCE, TARGET, strict=True):
            assert rows(reader.pools, here) == content(reader.pool.layout, dtype, there)
        for untouched in (2, 5):
            assert not any(map(any, rows(reader.pools, untouched)))
        whole = make_pool(owner.pool.layout, dtype)
        fill(whole, dtype)
        assert sums == owner.pool.checksums(SOURCE) == whole.checksums(SOURCE)
        assert sums_of_torn(reader, target) != sums
        assert reader.apart.read(target, TARGET, checksum=False, tears=False) == []


@pytest.mark.parametrize(("theirs", "ours"), list(itertools.product(KINDS, KINDS)))
def test_one_of_both_engines_has_its_pool_in_one_memory(theirs: str, ours: str) -> None:
    dtype = "fp32"
    whole, reader = make_pool(layout(theirs, dtype), dtype), Ranks(part_pools(layout(ours, dtype), dtype))
    fill(whole, dtype)
    alone = SocketTransport("127.0.0.1:0")
    with closing(reader, alone):
        target = KVTarget(b"", "socket", alone.serve(whole), SOURCE, [], 1, layout=whole.layout)
        assert reader.apart.read(target, TARGET, checksum=True, tears=False) == whole.checksums(SOURCE)
        for there, here in zip(SOURCE, TARGET, strict=True):
            assert rows(reader.pools, here) == content(reader.pool.layout, dtype, there)
        back = make_pool(whole.layout, dtype)
        found = alone.open(reader.apart.endpoints["socket"], reader.pool.layout)
        if back.layout == reader.pool.layout:
            found.read(TARGET, SOURCE, back)
        else:
            DividedPool(back, reader.pool.layout).read(found, TARGET, SOURCE)
        assert [rows([back], each) for each in SOURCE] == [rows([whole], each) for each in SOURCE]


def test_a_worker_needs_only_the_owners_workers_that_have_its_part() -> None:
    owner, reader = filled(layout("heads", "fp32"), "fp32"), Ranks(part_pools(layout("shared heads", "fp32"), "fp32"))
    with closing(owner, reader):
        target = owner.target(SOURCE)
        owner.transports[1].close()
        found = [
            worker.answer(PartRead(target, TARGET, reader.pool.layout, number, 0, checksum=True, tears=False)).failure
            for number, worker in enumerate(reader.workers)
        ]
        assert found == ["", "", "transport", "transport"]
        with pytest.raises(KVTransferError, match=r"worker 2: connecting to 127\.0\.0\.1") as caught:
            reader.apart.read(target, TARGET, checksum=True, tears=False)
        assert caught.value.reason == "transport"


def state_pools() -> list[KVPool]:
    """Two ranks with blocks and slots of states, of a layout that is not divided in other ways."""
    pools = []
    for rank in range(2):
        regions = (KVRegion(0, 16 + rank), KVRegion(512, 48, is_state=True), KVRegion(1024, 8))
        memory = PoolMemory.allocate(4096, shared=False)
        memory.buffer[:4096] = os.urandom(4096)
        pools.append(KVPool(memory, regions, 6, f"states{rank}", num_slots=3))
    return pools


def test_slots_of_states_move_between_equal_workers() -> None:
    owner, reader = Ranks(state_pools()), Ranks(state_pools())
    with closing(owner, reader):
        source, target = [4, 0, 6 + 2], [1, 2, 6 + 0]
        sums = reader.apart.read(owner.target(source), target, checksum=True, tears=False)
        for there, here in zip(source, target, strict=True):
            assert rows(reader.pools, here) == rows(owner.pools, there)
        assert sums == owner.pool.checksums(source)
        assert sums == [zlib.crc32(b"".join(rows(owner.pools, each))) for each in source]


def test_copies_of_a_part_are_read_too() -> None:
    """Workers that divide prompts each keep every token."""
    whole = layout("whole", "fp32")
    owner, reader = filled(whole, "fp32"), Ranks(part_pools(whole, "fp32") + part_pools(whole, "fp32"), num_copies=2)
    with closing(owner, reader):
        assert reader.pool.layout == whole
        sums = reader.apart.read(owner.target(SOURCE), TARGET, checksum=True, tears=False)
        assert sums == owner.pool.checksums(SOURCE) == reader.pool.checksums(TARGET)
        for pool in reader.pools:
            assert [rows([pool], each) for each in TARGET] == [content(whole, "fp32", each) for each in SOURCE]


def test_other_numbers_and_blocks_that_do_not_exist_are_refused_by_name() -> None:
    owner, reader = (
        filled(layout("heads", "fp32"), "fp32"),
        Ranks(part_pools(layout("tokens", "int8+fp32"), "int8+fp32")),
    )
    with closing(owner, reader):
        with pytest.raises(
            KVTransferError, match=r"worker 0: the owner's blocks are HND/fp32.*this engine's HND/int8"
        ) as caught:
            reader.apart.read(owner.target(SOURCE), TARGET, checksum=True, tears=False)
        assert caught.value.reason == "layout"
        with pytest.raises(KVTransferError, match="worker 0: block ids exceed a pool of 7 blocks"):
            owner.pool.checksums([7])


def test_a_lost_worker_fails_the_transfer_and_not_the_core() -> None:
    owner, reader = filled(layout("heads", "fp32"), "fp32"), Ranks(part_pools(layout("heads", "fp32"), "fp32"))
    with closing(owner, reader):
        reader.is_lost = True
        with pytest.raises(KVTransferError, match="a worker: worker 1 is lost") as caught:
            reader.apart.read(owner.target(SOURCE), TARGET, checksum=True, tears=False)
        assert caught.value.reason == "transport"
        reader.apart.interrupt(owner.target(SOURCE))
        reader.apart.forget(["owner"])
        reader.apart.close()


def test_a_failure_of_any_kind_waits_for_the_workers_that_still_write(monkeypatch: pytest.MonkeyPatch) -> None:
    owner, reader = filled(layout("heads", "fp32"), "fp32"), Ranks(part_pools(layout("heads", "fp32"), "fp32"))

    def open_regions(*_: object) -> KVReader:
        raise MemoryError("no room")

    with closing(owner, reader):
        monkeypatch.setattr(reader.transports[0], "open_regions", open_regions)
        with pytest.raises(KVTransferError, match="worker 0: MemoryError: no room") as caught:
            reader.apart.read(owner.target(SOURCE), TARGET, checksum=False, tears=False)
        assert caught.value.reason == "transport"
        assert rows([reader.pools[1]], TARGET[0]) == rows([owner.pools[1]], SOURCE[0])


def test_an_owner_without_an_endpoint_ends_no_other_read() -> None:
    owner, reader = filled(layout("heads", "fp32"), "fp32"), Ranks(part_pools(layout("heads", "fp32"), "fp32"))
    with closing(owner, reader):
        target = owner.target(SOURCE)
        nowhere = msgspec.structs.replace(target, endpoint=b"", owner="another")
        reader.apart.read(target, TARGET, checksum=False, tears=False)
        with pytest.raises(KVTransferError, match="worker 0: the owner's endpoint"):
            reader.apart.read(nowhere, TARGET, checksum=False, tears=False)
        reader.apart.interrupt(nowhere)
        reader.apart.forget([])
        assert [len(transport._readers) for transport in reader.transports] == [1, 1]


def test_what_was_opened_is_closed_when_the_owner_has_left_and_opened_again() -> None:
    owner, reader = filled(layout("heads", "fp32"), "fp32"), Ranks(part_pools(layout("heads", "fp32"), "fp32"))
    with closing(owner, reader):
        for end in (
            lambda: reader.apart.forget(["owner"]),
            lambda: reader.apart.interrupt(owner.target([])),
            reader.apart.close,
        ):
            reader.apart.read(owner.target(SOURCE), TARGET, checksum=False, tears=False)
            assert [len(transport._readers) for transport in reader.transports] == [1, 1]
            reader.apart.forget(["another"])
            assert [len(transport._readers) for transport in reader.transports] == [1, 1]
            end()
            assert [len(transport._readers) for transport in reader.transports] == [0, 0]
