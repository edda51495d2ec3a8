"""Transports that move KV blocks, and slots of states, between the pools of two engines: their protocols and data.

The owner of blocks serves its pool and publishes an endpoint; a reader opens the endpoint and copies blocks into its
own pool (a pull). Transports do not know which blocks may be read, and until when: leases decide that, and the reader
asks the owner again after the copy.

A slot, which holds the states of the layers that keep one, moves as a block does. It lies in regions of its own. Its id
is the number of blocks of its pool plus its own number.
"""

import abc
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from mmap import mmap
from typing import Any, NamedTuple, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from ..data.kv_messages import LEASE_ENDS, KVTarget
from ..kv_cache.pool_memory import Bytes as Bytes
from ..kv_cache.pool_memory import DeviceMemory, PoolMemory

IntArray = npt.NDArray[np.integer[Any]]
BlockIds = Sequence[int] | IntArray
Buffer = memoryview | mmap


class KVTransferError(Exception):
    """Raised when blocks cannot be moved, so that the request's KV must be computed again.

    Attributes:
        reason: One of :data:`tokenloom.engine_core.data.kv_messages.LEASE_ENDS`.
        detail: Text for the log. It may contain addresses, so it is never sent to a client.
    """

    def __init__(self, reason: str, detail: str) -> None:
        assert reason in LEASE_ENDS, reason
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail


class KVRegion(msgspec.Struct, frozen=True, array_like=True):
    """Describes one range of a pool in which blocks follow each other, such as the keys or the values of a layer, or
    slots, such as one kind of state of a layer."""

    offset: int
    """Start in bytes, relative to the memory."""
    block_bytes: int
    """Bytes of one block, or of one slot, in this region."""
    is_state: bool = False
    """Whether slots lie here, and no blocks."""


class PartsEndpoint(msgspec.Struct, array_like=True, tag="parts"):
    """Says where the workers of an engine serve the parts of its pool, each from its own machine: an endpoint of the
    transport ``socket``."""

    parts: list[tuple[bytes, str, int]]
    """For each part, in order of the pool's regions: its endpoint, its layout, and how many regions it has."""


class MemoryApart(abc.ABC):
    """Holds the parts of a pool in the memories of workers on other machines, which copy blocks by themselves. Methods
    may be called by any thread, and raise :class:`KVTransferError`."""

    nbytes: int
    """The size of all parts, in bytes."""
    endpoints: dict[str, bytes]
    """By the names of transports: where readers find the parts."""

    @abc.abstractmethod
    def read(self, target: KVTarget, block_ids: BlockIds, *, checksum: bool, tears: bool) -> list[int]:
        """Let every worker read its part of the blocks ``target.block_ids`` of another engine into ``block_ids``.

        Args:
            target: With the owner's layout.
            checksum: Whether to return the CRC-32 of each block, as the owner computes it; otherwise an empty list.
            tears: Whether to change the last block before that, for tests of what notices it.
        """

    @abc.abstractmethod
    def checksums(self, block_ids: Sequence[int]) -> list[int]:
        """Return the CRC-32 of each block or slot over all parts in order."""

    @abc.abstractmethod
    def interrupt(self, target: KVTarget) -> None:
        """End the reads from this target, with an error. Does not wait."""

    @abc.abstractmethod
    def forget(self, owners: Sequence[str]) -> None:
        """Close what was opened to these incarnations of engines. Does not wait."""

    @abc.abstractmethod
    def close(self) -> None:
        """End all reads. Does not wait."""


