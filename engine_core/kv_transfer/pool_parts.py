"""Serves the part of a pool that a worker on a machine of its own keeps, and reads blocks of other engines into it.

The core, which has no memory of such a pool, decides what moves: it sends a message to every worker, and none of its
calls waits for a step. No block passes through the core's machine.
"""

import logging
import threading
from collections.abc import Sequence
from typing import Protocol

import msgspec

from ..data.kv_groups import read_parts
from ..data.kv_messages import KVTarget
from .kv_copier import DividedPool
from .kv_transport import KVPool, KVReader, KVTransferError

log = logging.getLogger(__name__)


class PartTransport(Protocol):
    """Moves blocks between machines. Thread-safe."""

    def serve(self, pool: KVPool) -> bytes:
        """Serve a pool, once. Returns the endpoint for readers."""

    def open_regions(self, endpoint: bytes, layout: str, ranges: Sequence[range]) -> KVReader:
        """Connect to an owner of this layout, to read some of its regions as if they were its whole pool.

        Raises :class:`KVTransferError`: ``layout`` if its layout is another one, otherwise ``transport``.
        """

    def close(self) -> None:
        """Stop serving and close what was opened. Idempotent."""


class PartRead(msgspec.Struct, tag=True, array_like=True):
    """Asks a worker to read its part of blocks. Answered when it has, or has failed."""

    target: KVTarget
    """The blocks to read, and where; with the owner's layout."""
    block_ids: list[int]
    """[n] blocks to fill."""
    layout: str
    """Of the whole pool of this engine."""
    number: int
    """Which part of it the worker has."""
    first_region: int
    """Where the regions of that part begin in the whole pool."""
    checksum: bool
    tears: bool
    """As for :meth:`.kv_transport.MemoryApart.read`."""


class PartChecksums(msgspec.Struct, tag=True, array_like=True):
    """Asks for the checksums of blocks of the worker's own part."""

    block_ids: list[int]


class PartForget(msgspec.Struct, tag=True, array_like=True):
    """Ends reads: closes what was opened to these owners, to this endpoint, or at all."""

    owners: list[str] = []
    endpoint: bytes | None = None
    every: bool = False


PartMessage = PartRead | PartChecksums | PartForget


class PartSums(msgspec.Struct, array_like=True):
    """Holds the checksums of one part of blocks."""

    numbers: list[int]
    """Which parts of the owner's pool have these bytes; empty: they are the worker's own."""
    nbytes: list[int]
    """[n] bytes of the part of each block."""
    sums: list[int]
    """[n] CRC-32."""


class PartAnswer(msgspec.Struct, array_like=True):
    """Answers each of these messages."""

    failure: str = ""
    """Empty, or one of ``LEASE_ENDS``; ``detail`` explains it."""
    detail: str = ""
    sums: list[PartSums] = []


class WorkerPart:
    """Owns the transport of one worker. Any thread may use it."""

    def __init__(self, pool: KVPool, transport: PartTransport) -> None:
        self._pool = pool
        self._transport = transport
        self._lock = threading.Lock()
        self._readers: dict[tuple[str, bytes], KVReader] = {}
        """By owner and endpoint. The core says when an owner has left."""
        self._divisions: dict[str, DividedPool] = {}

    def serve(self) -> bytes:
        """Serve the part from now on. Returns the endpoint for readers."""
        return self._transport.serve(self._pool)

    def answer(self, message: PartMessage) -> PartAnswer:
        """Do what the core asks. Any error is an answer, too: the core waits for the answers of all workers, so that it
        takes no block back to which one of them still writes."""
        try:
            match message:
                case PartRead():
                    return PartAnswer(sums=self._read(message))
                case PartChecksums():
                    return PartAnswer(sums=[self._sums([], message.block_ids)])
                case PartForget():
                    self._forget(message)
                    return PartAnswer()
        except KVTransferError as error:
            return PartAnswer(error.reason, error.detail)
        except Exception as error:
            log.exception("a worker's part of a KV pool failed because of a bug")
            return PartAnswer("transport", f"{type(error).__name__}: {error}")

    def _read(self, order: PartRead) -> list[PartSums]:
        try:
            return self._read_equal(order) if order.target.layout == order.layout else self._read_divided(order)
        except BaseException:
            # The core tries once more: over a new connection, because this one may have been closed while it was idle.
            self._forget(PartForget(endpoint=order.target.endpoint))
            raise

    def _read_equal(self, order: PartRead) -> list[PartSums]:
        own = range(order.first_region, order.first_region + len(self._pool.regions))
        self._reader(order.target, [own]).read(order.target.block_ids, order.block_ids, self._pool)
        if order.tears:
            self._pool.damage(order.block_ids[-1])
        return [self._sums([order.number], order.block_ids)] if order.checksum else []

    def _read_divided(self, order: PartRead) -> list[PartSums]:
        layout, ids = order.target.layout, order.block_ids
        with self._lock:
            if (divided := self._divisions.get(layout)) is None:
                divided = DividedPool(self._pool, layout, (order.layout, order.number))
                self._divisions[layout] = divided
        reader = self._reader(order.target, divided.ranges)
        if not order.checksum:
            divided.read(reader, order.target.block_ids, ids)
            return []
        sizes, sums = divided.read_part(reader, order.target.block_ids, ids, tears=order.tears)
        boxes = [part.box for part in read_parts(layout)]
        return [
            # Owners' ranks that share a KV head keep equal parts, of which one is read.
            PartSums([other for other, box in enumerate(boxes) if box == boxes[source]], [size] * len(ids), found)
            for source, size, found in zip(divided.sources, sizes, sums, strict=True)
        ]

    def _sums(self, numbers: list[int], block_ids: list[int]) -> PartSums:
        nbytes = [self._pool.nbytes_of([block_id]) for block_id in block_ids]
        return PartSums(numbers, nbytes, self._pool.checksums(self._pool.checked(block_ids).tolist()))

    def _reader(self, target: KVTarget, ranges: Sequence[range]) -> KVReader:
        key = target.owner, target.endpoint
        with self._lock:
            if (reader := self._readers.get(key)) is not None:
                return reader
        # Not under the lock, because connecting may take seconds, and another order may end it.
        reader = self._transport.open_regions(target.endpoint, target.layout, ranges)
        with self._lock:
            kept = self._readers.setdefault(key, reader)  # another thread may have opened one in the meantime
        if kept is not reader:
            reader.close()
        return kept

    def _forget(self, message: PartForget) -> None:
        with self._lock:
            left = [
                key for key in self._readers if message.every or key[0] in message.owners or key[1] == message.endpoint
            ]
            readers = [self._readers.pop(key) for key in left]
        for reader in readers:
            reader.close()
