"""Sealed blocks, and the folder that engines share: its bound, its leases, and what a crash leaves."""

import errno
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tokenloom.engine_core.kv_transfer import block_store
from tokenloom.engine_core.kv_transfer.block_store import (
    HEAD_BYTES,
    LEASE_SECONDS,
    FolderStore,
    StoreError,
    StoreFullError,
    opened,
    seal,
    store_key,
)

DATA = bytes(range(200))
VALUE_BYTES = HEAD_BYTES + len(DATA)
KEYS = [store_key(b"n" * 32, bytes((index,))) for index in range(40)]

OpenStore = Callable[..., FolderStore]


@pytest.fixture
def open_store(tmp_path: Path) -> Iterator[OpenStore]:
    opened_stores = []

    def open_store(capacity: int = 1 << 20, timeout: float = 5.0) -> FolderStore:
        opened_stores.append(FolderStore(tmp_path / "shared", capacity, timeout))
        return opened_stores[-1]

    yield open_store
    for store in opened_stores:
        store.close()
        store.close()


def put(store: FolderStore, key: bytes, data: bytes = DATA) -> bool:
    return store.write(key, [seal(key, data), data])


def read(store: FolderStore, key: bytes) -> bytes | None:
    (value,) = store.read([key], VALUE_BYTES)
    return None if value is None or (data := opened(key, value)) is None else bytes(data)


def files(store: FolderStore) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in store._folder.iterdir() if path.name != "ledger"}


@pytest.mark.parametrize("wrong", [0, 7, 8, 39, 40, 47, 48, 51, 52, -1])
def test_a_changed_byte_is_found(wrong: int) -> None:
    value = bytearray(seal(KEYS[0], DATA) + DATA)
    assert bytes(opened(KEYS[0], value) or b"") == DATA
    value[wrong] ^= 1
    assert opened(KEYS[0], value) is None


def test_a_torn_value_and_that_of_another_block_are_found() -> None:
    value = seal(KEYS[0], DATA) + DATA
    assert all(opened(KEYS[0], value[:end]) is None for end in range(len(value)))
    assert opened(KEYS[0], value + b"x") is None
    assert opened(KEYS[1], value) is None


def test_keys_differ_by_all_that_engines_must_share() -> None:
    assert len({store_key(space, name) for space in (b"a" * 32, b"b" * 32) for name in (b"x", b"y", b"x\0")}) == 6


def test_what_one_engine_writes_another_reads(open_store: OpenStore) -> None:
    one, other = open_store(), open_store()
    assert other.find(KEYS[:3], in_order=True) == set()
    assert put(one, KEYS[0])
    assert put(one, KEYS[2])
    assert not put(other, KEYS[0]), "there is no double work"
    assert other.find(KEYS[:3], in_order=True) == {KEYS[0]}
    assert other.find(KEYS[:3], in_order=False) == {KEYS[0], KEYS[2]}
    assert read(other, KEYS[0]) == DATA
    assert read(other, KEYS[1]) is None
    assert list(other.read([KEYS[0], KEYS[1]], VALUE_BYTES + 1)) == [b"", None]
    other.remove(KEYS[0])
    other.remove(KEYS[0])
    assert read(one, KEYS[0]) is None


def test_all_engines_together_keep_to_one_total(open_store: OpenStore) -> None:
    capacity = 8 * VALUE_BYTES
    stores = open_store(capacity), open_store(capacity)
    for index, key in enumerate(KEYS):
        assert put(stores[index % 2], key)
        assert sum(files(stores[0]).values()) <= capacity
    assert len(files(stores[0])) >= 6
    assert read(stores[0], KEYS[-1]) == DATA
    assert read(stores[0], KEYS[0]) is None


def test_what_was_used_longest_ago_leaves_first(open_store: OpenStore) -> None:
    store = open_store(4 * VALUE_BYTES)
    for age, key in enumerate(KEYS[:4]):
        put(store, key)
        used = time.time() - 100 + age
        os.utime(store._path(key, ".kv"), (used, used))
    assert read(store, KEYS[0]) == DATA  # used now
    put(store, KEYS[4])
    assert read(store, KEYS[1]) is None
    assert [read(store, key) for key in (KEYS[0], KEYS[3], KEYS[4])] == [DATA] * 3


def test_a_block_that_was_found_is_leased(open_store: OpenStore) -> None:
    store, other = open_store(4 * VALUE_BYTES), open_store(4 * VALUE_BYTES)
    for key in KEYS[:4]:
        assert put(store, key)
    assert store.find(KEYS[:4], in_order=True) == set(KEYS[:4])
    assert not put(other, KEYS[4]), "all that is there is about to be read"
    assert [read(store, key) for key in KEYS[:4]] == [DATA] * 4
    expired = time.time() - LEASE_SECONDS - 1
    for key in KEYS[:4]:
        os.utime(store._path(key, ".kv"), (expired, expired))
    assert put(other, KEYS[4])


def test_a_time_in_the_future_is_no_lease(open_store: OpenStore) -> None:
    store = open_store(VALUE_BYTES)
    put(store, KEYS[0])
    later = time.time() + 1000
    os.utime(store._path(KEYS[0], ".kv"), (later, later))
    assert put(store, KEYS[1])


