"""Moving KV blocks between the pools of two engines: the plain data and the protocols that a transport fulfils.

The owner of blocks serves its pool and hands out an endpoint; a reader opens the endpoint and copies blocks into its
own pool (a pull). Which blocks may be read, and until when, is not a transport's business: leases say so, and the
reader asks the owner once more after the copy.
"""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from .kv_messages import KV_FAILURES
from .pool_memory import PoolMemory

BlockIds = Sequence[int] | npt.NDArray[np.integer[Any]]


class KVTransferError(Exception):
    """Blocks could not be moved: the request's KV is to be computed anew.

    Attributes:
        reason: One of :data:`tokenloom.engine_core.kv_messages.KV_FAILURES`.
        detail: For the log; may name addresses, never sent to a client.
    """

    def __init__(self, reason: str, detail: str) -> None:
        assert reason in KV_FAILURES, reason
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail


@dataclass(frozen=True)
class KVRegion:
    """One stretch of a pool in which blocks follow each other: of a layer, its keys or its values."""

    offset: int
    """In bytes from the start of the memory."""
    block_bytes: int
    """Of one block in this region."""


@dataclass(frozen=True)
class KVPool:
    """A worker's KV cache as transports see it: block i is the i-th piece of every region."""

    memory: PoolMemory
    regions: tuple[KVRegion, ...]
    """In the layout's order; pools of equal layouts have regions of equal ``block_bytes``, at offsets of their own."""
    num_blocks: int
    layout: str
    """``ModelInfo.kv_layout``."""

    def __post_init__(self) -> None:
        for region in self.regions:
            end = region.offset + region.block_bytes * self.num_blocks
            if region.offset < 0 or region.block_bytes <= 0 or end > self.memory.nbytes:
                raise ValueError(f"a KV region ends at byte {end} of a pool of {self.memory.nbytes} bytes")

    @property
    def block_bytes(self) -> int:
        """Of one block in all regions."""
        return sum(region.block_bytes for region in self.regions)

    @cached_property
    def views(self) -> tuple[npt.NDArray[np.uint8], ...]:
        """Of each region, [num_blocks, block_bytes] bytes; writable."""
        whole = np.frombuffer(self.memory.buffer, dtype=np.uint8)
        sizes = [(region.offset, region.block_bytes) for region in self.regions]
        return tuple(whole[at : at + size * self.num_blocks].reshape(self.num_blocks, size) for at, size in sizes)

    def checked(self, block_ids: BlockIds) -> npt.NDArray[np.int64]:
        """[n] the ids; raises :class:`KVTransferError` (``transport``) where one is not of this pool."""
        try:
            ids = np.asarray(block_ids, dtype=np.int64)
        except OverflowError:
            ids = np.array([-1])
        if ids.ndim != 1 or (ids.size and not (ids.min() >= 0 and ids.max() < self.num_blocks)):
            raise KVTransferError("transport", f"block ids outside of a pool of {self.num_blocks} blocks")
        return ids

    def checksum(self, block_id: int) -> int:
        """CRC-32 of a block over all regions in their order. Releases the interpreter lock on large blocks."""
        crc = 0
        for view in self.views:
            crc = zlib.crc32(view[block_id], crc)
        return crc


class KVReader(Protocol):
    """An opened endpoint: copies blocks of the owner's pool into this engine's. Used from any thread, blocking."""

    def read(self, source_block_ids: BlockIds, target_block_ids: BlockIds, pool: KVPool) -> None:
        """Copies block ``source[i]`` of the owner to block ``target[i]`` of ``pool``, all regions, as one batch.

        Raises :class:`KVTransferError`; some target blocks may have been written then. The reader may be used again
        unless the owner is gone, which the next call reports as well.
        """

    def close(self) -> None:
        """Ends a read in progress with an error. Idempotent."""


class KVTransport(Protocol):
    """One way of moving blocks. Thread-safe."""

    @property
    def name(self) -> str:
        """As in ``KVTarget.transport``."""

    def serve(self, pool: KVPool) -> bytes | None:
        """Owner: begins to serve a pool (once) and returns the endpoint for readers; None: cannot serve this pool."""

    def open(self, endpoint: bytes, layout: str) -> KVReader:
        """Reader: connects. ``layout`` is that of its own pool.

        Raises :class:`KVTransferError`: ``layout`` naming both when they differ, else ``transport``.
        """

    def close(self) -> None:
        """Ends serving and all that was opened. Idempotent."""
