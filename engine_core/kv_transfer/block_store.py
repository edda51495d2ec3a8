"""Stores of KV blocks that several engines share: their protocol, how a block is sealed, and a folder of a host.

A value is the block's bytes behind a head with its key, its size and its CRC-32: a value that is torn, of another block
or altered is found before it is used. A key reveals nothing of what it names (:func:`store_key`).
"""

import contextlib
import errno
import fcntl
import hashlib
import os
import struct
import time
import zlib
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import Protocol

Buffer = bytes | bytearray | memoryview

LEASE_SECONDS = 10.0
"""For so long a block that was found stays, for the load that follows; a search later than half of it is made anew."""
KEY_BYTES = 32


class StoreError(Exception):
    """Raised when a store does not answer in time, or not as it should: what was asked for is computed instead."""


class StoreFullError(StoreError):
    """Raised when a store has no room although its bound would allow it: what it has can still be read."""


class BlockStore(Protocol):
    """Keeps values by keys of :data:`KEY_BYTES` bytes. One thread uses an instance.

    Every method raises :class:`StoreError`, at the latest when an answer has taken longer than the store's timeout.
    """

    label: str
    """Names the kind of store in metrics."""

    def find(self, keys: Sequence[bytes], *, in_order: bool) -> set[bytes]:
        """Return which keys have values, and keep those for :data:`LEASE_SECONDS` if the store can. ``in_order``: the
        first key without one ends the search."""

    def read(self, keys: Sequence[bytes], nbytes: int) -> Generator[Buffer | None, None, None]:
        """Yield the value of each key; None if it has none. A value of another size than ``nbytes`` is wrong, and may
        be yielded empty: the reader removes it, so that the block is saved anew."""

    def write(self, key: bytes, parts: Sequence[Buffer]) -> bool:
        """Store a value, which a reader sees whole or not at all. Returns whether it was written: not if there is one
        already, or another engine writes it, or there is no room. Raises :class:`StoreFullError` if there should be."""

    def remove(self, key: bytes) -> None:
        """Let the key have no value that can be used, because it is wrong."""

    def close(self) -> None:
        """Close connections. Idempotent."""


def store_key(namespace: bytes, name: bytes) -> bytes:
    """Return the key of a block. ``namespace`` [32] stands for all that engines must share to use each other's blocks;
    ``name`` is the hash of the block, into which tenant, adapter and images are salted."""
    return hashlib.blake2b(name, key=namespace, digest_size=KEY_BYTES).digest()


_HEAD = struct.Struct(f"<8s{KEY_BYTES}sQI")
_MAGIC = b"TLKVBLK1"
HEAD_BYTES = _HEAD.size


def seal(key: bytes, data: Buffer) -> bytes:
    """Return the head of a value."""
    return _HEAD.pack(_MAGIC, key, len(data), zlib.crc32(data))


def opened(key: bytes, value: Buffer) -> memoryview | None:
    """Return the bytes of the block; None if the value is torn, of another block or altered."""
    if len(value) < HEAD_BYTES:
        return None
    data = memoryview(value)[HEAD_BYTES:]
    is_right = _HEAD.unpack_from(value) == (_MAGIC, key, len(data), zlib.crc32(data))
    return data if is_right else None


_LEDGER = "ledger"
_WHOLE, _PART = ".kv", ".part"
_TOTAL = struct.Struct("<Q")
_SLACK = 16
"""A full folder is emptied by this part of its capacity at once: each time, all of its files are looked at."""
_LOCK_WAIT_SECONDS = 0.002
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
"""The disk is full, or the user's part of it."""


