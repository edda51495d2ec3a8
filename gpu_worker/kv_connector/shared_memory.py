"""Moves blocks between engines of one host: the reader maps the owner's pool, read-only, and copies once.

The owner passes its sealed memfd over a unix socket. Two engines share memory exactly if that succeeds; equal host
names prove nothing in containers. The socket stays open: when the owner has ended, its readers unmap its pool, which
would otherwise keep its memory.

The owner of a pool on a device passes a window instead, memory that both processes map. The reader asks for a list of
blocks, and the device of the owner copies them into one half of the window, while the reader takes what lies in the
other half. The window is pinned where the driver allows it.
"""

import contextlib
import fcntl
import mmap
import os
import socket
import threading
import weakref
from collections.abc import Generator

import msgspec
import numpy as np

from tokenloom.engine_core.kv_cache.pool_memory import BlockIds as BlockArray
from tokenloom.engine_core.kv_cache.pool_memory import DeviceMemory, PoolMemory, Wait
from tokenloom.engine_core.kv_transfer.kv_transport import (
    BlockIds,
    Bytes,
    KVPool,
    KVRegion,
    KVTransferError,
    ReadPairs,
    checked_pairs,
    copy_blocks,
    region_planes,
    regions_of,
)

from .listener import SECONDS, OfferTransport, hang_up, serve_offers
from .socket_frames import decoded
from .staging import StagedPart, Stagings

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

    def parts(self, source: BlockArray) -> Generator[tuple[slice, Bytes], None, None]:
        """Yield (indices into ``source``, the blocks there [regions, n, bytes]) while the owner copies the next ones.

        Raises ``OSError`` or :class:`KVTransferError`. If the caller does not take all of them, the connection ends.
        """
        with self._lock:
            try:
                yield from self._parts(source)
            except BaseException:
                hang_up(self._connection)  # an answer may be on its way, which is none to the next request
                raise

    def _parts(self, source: BlockArray) -> Generator[tuple[slice, Bytes], None, None]:
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

    def _ask(self, half: int, ids: BlockArray) -> None:
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


_MAX_OFFER_BYTES = 64 << 10
_MAX_CONNECTIONS = 64
"""Readers of one pool: each has a thread of the owner, and of a device's pool a window."""


class _Offer(msgspec.Struct, array_like=True):
    layout: str
    num_blocks: int
    regions: list[KVRegion]
    is_window: bool = False
    """Whether the memory is a window, through which a device's blocks are asked for, instead of the pool."""
    num_slots: int = 0


class SharedMemoryTransport(OfferTransport):
    """Fulfils :class:`tokenloom.engine_core.kv_transfer.kv_transport.KVTransport` for pools in shared memory."""

    name = "shm"

    def serve(self, pool: KVPool) -> bytes | None:
        """Return the offer, or None for a pool of the host whose memory is not shared."""
        assert self._listener is None, "a transport serves one pool"
        if pool.device is None and pool.host.fd is None:
            return None
        offer = _Offer(pool.layout, pool.num_blocks, list(pool.regions), pool.device is not None, pool.num_slots)
        data = msgspec.msgpack.encode(offer)

        def pass_memory(connection: socket.socket) -> None:
            if pool.device is not None:
                owner = WindowOwner(pool, pool.device)
                try:
                    socket.send_fds(connection, [data], [owner.fd])
                    owner.serve(connection)
                finally:
                    owner.close()
            elif (fd := pool.host.fd) is not None:
                socket.send_fds(connection, [data], [fd])
                connection.settimeout(None)
                connection.recv(1)  # returns when the reader has unmapped the memory, or is gone

        self._listener, endpoint = serve_offers(pass_memory, name="kv-shm", max_connections=_MAX_CONNECTIONS)
        return endpoint

    def _receive(self, connection: socket.socket, layout: str) -> "SharedMemoryReader":
        offer, fd = _receive(connection)
        try:
            return map_offer(connection, fd, offer, layout)
        finally:
            os.close(fd)  # the mapping stays


class SharedMemoryReader:
    """Reads from a mapping of an owner's memory. A read in progress outlives the owner; leases say whether the content
    is still valid."""

    def __init__(self, source: "_MappedBlocks | _WindowBlocks") -> None:
        self._source: _MappedBlocks | _WindowBlocks | None = source
        self._stagings = Stagings()

    @property
    def is_closed(self) -> bool:
        """Whether the owner has ended, or the reader was closed."""
        return self._source is None

    def read(self, source_block_ids: BlockIds, target_block_ids: BlockIds, pool: KVPool) -> None:
        there = self._source
        if there is None:
            raise KVTransferError("transport", "the owner has ended, or the reader is closed")
        if there.sizes != pool.region_bytes:
            raise KVTransferError("layout", "the owner's regions are of other sizes than this pool's")
        for pairs in checked_pairs(source_block_ids, there.num_blocks, target_block_ids, pool, there.num_slots):
            there.read(pairs, pool, self._stagings)

    def close(self) -> None:
        source, self._source = self._source, None
        if source is not None:
            source.close()