@dataclass(frozen=True)
class KVPool:
    """Describes a worker's KV cache for transports: block i is the i-th piece of every region of blocks, and slot i the
    i-th piece of every region of states.

    Its bytes lie in memory of the host, of a device, or of workers on other machines. Regions of a device have equal
    sizes, and hold no states.
    """

    memory: PoolMemory | DeviceMemory | MemoryApart
    regions: tuple[KVRegion, ...]
    """Regions in the layout's order. Equal layouts have equal ``block_bytes``, at different offsets."""
    num_blocks: int
    layout: str
    """``ModelInfo.kv_layout``."""
    num_slots: int = 0
    """Slots of states; 0: no layer keeps one."""
    copies: tuple[tuple[KVRegion, ...], ...] = ()
    """Where ranks that divide prompts keep the same blocks: the regions of each, without those of the first rank."""

    def __post_init__(self) -> None:
        for region in self.regions:
            count = self.num_slots if region.is_state else self.num_blocks
            end = region.offset + region.block_bytes * count
            if region.offset < 0 or region.block_bytes <= 0 or end > self.memory.nbytes:
                raise ValueError(f"a KV region ends at byte {end} of a pool of {self.memory.nbytes} bytes")

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all its regions; 0 if no layer attends."""
        return sum(region.block_bytes for region in self.regions_of(is_state=False))

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot over all its regions."""
        return sum(region.block_bytes for region in self.regions_of(is_state=True))

    @property
    def region_bytes(self) -> list[int]:
        """Bytes of one block, or of one slot, in each region."""
        return [region.block_bytes for region in self.regions]

    def regions_of(self, *, is_state: bool) -> tuple[KVRegion, ...]:
        """Return the regions of blocks, or those of slots."""
        return regions_of(self.regions, is_state=is_state)

    def nbytes_of(self, ids: Sequence[int]) -> int:
        """Return the size of these blocks and slots."""
        num_slots = sum(each >= self.num_blocks for each in ids)
        return (len(ids) - num_slots) * self.block_bytes + num_slots * self.slot_bytes

    @property
    def device(self) -> DeviceMemory | None:
        """The memory, if it is a device's."""
        return None if isinstance(self.memory, (PoolMemory, MemoryApart)) else self.memory

    @property
    def apart(self) -> MemoryApart | None:
        """The memory, if workers on other machines have it."""
        return self.memory if isinstance(self.memory, MemoryApart) else None

    @property
    def host(self) -> PoolMemory:
        """The memory of a pool of the host. Raises :class:`KVTransferError` (``transport``) for another one."""
        if not isinstance(self.memory, PoolMemory):
            raise KVTransferError("transport", "this pool is in the memory of a device or of other machines")
        return self.memory

    @cached_property
    def views(self) -> tuple[Bytes, ...]:
        """One writable array per region of blocks: [num_blocks, block_bytes] bytes. Raises as :attr:`host`."""
        return tuple(view for plane in self.planes for view in plane)

    @cached_property
    def planes(self) -> tuple[Bytes, ...]:
        """Writable arrays [regions, num_blocks, block_bytes] of the blocks, each over regions of equal size at equal
        distances.

        Raises as :attr:`host`.
        """
        return region_planes(self.host.buffer, self.regions_of(is_state=False), self.num_blocks)

    @cached_property
    def state_planes(self) -> tuple[Bytes, ...]:
        """Arrays [regions, num_slots, bytes] of the slots, as those of :attr:`planes`."""
        return region_planes(self.host.buffer, self.regions_of(is_state=True), self.num_slots)

    def planes_of(self, *, is_state: bool) -> tuple[Bytes, ...]:
        """Return :attr:`state_planes` or :attr:`planes`."""
        return self.state_planes if is_state else self.planes

    def rows(self, block_id: int) -> list[Bytes]:
        """Return the writable pieces of a block, or of a slot, region by region. Raises as :attr:`host`."""
        if block_id < self.num_blocks:
            return [view[block_id] for view in self.views]
        return [view[block_id - self.num_blocks] for plane in self.state_planes for view in plane]

    def checked(self, block_ids: BlockIds) -> npt.NDArray[np.int64]:
        """Return the ids as an array [n]. Raises :class:`KVTransferError` (``transport``) outside of this pool."""
        return checked_ids(block_ids, self.num_blocks + self.num_slots)

    def checksums(self, block_ids: BlockIds) -> list[int]:
        """Return the CRC-32 of each block or slot over its regions in order. Releases the interpreter lock for large
        ones."""
        if self.apart is not None:
            return self.apart.checksums([int(block_id) for block_id in block_ids])
        if self.device is None:
            return [_checksum(self.rows(block_id)) for block_id in block_ids]
        sums = []
        for block_id in self.checked(block_ids):  # one at a time, to bound the copy on the host
            sums.append(_checksum(self._device_block(self.device, block_id)))
        return sums

    def spread(self, block_ids: BlockIds) -> None:
        """Give blocks that were read into this pool to the ranks that keep the same ones."""
        for regions in self.copies:
            copy_blocks(self.planes, block_ids, region_planes(self.host.buffer, regions, self.num_blocks), block_ids)

    def damage(self, block_id: int) -> None:
        """Change the last byte of a block, for tests of what notices that."""
        if self.device is None:
            if rows := self.rows(block_id):
                rows[-1][-1] ^= 0xFF
            return
        packed = self._device_block(self.device, block_id)
        packed[-1, -1] ^= 0xFF
        self.device.start_write(np.array([block_id]), slice(0, len(self.regions)), packed[:, None])()

    def settle(self) -> None:
        """Wait until what steps wrote so far can be read by other processes; the host's writes are there at once."""
        if self.device is not None:
            self.device.settle()

    def _device_block(self, device: DeviceMemory, block_id: int) -> Bytes:
        """Return a copy of a block: [regions, block_bytes] bytes."""
        packed = np.empty((len(self.regions), 1, self.regions[0].block_bytes), dtype=np.uint8)
        device.start_read(np.array([block_id]), slice(0, len(self.regions)), packed)()
        return packed[:, 0]


