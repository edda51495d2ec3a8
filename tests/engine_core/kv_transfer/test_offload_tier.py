import os
import queue
from pathlib import Path

import numpy as np
import pytest

from tokenloom.engine_core.kv_cache.pool_memory import PoolMemory
from tokenloom.engine_core.kv_transfer import offload_tier
from tokenloom.engine_core.kv_transfer.kv_transport import KVPool, KVRegion
from tokenloom.engine_core.kv_transfer.offload_tier import OffloadTier, TierIndex, TierLoad, TierSave
from tokenloom.process.fall_backs import OF_PROCESS


def test_the_index_gives_up_what_was_of_no_use_for_longest() -> None:
    index = TierIndex(2)
    assert [index.add(b"a"), index.add(b"b")] == [0, 1]
    index.touch(b"a")
    assert index.add(b"c") == 1
    assert [index.find(name) for name in (b"a", b"b", b"c")] == [0, None, 1]
    index.remove(b"a")
    index.remove(b"a")
    assert index.add(b"d") == 0
    index.clear()
    assert index.find(b"c") is None
    assert {index.add(b"e"), index.add(b"f")} == {0, 1}


@pytest.fixture
def pool() -> KVPool:
    memory = PoolMemory.allocate(4096, shared=False)
    memory.buffer[:] = np.random.default_rng(0).bytes(4096)
    return KVPool(memory, (KVRegion(0, 24), KVRegion(1000, 24), KVRegion(2000, 40)), 8, "test")


class Tier:
    """A tier of four slots, asked one thing at a time."""

    def __init__(self, directory: Path, pool: KVPool) -> None:
        self.pool = pool
        self._loaded: queue.Queue[tuple[TierLoad, int, str]] = queue.Queue()
        self.tier = OffloadTier(directory, 4, pool, lambda *result: self._loaded.put(result))

    def save(self, slot: int, block_hash: bytes, block_id: int) -> bytes:
        data = content(self.pool, block_id)
        self.tier.save(TierSave(slot, block_hash, data))
        return data

    def load(self, slots: list[int], hashes: list[bytes], block_ids: list[int]) -> tuple[int, str]:
        self.tier.load(TierLoad("r", slots, hashes, block_ids, range(len(slots))))
        _, count, failure = self._loaded.get(timeout=30)
        return count, failure


@pytest.fixture
def tier(tmp_path: Path, pool: KVPool):
    tier = Tier(tmp_path, pool)
    yield tier
    tier.tier.close()
    tier.tier.close()
    OF_PROCESS.forget("")


def content(pool: KVPool, block_id: int) -> bytes:
    return b"".join(view[block_id].tobytes() for view in pool.views)


def test_what_was_saved_comes_back_into_any_block(tier: Tier) -> None:
    first, second = tier.save(3, b"a", 0), tier.save(1, b"b", 7)
    assert tier.load([1, 3], [b"b", b"a"], [4, 5]) == (2, "")
    assert (content(tier.pool, 4), content(tier.pool, 5)) == (second, first)


def test_a_slot_given_to_another_block_is_noticed(tier: Tier) -> None:
    tier.save(0, b"a", 0)
    tier.save(0, b"b", 1)
    before = content(tier.pool, 5)
    assert tier.load([0, 0], [b"b", b"a"], [4, 5]) == (1, "not_found")
    assert content(tier.pool, 5) == before


def test_a_load_given_before_a_save_reads_the_old_content(tier: Tier) -> None:
    data = tier.save(0, b"a", 0)
    tier.tier.load(TierLoad("r", [0], [b"a"], [4], range(1)))
    tier.save(0, b"b", 1)
    assert tier._loaded.get(timeout=30)[1:] == (1, "")
    assert content(tier.pool, 4) == data


def test_a_file_that_rots_is_noticed(tier: Tier) -> None:
    tier.save(2, b"a", 0)
    assert tier.load([2], [b"a"], [4]) == (1, "")
    os.pwrite(tier.tier._file.fileno(), b"\x00\xff\x00", 2 * tier.pool.block_bytes + 30)
    assert tier.load([2], [b"a"], [4]) == (0, "checksum")


def test_a_file_that_was_cut_is_noticed(tier: Tier) -> None:
    tier.save(2, b"a", 0)
    assert tier.load([2], [b"a"], [4]) == (1, "")
    os.ftruncate(tier.tier._file.fileno(), 2 * tier.pool.block_bytes + 1)
    assert tier.load([2], [b"a"], [4]) == (0, "transport")


def test_slots_that_were_swapped_are_noticed(tier: Tier) -> None:
    first, second = tier.save(0, b"a", 0), tier.save(1, b"b", 7)
    assert tier.load([0], [b"a"], [4]) == (1, "")
    for slot, data in ((0, second), (1, first)):
        os.pwrite(tier.tier._file.fileno(), data, slot * tier.pool.block_bytes)
    assert tier.load([0], [b"a"], [4]) == (0, "checksum")
    assert tier.load([1], [b"b"], [4]) == (0, "checksum")


def test_a_full_disk_is_one_line_in_the_log_until_it_has_had_room_for_a_while(
    tier: Tier, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    caplog.set_level("INFO")
    for _ in range(100):
        with monkeypatch.context() as patch:
            patch.setattr(offload_tier, "_write", full)
            tier.save(0, b"a", 0)
            tier.load([0], [b"a"], [4])
        tier.save(1, b"b", 1)
        assert tier.load([1], [b"b"], [4]) == (1, "")
    assert [each.kind for each in OF_PROCESS.active] == ["offload_file"]
    monkeypatch.setattr(offload_tier, "RECOVERED_SECONDS", 0.0)
    tier.save(1, b"c", 1)
    assert tier.load([1], [b"c"], [4]) == (1, "")
    assert OF_PROCESS.active == []
    assert len([record for record in caplog.records if "offload_file" in record.message]) == 2, "begun and ended"


def test_a_disk_that_is_full_costs_only_what_was_to_be_written(tier: Tier, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    tier.save(0, b"a", 0)
    assert tier.load([0], [b"a"], [4]) == (1, "")
    with monkeypatch.context() as patch:
        patch.setattr(offload_tier, "_write", full)
        tier.save(0, b"b", 1)
        assert tier.load([0], [b"b"], [4]) == (0, "not_found")
    tier.save(0, b"c", 2)
    assert tier.load([0], [b"c"], [4]) == (1, "")


def test_saves_that_wait_are_bounded(tmp_path: Path, pool: KVPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload_tier, "MAX_PENDING_BYTES", 3 * pool.block_bytes)
    tier = Tier(tmp_path, pool)
    assert tier.tier.has_room(3 * tier.pool.block_bytes)
    assert not tier.tier.has_room(4 * tier.pool.block_bytes)
    tier.save(0, b"a", 0)
    assert tier.load([0], [b"a"], [1]) == (1, "")
    assert tier.tier.has_room(3 * tier.pool.block_bytes), "what is written does not wait"
    tier.tier.close()


def test_the_file_has_no_name(tier: Tier, tmp_path: Path) -> None:
    tier.save(0, b"a", 0)
    tier.load([0], [b"a"], [1])
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_is_not_there_is_an_error(tmp_path: Path, pool: KVPool) -> None:
    with pytest.raises(FileNotFoundError):
        Tier(tmp_path / "missing", pool)
