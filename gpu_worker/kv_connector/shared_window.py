"""Moves blocks of a device's pool to other engines of the host, through memory that both processes map.

The reader asks for a list of blocks, and the device of the owner copies them into one half of the window, while the
reader takes what lies in the other half. The window is pinned where the driver allows it.
"""

import mmap
import socket
import threading
from collections.abc import Generator

import msgspec
import numpy as np

from tokenloom.engine_core.kv_cache.pool_memory import BlockIds, Bytes, DeviceMemory, PoolMemory, Wait
from tokenloom.engine_core.kv_transfer.kv_transport import KVPool, KVTransferError

from .listener import SECONDS, hang_up
from .socket_frames import decoded

HALF_BYTES = 16 << 20
_MOST_BLOCKS = 4096
"""Blocks of one request, whose ids must fit into one message."""
_MAX_MESSAGE_BYTES = 64 << 10


class _Want(msgspec.Struct, array_like=True):
    """Asks for blocks in a half of the window. Each is answered with a :class:`_Done`, in order."""

    half: int
    block_ids: bytes
    """Little-endian uint32."""


class _Done(msgspec.Struct, array_like=True):
    failure: str = ""
    """Empty: the blocks are in the half, [regions, n, block_bytes]."""


class WindowOwner:
    """Answers the reader of one connection."""

    def __init__(self, pool: KVPool, device: DeviceMemory) -> None:
        self._pool = pool
        self._device = device
        self._half_bytes = half_bytes(pool.block_bytes)
        self._memory = PoolMemory.allocate(2 * self._half_bytes, shared=True)
        self._view: Bytes = np.frombuffer(self._memory.buffer, dtype=np.uint8)
        device.pin(self._view)

    @property
    def fd(self) -> int:
        fd = self._memory.fd
        assert fd is not None
        return fd

    def serve(self, connection: socket.socket) -> None:
        """Answer until the reader hangs up or sends an invalid request."""
        connection.settimeout(None)
        try:
            while data := connection.recv(_MAX_MESSAGE_BYTES):
                self._start(decoded(data, _Want))()
                connection.sendall(msgspec.msgpack.encode(_Done()))
        except (msgspec.DecodeError, KVTransferError) as error:
            connection.sendall(msgspec.msgpack.encode(_Done(str(error))))

    def close(self) -> None:
        self._device.unpin(self._view)
        self._memory.close()

    def _start(self, want: _Want) -> Wait:
        if want.half not in (0, 1) or len(want.block_ids) % 4:
            raise KVTransferError("transport", "an invalid request for blocks")
        ids = self._pool.checked(np.frombuffer(want.block_ids, dtype="<u4"))
        nbytes = len(ids) * self._pool.block_bytes
        if not 0 < nbytes <= self._half_bytes:
            raise KVTransferError("transport", f"{len(ids)} blocks do not fit into the window")
        begin = want.half * self._half_bytes
        packed = self._view[begin : begin + nbytes]
        return self._device.start_read(ids, slice(0, len(self._pool.regions)), packed)


class WindowReader:
    """Maps the window of an owner and asks for blocks. One thread reads at a time."""

    def __init__(self, connection: socket.socket, fd: int, num_regions: int, block_bytes: int) -> None:
        """``block_bytes``: of a block in all regions. The caller keeps ``fd`` and the connection."""
        self._connection = connection
        self._shape = (num_regions, block_bytes // num_regions)
        self._half_bytes = half_bytes(block_bytes)
        self._most = max(1, min(_MOST_BLOCKS, self._half_bytes // block_bytes))
        self._lock = threading.Lock()
        window = mmap.mmap(fd, 2 * self._half_bytes, prot=mmap.PROT_READ)
        self._view: Bytes = np.frombuffer(window, dtype=np.uint8)

    def parts(self, source: BlockIds) -> Generator[tuple[slice, Bytes], None, None]:
        """Yield (places in ``source``, the blocks there [regions, n, bytes]) while the owner copies the next ones.

        Raises ``OSError`` or :class:`KVTransferError`. If the caller does not take all of them, the connection ends.
        """
        with self._lock:
            try:
                yield from self._parts(source)
            except BaseException:
                hang_up(self._connection)  # an answer may be on its way, which is none to the next request
                raise

    def _parts(self, source: BlockIds) -> Generator[tuple[slice, Bytes], None, None]:
        pieces = [slice(first, first + self._most) for first in range(0, len(source), self._most)]
        for index, piece in enumerate(pieces):
            if not index:
                self._ask(0, source[piece])
            self._await_answer()
            if index + 1 < len(pieces):
                self._ask((index + 1) % 2, source[pieces[index + 1]])
            begin, count = index % 2 * self._half_bytes, len(source[piece])
            regions, size = self._shape
            yield piece, self._view[begin : begin + regions * count * size].reshape(regions, count, size)

    def close(self) -> None:
        """Close the connection, after a read in progress, which has to fail."""
        with self._lock:
            self._connection.close()

    def _ask(self, half: int, ids: BlockIds) -> None:
        self._connection.sendall(msgspec.msgpack.encode(_Want(half, ids.astype("<u4").tobytes())))

    def _await_answer(self) -> None:
        self._connection.settimeout(SECONDS)
        data = self._connection.recv(_MAX_MESSAGE_BYTES)
        if not data:
            raise ConnectionError("the owner hung up")
        if failure := decoded(data, _Done).failure:
            raise KVTransferError("transport", f"the owner's copy: {failure}")


def half_bytes(block_bytes: int) -> int:
    """Return the size of a half of the window: whole pages with room for a block at least."""
    return -(-max(HALF_BYTES, block_bytes) // mmap.PAGESIZE) * mmap.PAGESIZE