def _checksum(pieces: Iterable[Bytes]) -> int:
    crc = 0
    for piece in pieces:
        crc = zlib.crc32(piece.data, crc)
    return crc


def regions_of(regions: Iterable[KVRegion], *, is_state: bool) -> tuple[KVRegion, ...]:
    """Return those of the regions that hold blocks, or those that hold slots."""
    return tuple(region for region in regions if region.is_state == is_state)


def checked_ids(block_ids: BlockIds, num_blocks: int) -> npt.NDArray[np.int64]:
    """Return the ids as an array [n]. Raises :class:`KVTransferError` for one outside of ``num_blocks`` blocks."""
    try:
        ids = np.asarray(block_ids, dtype=np.int64)
    except (OverflowError, TypeError, ValueError) as error:
        raise KVTransferError("transport", f"block ids: {error}") from error
    if ids.ndim != 1 or (ids.size and not (ids.min() >= 0 and ids.max() < num_blocks)):
        raise KVTransferError("transport", f"block ids exceed a pool of {num_blocks} blocks")
    return ids


class ReadPairs(NamedTuple):
    """Holds the sources [n] and the targets [n] of a read: numbers of blocks, or of slots."""

    is_state: bool
    source: IntArray
    target: IntArray


def checked_pairs(
    source_ids: BlockIds, num_source_blocks: int, target_ids: BlockIds, pool: KVPool, num_source_slots: int = 0
) -> list[ReadPairs]:
    """Return the blocks of a read and its slots, as far as it has any. Raises :class:`KVTransferError`
    (``transport``)."""
    source, target = checked_ids(source_ids, num_source_blocks + num_source_slots), pool.checked(target_ids)
    if len(source) != len(target):
        raise KVTransferError("transport", f"cannot read {len(source)} blocks into {len(target)}")
    if ((source >= num_source_blocks) != (target >= pool.num_blocks)).any():
        raise KVTransferError("transport", "a slot cannot be read into a block, nor a block into a slot")
    pairs = zip((False, True), divided(source, num_source_blocks), divided(target, pool.num_blocks), strict=True)
    return [ReadPairs(is_state, part, other) for is_state, part, other in pairs if len(part)]


def divided(ids: IntArray, num_blocks: int) -> tuple[IntArray, IntArray]:
    """Return the blocks among the ids of a pool of ``num_blocks`` blocks, and the numbers of the slots, each in
    order."""
    are_slots = ids >= num_blocks
    return ids[~are_slots], ids[are_slots] - num_blocks


