"""Moves blocks between GPUs of one host: the reader maps the owner's pool and copies with one kernel, without the host.

The owner passes a handle of its memory over a unix socket, and the reader keeps that connection: when the owner ends,
the mapping is released at once, because it would keep the memory of the dead process on the GPU.
"""

import contextlib
import socket
import threading

import msgspec

from tokenloom.engine_core.kv_cache.pool_memory import DeviceMemory, PeerMemory
from tokenloom.engine_core.kv_transfer.kv_transport import BlockIds, KVPool, KVTransferError, checked_pairs
from tokenloom.process.fall_backs import OF_PROCESS

from .listener import OfferTransport, hang_up, serve_offers
from .socket_frames import decoded

_MAX_OFFER_BYTES = 64 << 10
_MAX_CONNECTIONS = 64
"""Readers. Each costs a thread on either side, which sleeps in the kernel."""


class _Offer(msgspec.Struct, array_like=True):
    layout: str
    num_blocks: int
    block_bytes: list[int]
    """The size of each region."""
    handle: bytes


class DeviceTransport(OfferTransport):
    """Fulfils :class:`tokenloom.engine_core.kv_transfer.kv_transport.KVTransport` for pools on GPUs."""

    name = "cuda"

    def serve(self, pool: KVPool) -> bytes | None:
        """Return the offer, or None for a pool of the host and one that cannot be shared."""
        assert self._listener is None, "a transport serves one pool"
        if pool.device is None:
            return None
        try:
            handle = pool.device.export()
        except KVTransferError as error:
            OF_PROCESS.begin("unpinned_memory", f"KV does not move between GPUs directly: {error}")
            return None
        offer = msgspec.msgpack.encode(_Offer(pool.layout, pool.num_blocks, pool.region_bytes, handle))

        def keep(connection: socket.socket) -> None:
            connection.sendall(offer)
            connection.settimeout(None)
            connection.recv(1)  # returns when the reader has released the memory, or is gone

        self._listener, endpoint = serve_offers(keep, name="kv-cuda", max_connections=_MAX_CONNECTIONS)
        return endpoint

    def _receive(self, connection: socket.socket, layout: str) -> "DeviceReader":
        offer = decoded(connection.recv(_MAX_OFFER_BYTES), _Offer)
        if offer.layout != layout:
            raise KVTransferError("layout", f"the owner's blocks are {offer.layout}, this engine's {layout}")
        return DeviceReader(connection, offer)


class DeviceReader:
    """Holds the connection to an owner, and its memory from the first read on."""

    def __init__(self, connection: socket.socket, offer: _Offer) -> None:
        """Take ownership of the connection."""
        self._connection = connection
        self._offer = offer
        self._lock = threading.Lock()  # held during copies, so that the mapping outlives them
        self._mapped: PeerMemory | None = None
        self._mapped_for: DeviceMemory | None = None
        """The pool that the mapping fills."""
        self._is_open = True
        connection.settimeout(None)
        self._watcher = threading.Thread(target=self._watch, name="kv-cuda-owner", daemon=True)
        self._watcher.start()

    def read(self, source_block_ids: BlockIds, target_block_ids: BlockIds, pool: KVPool) -> None:
        if self._offer.block_bytes != pool.region_bytes:
            raise KVTransferError("layout", "the owner's regions are of other sizes than this pool's")
        found = checked_pairs(source_block_ids, self._offer.num_blocks, target_block_ids, pool)
        with self._lock:
            mapped = self._memory(pool)
            for pairs in found:
                mapped.copy(pairs.source, pairs.target)

    def close(self) -> None:
        """Release the mapping, after a copy that runs."""
        hang_up(self._connection)
        with self._lock:
            self._is_open = False
            self._release()

    def join(self, seconds: float) -> None:
        """Wait until the owner is gone, or the reader is closed, and its mapping is released."""
        self._watcher.join(seconds)

    def _memory(self, pool: KVPool) -> PeerMemory:
        if not self._is_open:
            raise KVTransferError("transport", "the owner is gone, or the reader is closed")
        if pool.device is None:
            raise KVTransferError("transport", "a pool of the host cannot be filled by a GPU; use shm or socket")
        if self._mapped is None or self._mapped_for is not pool.device:
            self._release()
            self._mapped = pool.device.map_peer(self._offer.handle, self._offer.num_blocks)
            self._mapped_for = pool.device
        return self._mapped

    def _release(self) -> None:
        mapped, self._mapped = self._mapped, None
        if mapped is not None:
            mapped.close()

    def _watch(self) -> None:
        with contextlib.suppress(OSError):
            self._connection.recv(1)  # an owner sends nothing more: this returns when it is gone, or by ``close``
        self.close()
        self._connection.close()