class FolderStore:
    """Keeps each block in a file of a folder that engines of this host share, within one total of bytes.

    The folder's ledger has the bytes that are kept or about to be written. An engine that writes holds the ledger's
    lock while it makes room and reserves, and the lock of its own unfinished file until the file is whole and renamed.
    The system drops locks with the process that holds them, so a crash leaves none, and an unfinished file without a
    lock is that of a dead engine. Readers lock nothing: a file that has its name is whole. If the folder is emptied or
    removed, the next engine that writes begins a ledger that all of them use from then on.

    The time of a file is that of its last use; one that was found less than :data:`LEASE_SECONDS` ago is not evicted.
    """

    label = "folder"

    def __init__(self, folder: Path, capacity_bytes: int, timeout: float) -> None:
        """``timeout``: seconds to wait for another engine that has the ledger. Raises :class:`StoreError` if the folder
        cannot be used."""
        self._folder = folder
        self._capacity = capacity_bytes
        self._timeout = timeout
        try:
            self._ledger = self._open_ledger()
        except OSError as error:
            raise StoreError(f"its folder cannot be used: {error}") from error
        self._is_open = True
        self._has_counted = False

    def find(self, keys: Sequence[bytes], *, in_order: bool) -> set[bytes]:
        found = set[bytes]()
        for key in keys:
            try:
                os.utime(self._path(key, _WHOLE))  # the lease
                found.add(key)
            except FileNotFoundError:
                if in_order:
                    break
            except OSError as error:
                raise StoreError(f"a block could not be found: {error}") from error
        return found

    def read(self, keys: Sequence[bytes], nbytes: int) -> Generator[Buffer | None, None, None]:
        for key in keys:
            try:
                with open(self._path(key, _WHOLE), "rb", buffering=0) as file:
                    value = file.read(nbytes) if os.fstat(file.fileno()).st_size == nbytes else b""
                    os.utime(file.fileno())
            except FileNotFoundError:
                value = None
            except OSError as error:
                raise StoreError(f"a block could not be read: {error}") from error
            yield value

    def write(self, key: bytes, parts: Sequence[Buffer]) -> bool:
        whole, part = self._path(key, _WHOLE), self._path(key, _PART)
        try:
            nbytes = sum(map(len, parts))
            if nbytes > self._capacity or os.path.exists(whole):
                return False
            if (file := self._reserve(whole, part, nbytes)) is None:
                return False
            try:
                for piece in parts:
                    _write(file, piece)
                # Not leased: a burst of writes must be able to replace its own blocks.
                unleased = time.time() - LEASE_SECONDS
                os.utime(file, (unleased, unleased))
                os.rename(part, whole)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(part)
                raise
            finally:
                os.close(file)
        except OSError as error:
            kind = StoreFullError if error.errno in _NO_ROOM else StoreError
            raise kind(f"a block could not be written: {error}") from error
        return True

    def remove(self, key: bytes) -> None:
        # The ledger counts it until all files are looked at: too much is safe.
        try:
            os.unlink(self._path(key, _WHOLE))
        except FileNotFoundError:
            pass
        except OSError as error:
            raise StoreError(f"a wrong block could not be removed: {error}") from error

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            os.close(self._ledger)

    def _path(self, key: bytes, kind: str) -> str:
        return f"{self._folder}/{key.hex()}{kind}"

    def _reserve(self, whole: str, part: str, nbytes: int) -> int | None:
        """Return a locked, unfinished file of this size, which the caller closes; None if the block is there, another
        engine writes it, or there is no room."""
        with self._locked():
            total = self._total()
            # The first time too: an engine that crashed may have left a file, or counted what it did not write.
            if total is None or not self._has_counted or total + nbytes > self._capacity:
                total = self._make_room(self._capacity - nbytes)
                self._has_counted = True
                os.pwrite(self._ledger, _TOTAL.pack(total), 0)
            if total + nbytes > self._capacity:
                return None
            file = os.open(part, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                # A file that its writer has finished in the meantime has another name, and must not be written to.
                is_ours = _lock_at_once(file) and _is_at(file, part)
                if is_ours and os.path.exists(whole):
                    is_ours = False
                    os.unlink(part)
                if is_ours:
                    os.ftruncate(file, nbytes)  # so that others see how much will be there
                    os.pwrite(self._ledger, _TOTAL.pack(total + nbytes), 0)
                    return file
            except BaseException:
                os.close(file)
                raise
            os.close(file)
            return None

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        deadline = time.monotonic() + self._timeout
        while not self._lock_ledger():
            if time.monotonic() > deadline:
                raise StoreError(f"another engine has held the lock of its folder for {self._timeout:g} s")
            time.sleep(_LOCK_WAIT_SECONDS)  # an engine that is stopped while it has the lock must not stop this one
        try:
            yield
        finally:
            fcntl.flock(self._ledger, fcntl.LOCK_UN)

    def _lock_ledger(self) -> bool:
        """Lock the ledger that the folder has now. Returns False, without a lock, if that has to be tried again."""
        if _is_at(self._ledger, f"{self._folder}/{_LEDGER}"):
            return _lock_at_once(self._ledger)
        # A cleaner of temporary files, or a person, removed it. Engines with different ledgers would not keep to one
        # total.
        ledger = self._open_ledger()
        os.close(self._ledger)
        self._ledger, self._has_counted = ledger, False
        return False

    def _open_ledger(self) -> int:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return os.open(self._folder / _LEDGER, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def _total(self) -> int | None:
        """Return the bytes that the ledger counts; None if no engine has counted yet."""
        packed = os.pread(self._ledger, _TOTAL.size, 0)
        return int(_TOTAL.unpack(packed)[0]) if len(packed) == _TOTAL.size else None

    def _make_room(self, most: int) -> int:
        """Remove what dead engines left unfinished and, if there is more than ``most`` bytes, the blocks used longest
        ago. Returns the bytes that are there, as counted anew."""
        total, files = 0, list[tuple[int, int, str]]()
        with os.scandir(self._folder) as entries:
            for entry in entries:
                if entry.name.endswith(_PART):
                    total += 0 if _remove_dead(entry.path) else _size_of(entry.path)
                elif entry.name.endswith(_WHOLE):
                    with contextlib.suppress(FileNotFoundError):  # another engine found it wrong
                        found = entry.stat()
                        files.append((found.st_mtime_ns, found.st_size, entry.path))
                        total += found.st_size
        if total <= most:
            return total
        most = max(0, most - self._capacity // _SLACK)
        for _, size, path in sorted(files):
            if total <= most:
                break
            if not _is_leased(path):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)
                total -= size
        return total


def _lock_at_once(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_at(file: int, path: str) -> bool:
    try:
        return os.path.samestat(os.fstat(file), os.stat(path))
    except FileNotFoundError:
        return False


def _size_of(part: str) -> int:
    """Return the size of an unfinished file, which may have got its name in the meantime."""
    for path in (part, part.removesuffix(_PART) + _WHOLE):
        with contextlib.suppress(FileNotFoundError):
            return os.stat(path).st_size
    return 0


def _is_leased(path: str) -> bool:
    """Return whether a block was found a moment ago. A time far in the future is no lease: the clock was set back."""
    try:
        age = time.time() - os.stat(path).st_mtime
    except FileNotFoundError:
        return False
    return -LEASE_SECONDS < age < LEASE_SECONDS


def _remove_dead(path: str) -> bool:
    """Remove an unfinished file if its writer is dead. The caller has the ledger's lock, under which files begin."""
    try:
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return True
    try:
        if not _lock_at_once(file) or not _is_at(file, path):
            return False
        os.unlink(path)
        return True
    finally:
        os.close(file)


def _write(file: int, data: Buffer) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(file, rest) :]