class _MappedBlocks:
    """Maps an owner's pool of the host."""

    def __init__(self, connection: socket.socket, fd: int, offer: _Offer) -> None:
        """Take ownership of the connection. The caller keeps ``fd``. Raises ``OSError`` or ``ValueError``."""
        self.num_blocks, self.num_slots = offer.num_blocks, offer.num_slots
        self.sizes = [region.block_bytes for region in offer.regions]
        memory = mmap.mmap(fd, os.fstat(fd).st_size, prot=mmap.PROT_READ)
        self._planes = region_planes(memory, regions_of(offer.regions, is_state=False), offer.num_blocks)
        self._state_planes = region_planes(memory, regions_of(offer.regions, is_state=True), offer.num_slots)
        self._connection = connection
        # Without the open socket a reader kept the pools of replaced engines mapped, up to 64 of them, for as long as
        # it lived.
        weakref.finalize(self, hang_up, connection)  # with the last reference to the reader at the latest

    def watch(self, reader: SharedMemoryReader) -> None:
        """Close the reader when the owner has ended, on a thread of its own, which sleeps until then."""
        arguments = (self._connection, weakref.ref(reader))
        threading.Thread(target=_close_after, args=arguments, name="kv-shm-owner", daemon=True).start()

    def read(self, pairs: ReadPairs, pool: KVPool, stagings: Stagings) -> None:
        is_state, source, target = pairs
        if pool.device is None:
            planes = self._state_planes if is_state else self._planes
            copy_blocks(planes, source, pool.planes_of(is_state=is_state), target)
            return
        views = [view for plane in self._planes for view in plane]

        def fill(packed: Bytes, part: StagedPart) -> None:
            count = len(source[part.blocks])
            rows = packed.reshape(-1, count, packed.size // count // len(views[part.regions]))
            for view, row in zip(views[part.regions], rows, strict=True):
                np.take(view, source[part.blocks], axis=0, out=row)

        stagings.receive(pool, pool.device, target, fill)

    def close(self) -> None:
        """Hang up. The memory is unmapped with the last view, which a read in progress may hold."""
        hang_up(self._connection)


def _close_after(connection: socket.socket, reader: "weakref.ref[SharedMemoryReader]") -> None:
    with contextlib.suppress(OSError):
        connection.settimeout(None)
        connection.recv(1)  # an owner sends nothing more: this returns when it is gone, or the reader is closed
    if (open_one := reader()) is not None:
        open_one.close()
    connection.close()


class _WindowBlocks:
    """Asks an owner for the blocks of its device."""

    def __init__(self, connection: socket.socket, fd: int, offer: _Offer) -> None:
        """Take ownership of the connection. The caller keeps ``fd``. Raises ``OSError`` or ``ValueError``."""
        self.num_blocks, self.num_slots = offer.num_blocks, 0  # a device's states do not move
        self.sizes = [region.block_bytes for region in offer.regions]
        self._connection = connection
        self._window = WindowReader(connection, fd, len(self.sizes), sum(self.sizes))
        weakref.finalize(self, connection.close)  # with the last reference to the reader at the latest

    def read(self, pairs: ReadPairs, pool: KVPool, stagings: Stagings) -> None:
        source, target = pairs.source, pairs.target
        try:
            with contextlib.closing(self._window.parts(source)) as parts:
                for piece, packed in parts:
                    self._take(packed, target[piece], pool, stagings)
        except (OSError, msgspec.DecodeError) as error:
            raise KVTransferError("transport", f"the owner of the memory: {error}") from error

    def _take(self, there: Bytes, target: BlockArray, pool: KVPool, stagings: Stagings) -> None:
        if pool.device is None:
            copy_blocks((there,), np.arange(len(target)), pool.planes, target)
            return

        def fill(packed: Bytes, part: StagedPart) -> None:
            some = there[part.regions, part.blocks]
            np.copyto(packed.reshape(some.shape), some)

        stagings.receive(pool, pool.device, target, fill)

    def close(self) -> None:
        hang_up(self._connection)
        self._window.close()


def map_offer(connection: socket.socket, fd: int, offer: _Offer, layout: str) -> SharedMemoryReader:
    """Map ``fd``, which the caller keeps. The connection is closed, or belongs to the reader.

    Raises :class:`KVTransferError`.
    """
    try:
        if offer.layout != layout:
            raise KVTransferError("layout", f"the owner's blocks are {offer.layout}, this engine's {layout}")
        # Memory that can shrink under a mapping ends the process that reads it.
        if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
            raise ValueError("it is not sealed")
        if offer.is_window:
            return SharedMemoryReader(_WindowBlocks(connection, fd, offer))
        blocks = _MappedBlocks(connection, fd, offer)
        reader = SharedMemoryReader(blocks)
        blocks.watch(reader)
        return reader
    except (OSError, TypeError, ValueError, ArithmeticError, MemoryError) as error:
        raise KVTransferError("transport", f"the owner's memory cannot be mapped: {error}") from error


def _receive(connection: socket.socket) -> tuple[_Offer, int]:
    """Return the offer and the file descriptor, which the caller closes."""
    data, fds, flags, _ = socket.recv_fds(connection, _MAX_OFFER_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
    try:
        if len(fds) != 1 or flags & socket.MSG_TRUNC:
            raise OSError("refused")
        return decoded(data, _Offer), fds.pop()
    finally:
        for fd in fds:
            with contextlib.suppress(OSError):
                os.close(fd)
