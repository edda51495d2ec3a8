"""Moves blocks between engines of one host: the reader maps the owner's pool, read-only, and copies once.

The owner passes its sealed memfd over a unix socket. Two engines share memory exactly if that succeeds; equal host
names prove nothing in containers.
"""

import contextlib
import fcntl
import hmac
import mmap
import os
import secrets
import socket
import struct
import threading
import weakref

import msgspec

from tokenloom.engine_core.kv_transfer.kv_transport import (
    BlockIds,
    Bytes,
    KVPool,
    KVReader,
    KVRegion,
    KVTransferError,
    checked_pairs,
    copy_blocks,
    region_planes,
)

from .listener import Listener

_SECONDS = 5.0
"""The timeout for a handshake of two messages."""
_MAX_OFFER_BYTES = 64 << 10
_MAX_CONNECTIONS = 16
"""Each connection lives only for its handshake."""


class _Endpoint(msgspec.Struct, array_like=True):
    name: str
    """The name of an abstract unix socket, which leaves no file behind when the engine is killed."""
    token: bytes
    """Readers show it, because every process on the host can see the socket's name."""


class _Offer(msgspec.Struct, array_like=True):
    layout: str
    num_blocks: int
    regions: list[KVRegion]


class SharedMemoryTransport:
    """Fulfils :class:`tokenloom.engine_core.kv_transfer.kv_transport.KVTransport` for pools in shared memory."""

    name = "shm"
    serves_on_demand = False

    def __init__(self) -> None:
        self._listener: Listener | None = None
        self._readers = weakref.WeakSet[SharedMemoryReader]()
        self._lock = threading.Lock()

    def serve(self, pool: KVPool) -> bytes | None:
        """Return the offer, or None for a pool whose memory is not shared."""
        assert self._listener is None, "a transport serves one pool"
        if pool.memory.fd is None:
            return None
        offer = msgspec.msgpack.encode(_Offer(pool.layout, pool.num_blocks, list(pool.regions)))
        endpoint = _Endpoint(f"tokenloom-kv-{secrets.token_hex(8)}", secrets.token_bytes(16))
        server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        server.bind(f"\0{endpoint.name}")

        def pass_memory(connection: socket.socket) -> None:
            token = connection.recv(len(endpoint.token))
            fd = pool.memory.fd
            if fd is not None and _same_user(connection) and hmac.compare_digest(token, endpoint.token):
                socket.send_fds(connection, [offer], [fd])

        self._listener = Listener(server, pass_memory, name="kv-shm", max_connections=_MAX_CONNECTIONS)
        return msgspec.msgpack.encode(endpoint)

    def attend(self, seconds: float) -> None:
        """Do nothing: readers copy from the memory on their own."""

    def open(self, endpoint: bytes, layout: str) -> KVReader:
        try:
            offer, fd = _ask(msgspec.msgpack.decode(endpoint, type=_Endpoint))
        except (OSError, msgspec.DecodeError) as error:
            raise KVTransferError("transport", f"the owner's memory was not passed: {error}") from error
        try:
            reader = SharedMemoryReader(fd, offer, layout)
        finally:
            os.close(fd)  # the mapping stays
        with self._lock:
            self._readers.add(reader)
        return reader

    def close(self) -> None:
        if self._listener is not None:
            self._listener.close()
        with self._lock:
            readers = list(self._readers)
        for reader in readers:
            reader.close()


class SharedMemoryReader:
    """Maps an owner's pool. The memory outlives its owner; leases say whether its content is still valid."""

    def __init__(self, fd: int, offer: _Offer, layout: str) -> None:
        """Map ``fd``, which the caller keeps. Raises :class:`KVTransferError`."""
        if offer.layout != layout:
            raise KVTransferError("layout", f"the owner's blocks are {offer.layout}, this engine's {layout}")
        self._num_blocks = offer.num_blocks
        self._sizes = [region.block_bytes for region in offer.regions]
        try:
            # Memory that can shrink under a mapping ends the process that reads it.
            if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
                raise ValueError("it is not sealed")
            memory = mmap.mmap(fd, os.fstat(fd).st_size, prot=mmap.PROT_READ)
            self._planes: tuple[Bytes, ...] | None = region_planes(memory, offer.regions, offer.num_blocks)
        except (OSError, TypeError, ValueError, OverflowError) as error:
            raise KVTransferError("transport", f"the owner's memory cannot be mapped: {error}") from error

    def read(self, source_block_ids: BlockIds, target_block_ids: BlockIds, pool: KVPool) -> None:
        planes = self._planes
        if planes is None:
            raise KVTransferError("transport", "the reader is closed")
        if self._sizes != [region.block_bytes for region in pool.regions]:
            raise KVTransferError("layout", "the owner's regions are of other sizes than this pool's")
        source, target = checked_pairs(source_block_ids, self._num_blocks, target_block_ids, pool)
        copy_blocks(planes, source, pool.planes, target)

    def close(self) -> None:
        self._planes = None  # unmapped with the last view, which a read in progress may hold


def _ask(endpoint: _Endpoint) -> tuple[_Offer, int]:
    """Return the offer and the file descriptor, which the caller closes."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.settimeout(_SECONDS)
        connection.connect(f"\0{endpoint.name}")
        connection.sendall(endpoint.token)
        data, fds, flags, _ = socket.recv_fds(connection, _MAX_OFFER_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
    try:
        if len(fds) != 1 or flags & socket.MSG_TRUNC:
            raise OSError("refused")
        return msgspec.msgpack.decode(data, type=_Offer), fds.pop()
    finally:
        for fd in fds:
            with contextlib.suppress(OSError):
                os.close(fd)


def _same_user(connection: socket.socket) -> bool:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, uid, _ = struct.unpack("3i", credentials)
    return bool(uid == os.geteuid())