def region_planes(buffer: Buffer, regions: Sequence[KVRegion], num_blocks: int) -> tuple[Bytes, ...]:
    """Return the arrays of :attr:`KVPool.planes` over a buffer. Raises ``TypeError`` or ``ValueError``."""
    groups: list[list[KVRegion]] = []
    for region in regions:
        # Layers of a pool lie at equal distances, so that one strided array covers all of them: copying a block is one
        # call of numpy instead of one for each layer's keys and values.
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
    """Copy block ``source_ids[i]`` to block ``target_ids[i]`` in all regions of planes of equal layout. The ids must be
    checked before.

    Makes one numpy call, which releases the interpreter lock, per run of blocks that are adjacent on both sides.
    """
    if [plane.shape[::2] for plane in source] != [plane.shape[::2] for plane in target]:
        source, target = _single_planes(source), _single_planes(target)
    for begin, to, count in _runs(np.asarray(source_ids), np.asarray(target_ids)):
        for there, here in zip(source, target, strict=True):
            here[:, to : to + count] = there[:, begin : begin + count]


def _single_planes(planes: tuple[Bytes, ...]) -> tuple[Bytes, ...]:
    return tuple(view[None] for plane in planes for view in plane)


def _runs(source_ids: IntArray, target_ids: IntArray) -> Iterator[tuple[int, int, int]]:
    """Yield (first source block, first target block, number of blocks) for each run."""
    if not len(source_ids):
        return
    # Both pools give out blocks in ascending order while they are fresh, so a prompt is often a single run.
    breaks = np.flatnonzero((np.diff(source_ids) != 1) | (np.diff(target_ids) != 1)) + 1
    begins = np.concatenate(([0], breaks))
    counts = np.diff(np.concatenate((begins, [len(source_ids)])))
    yield from zip(source_ids[begins].tolist(), target_ids[begins].tolist(), counts.tolist(), strict=True)


def are_compared(setting: bool | None, transport: object) -> bool:
    """Return whether checksums of blocks that moved over a transport are compared. ``setting``: of ``KVConfig``."""
    return not getattr(transport, "guards_bytes", False) if setting is None else setting


class KVReader(Protocol):
    """Copies blocks of the owner's pool into this engine's pool. Blocking; any thread may use it."""

    def read(self, source_block_ids: BlockIds, target_block_ids: BlockIds, pool: KVPool) -> None:
        """Copy block ``source[i]`` of the owner to block ``target[i]`` of ``pool`` in all regions, as one batch.

        Raises :class:`KVTransferError`; some target blocks may have been written by then. The reader may be used again,
        unless the owner is lost; then the next call fails too.
        """

    def close(self) -> None:
        """Close the endpoint. A read in progress ends, with an error unless it is nearly done. Idempotent."""


class KVTransport(Protocol):
    """One way to move blocks. Thread-safe."""

    @property
    def name(self) -> str:
        """The name, as in ``KVTarget.transport``."""

    @property
    def guards_bytes(self) -> bool:
        """Whether bytes cannot change on their way unseen, because they stay in the memory of one host or go under TLS.
        A transport without this attribute counts as one that does not guard them."""

    @property
    def serves_on_demand(self) -> bool:
        """Whether serving takes resources, so that the owner calls ``serve`` only when a reader asks for this
        transport, and ``attend`` while readers may read."""

    def serve(self, pool: KVPool) -> bytes | None:
        """Owner: start to serve a pool, once. Returns the endpoint for readers; None if it cannot serve this pool.

        Raises the errors of its library, if it serves on demand.
        """

    def attend(self, seconds: float) -> None:
        """Owner: do this side's part of transfers for the next ``seconds``, which replace an earlier number. Does
        nothing unless it serves on demand."""

    def open(self, endpoint: bytes, layout: str) -> KVReader:
        """Reader: connect. ``layout`` is the layout of the reader's pool. The result can be reused as long as the
        endpoint exists.

        Raises :class:`KVTransferError`: ``layout`` if the layouts differ, otherwise ``transport``.
        """

    def close(self) -> None:
        """Stop serving and close all opened endpoints. Idempotent."""