def test_a_block_larger_than_all_of_the_folder_leaves_the_rest(open_store: OpenStore) -> None:
    store = open_store(2 * VALUE_BYTES)
    put(store, KEYS[0])
    assert not put(store, KEYS[1], bytes(3 * VALUE_BYTES))
    assert read(store, KEYS[0]) == DATA


def test_a_block_that_another_engine_writes_is_left_to_it(open_store: OpenStore) -> None:
    store, other = open_store(), open_store()
    whole, part = store._path(KEYS[0], ".kv"), store._path(KEYS[0], ".part")
    file = store._reserve(whole, part, VALUE_BYTES)
    assert file is not None
    assert not put(other, KEYS[0])
    assert read(other, KEYS[0]) is None, "what is not whole has no name"
    assert files(store) == {Path(part).name: VALUE_BYTES}, "it is counted before it is written"
    os.close(file)  # as when its engine dies
    assert put(other, KEYS[0])
    assert read(store, KEYS[0]) == DATA


def test_what_a_dead_engine_left_is_removed(open_store: OpenStore) -> None:
    store = open_store()
    file = store._reserve(store._path(KEYS[0], ".kv"), store._path(KEYS[0], ".part"), VALUE_BYTES)
    assert file is not None
    os.close(file)
    late = open_store()
    assert put(late, KEYS[1])
    assert files(late) == {f"{KEYS[1].hex()}.kv": VALUE_BYTES}
    assert late._total() == VALUE_BYTES, "counted anew"


def test_a_writer_that_comes_second_does_not_touch_what_the_first_has_finished(
    open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It opens the unfinished file, and gets its lock when the file has got its name."""
    store, other = open_store(), open_store()
    lock = block_store._lock_at_once
    path = store._path(KEYS[0], ".kv")

    def lock_late(file: int) -> bool:
        if os.readlink(f"/proc/self/fd/{file}").endswith(".part"):
            monkeypatch.setattr(block_store, "_lock_at_once", lock)
            os.rename(store._path(KEYS[0], ".part"), path)
        return lock(file)

    Path(store._path(KEYS[0], ".part")).write_bytes(seal(KEYS[0], DATA) + DATA)
    monkeypatch.setattr(block_store, "_lock_at_once", lock_late)
    assert other._reserve(path, store._path(KEYS[0], ".part"), VALUE_BYTES) is None
    assert read(store, KEYS[0]) == DATA


def test_an_engine_that_is_stopped_with_the_lock_stops_no_other(open_store: OpenStore) -> None:
    stopped, other = open_store(), open_store(timeout=0.05)
    with stopped._locked():
        with pytest.raises(StoreError, match=r"another engine has held the lock of its folder for 0\.05 s"):
            put(other, KEYS[0])
        assert other.find(KEYS[:1], in_order=True) == set(), "readers need no lock"
    assert put(other, KEYS[0])


def test_engines_that_write_at_once(open_store: OpenStore) -> None:
    capacity = 12 * VALUE_BYTES
    written = []

    def run() -> None:
        store = open_store(capacity)
        written.append(sum(put(store, key) for _ in range(3) for key in KEYS))

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    store = open_store(capacity)
    assert len(written) == 4
    assert sum(files(store).values()) <= capacity
    assert all(name.endswith(".kv") for name in files(store))
    found = [read(store, key) for key in KEYS]
    assert set(found) <= {DATA, None}
    assert found.count(DATA) == len(files(store)) > 0


def test_engines_keep_to_one_total_after_somebody_emptied_the_folder(open_store: OpenStore) -> None:
    capacity = 8 * VALUE_BYTES
    early = open_store(capacity)
    assert put(early, KEYS[0])
    for path in early._folder.iterdir():
        path.unlink()
    late = open_store(capacity)
    for index, key in enumerate(KEYS):
        assert put((early, late)[index % 2], key)
        assert sum(files(late).values()) <= capacity


def test_a_folder_that_was_removed_is_made_again(open_store: OpenStore) -> None:
    store = open_store()
    assert put(store, KEYS[0])
    shutil.rmtree(store._folder)
    assert store.find(KEYS[:1], in_order=True) == set()
    assert put(store, KEYS[1])
    assert read(store, KEYS[1]) == DATA
    assert store._folder.stat().st_mode & 0o777 == 0o700


def test_a_disk_that_is_full(open_store: OpenStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store()
    assert put(store, KEYS[0])
    write = os.write
    monkeypatch.setattr(os, "write", lambda file, data: write(file, data[:10]) if len(data) > 150 else _full())
    with pytest.raises(StoreFullError, match=r"a block could not be written: .* No space left"):
        put(store, KEYS[1])
    assert read(store, KEYS[0]) == DATA
    monkeypatch.undo()
    assert files(store) == {f"{KEYS[0].hex()}.kv": VALUE_BYTES}
    assert put(store, KEYS[1])


def _full() -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_folder_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="its folder cannot be used"):
        FolderStore(tmp_path / "file", 1000, 1.0)
    store = FolderStore(tmp_path / "folder", 1000, 1.0)
    (tmp_path / "folder" / f"{KEYS[0].hex()}.kv").mkdir()
    with pytest.raises(StoreError, match="a block could not be read"):
        read(store, KEYS[0])
    store.close()
