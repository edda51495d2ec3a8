"""Moving KV blocks between the pools of two engines: the plain data and the protocols that a transport fulfils.

The owner of blocks serves its pool and hands out an endpoint; a reader opens the endpoint and copies blocks into its
own pool (a pull). Which blocks may be read, and until when, is not a transport's business: leases say so, and the
reader asks the owner once more after the copy.
"""

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from mmap import mmap
from typing import Any, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from ..kv_cache.pool_memory import PoolMemory
from .kv_messages import KV_FAILURES

Bytes = npt.NDArray[np.uint8]
IntArray = npt.NDArray[np.integer[Any]]
BlockIds = Sequence[int] | IntArray
Buffer = memoryview | mmap


class KVTransferError(Exception):
    """Blocks could not be moved: the request's KV is to be computed anew.

    Attributes:
        reason: One of :data:`tokenloom.engine_core.kv_transfer.kv_messages.KV_FAILURES`.
        detail: For the log; may name addresses, never sent to a client.
    """

    def __init__(self, reason: str, detail: str) -> None:
        assert reason in KV_FAILURES, reason
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail


class KVRegion(msgspec.Struct, frozen=True, array_like=True):
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
    def views(self) -> tuple[Bytes, ...]:
        """Of each region, [num_blocks, block_bytes] bytes; writable."""
        return tuple(view for plane in self.planes for view in plane)

    @cached_property
    def planes(self) -> tuple[Bytes, ...]:
        """Regions of equal size at equal distances as one array, [regions, num_blocks, block_bytes]; writable."""
        return region_planes(self.memory.buffer, self.regions, self.num_blocks)

    def checked(self, block_ids: BlockIds) -> npt.NDArray[np.int64]:
        """[n] the ids; raises :class:`KVTransferError` (``transport``) where one is not of this pool."""
        return checked_ids(block_ids, self.num_blocks)

    def checksum(self, block_id: int) -> int:
        """CRC-32 of a block over all regions in their order. Releases the interpreter lock on large blocks."""
        crc = 0
        for view in self.views:
            crc = zlib.crc32(view[block_id], crc)
        return crc


def checked_ids(block_ids: BlockIds, num_blocks: int) -> npt.NDArray[np.int64]:
    """[n] the ids; raises :class:`KVTransferError` (``transport``) where one is not of a pool of ``num_blocks``."""
    try:
        ids = np.asarray(block_ids, dtype=np.int64)
    except (OverflowError, TypeError, ValueError) as error:
        raise KVTransferError("transport", f"block ids: {error}") from error
    if ids.ndim != 1 or (ids.size and not (ids.min() >= 0 and ids.max() < num_blocks)):
        raise KVTransferError("transport", f"block ids outside of a pool of {num_blocks} blocks")
    return ids


def checked_pairs(
    source_block_ids: BlockIds, num_source_blocks: int, target_block_ids: BlockIds, pool: KVPool
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """[n] sources and [n] targets of a read; raises :class:`KVTransferError` (``transport``) where they are wrong."""
    source, target = checked_ids(source_block_ids, num_source_blocks), pool.checked(target_block_ids)
    if len(source) != len(target):
        raise KVTransferError("transport", f"{len(source)} blocks to read into {len(target)}")
    return source, target


def region_planes(buffer: Buffer, regions: Sequence[KVRegion], num_blocks: int) -> tuple[Bytes, ...]:
    """As :attr:`KVPool.planes`, of any buffer. ``TypeError`` or ``ValueError`` where a region exceeds it."""
    groups: list[list[KVRegion]] = []
    for region in regions:
        if groups and _continues(groups[-1], region):
            groups[-1].append(region)
        else:
            groups.append([region])
    return tuple(_plane(buffer, group, num_blocks) for group in groups)


def _continues(group: list[KVRegion], region: KVRegion) -> bool:
    distance = region.offset - group[-1].offset
    expected = group[1].offset - group[0].offset if len(group) > 1 else distance
    return distance == expected > 0 and region.block_bytes == group[0].block_bytes


def _plane(buffer: Buffer, group: list[KVRegion], num_blocks: int) -> Bytes:
    size, distance = group[0].block_bytes, group[1].offset - group[0].offset if len(group) > 1 else 0
    shape = (len(group), num_blocks, size)
    return np.ndarray(shape, np.uint8, buffer, group[0].offset, (distance, size, 1))


def copy_blocks(
    source: tuple[Bytes, ...], source_ids: BlockIds, target: tuple[Bytes, ...], target_ids: BlockIds
) -> None:
    """Copies block ``source_ids[i]`` of planes of equal layout to ``target_ids[i]``, checked ids, in all regions.

    One numpy call, which lets go of the interpreter lock, for each run of blocks that follow each other on both sides.
    """
    if [plane.shape[::2] for plane in source] != [plane.shape[::2] for plane in target]:
        source, target = _single_planes(source), _single_planes(target)
    for begin, to, count in _runs(np.asarray(source_ids), np.asarray(target_ids)):
        for there, here in zip(source, target, strict=True):
            here[:, to : to + count] = there[:, begin : begin + count]


def _single_planes(planes: tuple[Bytes, ...]) -> tuple[Bytes, ...]:
    return tuple(view[None] for plane in planes for view in plane)


def _runs(source_ids: IntArray, target_ids: IntArray) -> Iterator[tuple[int, int, int]]:
    """(first source block, first target block, blocks) of each run."""
    if not len(source_ids):
        return
    breaks = np.flatnonzero((np.diff(source_ids) != 1) | (np.diff(target_ids) != 1)) + 1
    begins = np.concatenate(([0], breaks))
    counts = np.diff(np.concatenate((begins, [len(source_ids)])))
    yield from zip(source_ids[begins].tolist(), target_ids[begins].tolist(), counts.tolist(), strict=True)


class KVReader(Protocol):
    """An opened endpoint: copies blocks of the owner's pool into this engine's. Used from any thread, blocking."""

    def read(self, source_block_ids: BlockIds, target_block_ids: BlockIds, pool: KVPool) -> None:
        """Copies block ``source[i]`` of the owner to block ``target[i]`` of ``pool``, all regions, as one batch.

        Raises :class:`KVTransferError`; some target blocks may have been written then. The reader may be used again
        unless the owner is gone, which the next call reports as well.
        """

    def close(self) -> None:
        """Ends a read in progress, with an error unless it is nearly done. Idempotent."""


class KVTransport(Protocol):
    """One way of moving blocks. Thread-safe."""

    @property
    def name(self) -> str:
        """As in ``KVTarget.transport``."""

    def serve(self, pool: KVPool) -> bytes | None:
        """Owner: begins to serve a pool (once) and returns the endpoint for readers; None: cannot serve this pool."""

    def open(self, endpoint: bytes, layout: str) -> KVReader:
        """Reader: connects. ``layout`` is that of its own pool. Worth keeping for as long as the owner's endpoint is.

        Raises :class:`KVTransferError`: ``layout`` naming both when they differ, else ``transport``.
        """

    def close(self) -> None:
        """Ends serving and all that was opened. Idempotent."""
