"""Copies blocks and computes their checksums on threads of their own, next to the steps.

Blocks of a pool that is divided among other ranks than this engine's (by heads, by layers, or by tokens) arrive as
their owner has them, in memory of their own, and every rank's part takes what it keeps. Layouts that cannot be joined
exchange no block.
"""

import contextlib
import functools
import itertools
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import replace

import msgspec
import numpy as np

from ..data.kv_groups import KVPart, common_layout, distinct, read_parts, shared
from ..data.kv_messages import KVTarget
from ..kv_cache.pool_memory import PoolMemory
from .block_loads import CopyTask
from .failpoints import Failpoints
from .kv_transport import (
    BlockIds,
    Bytes,
    IntArray,
    KVPool,
    KVReader,
    KVRegion,
    KVTransferError,
    KVTransport,
    MemoryApart,
    are_compared,
)

log = logging.getLogger(__name__)

NUM_THREADS = 2
"""Copies are limited by memory bandwidth, so more threads would not be faster."""

ReaderKey = tuple[str, str, bytes]
"""Owner, transport and endpoint."""


_STAGED_BYTES = 16 << 20
"""Bytes of blocks that are read at once: enough for a transport to be fast, and little beside a pool."""
_PLANES = 2
"""Keys and values: regions of each layer."""


class DividedPool:
    """Copies blocks between a pool of this engine and one of another layout. Any thread may use it."""

    def __init__(self, pool: KVPool, layout: str, own: tuple[str, int] | None = None) -> None:
        """
        Args:
            pool: Of this engine, or the part of it that one of its workers has.
            layout: Of the other pool.
            own: The layout of this engine's whole pool, and which part of it ``pool`` is; None: it is all of it.

        Raises :class:`KVTransferError` (``layout``) if the two cannot be joined.

        Attributes:
            sources: Which parts of the other pool are read, by their numbers: those of which the worker keeps some.
            ranges: Where the regions of these parts are in the other pool.
        """
        whole, number = own or (pool.layout, None)
        ours, theirs = read_parts(whole), read_parts(layout)
        if not ours or not theirs or ours[0].layout != theirs[0].layout or pool.device is not None:
            raise KVTransferError("layout", f"the owner's blocks are {layout}, this engine's {whole}")
        self._pool = pool
        self.sources = list(range(len(theirs)))
        if number is not None:
            ours = [ours[number]]
            self.sources = [
                each for each in distinct(theirs).values() if all(map(shared, theirs[each].box, ours[0].box))
            ]
        ends = np.cumsum([0, *(_PLANES * len(part.box[0]) for part in theirs)]).tolist()
        self.ranges = [range(ends[each], ends[each + 1]) for each in self.sources]
        theirs = [theirs[each] for each in self.sources]
        self._ours, self._theirs = ours, theirs
        row_bytes = pool.regions[0].block_bytes // _rows(ours[0])
        sizes = [_rows(part) * row_bytes for part in theirs for _ in range(_PLANES * len(part.box[0]))]
        self._most = max(1, _STAGED_BYTES // sum(sizes))
        begins = np.cumsum([0, *sizes]) * self._most
        self._regions = tuple(KVRegion(int(begin), size) for begin, size in zip(begins[:-1], sizes, strict=True))
        self._idle: list[KVPool] = []
        """Memory for blocks as the owner has them: as many as threads that copied at once."""

    def read(self, reader: KVReader, source_ids: BlockIds, target_ids: BlockIds) -> None:
        """Read blocks of the owner into this engine's, as :meth:`KVReader.read` does."""
        source, target = np.asarray(source_ids), self._pool.checked(target_ids)
        with self._staging() as staged:
            for batch in self._batches(len(target)):
                places = np.arange(len(target[batch]))
                reader.read(source[batch], places, staged)
                _copy(staged, self._theirs, places, self._pool, self._ours, target[batch])

    def read_part(
        self, reader: KVReader, source_ids: BlockIds, target_ids: BlockIds, *, tears: bool
    ) -> tuple[list[int], list[list[int]]]:
        """Read what a worker keeps of blocks, as :meth:`read`.

        Returns for each of :attr:`sources` the bytes of a block of it, and the CRC-32 of each of these blocks, with
        what the worker keeps of it as it lies in its part. ``tears``: as for :meth:`.kv_transport.MemoryApart.read`.
        """
        source, target = np.asarray(source_ids), self._pool.checked(target_ids)
        views, sums = self._regions_of_sources(), [list[int]() for _ in self.sources]
        with self._staging() as staged:
            for batch in self._batches(len(target)):
                places = np.arange(len(target[batch]))
                reader.read(source[batch], places, staged)
                _copy(staged, self._theirs, places, self._pool, self._ours, target[batch])
                if tears and batch.stop >= len(target):
                    self._pool.damage(int(target[-1]))
                # Back over what was read: a checksum of the staged bytes alone would not notice a torn copy.
                _copy(self._pool, self._ours, target[batch], staged, self._theirs, places)
                for regions, found in zip(views, sums, strict=True):
                    found += replace(staged, regions=regions).checksums(places.tolist())
        return [sum(region.block_bytes for region in regions) for regions in views], sums

    def _regions_of_sources(self) -> list[tuple[KVRegion, ...]]:
        ends = np.cumsum([0, *map(len, self.ranges)]).tolist()
        return [self._regions[begin:end] for begin, end in itertools.pairwise(ends)]

    def checksums(self, block_ids: Sequence[int]) -> list[int]:
        """Return the CRC-32 of blocks of this engine, as the owner computes them."""
        ids, found = self._pool.checked(block_ids), list[int]()
        with self._staging() as staged:
            for batch in self._batches(len(ids)):
                places = np.arange(len(ids[batch]))
                _copy(self._pool, self._ours, ids[batch], staged, self._theirs, places)
                found += staged.checksums(places.tolist())
        return found

    @contextlib.contextmanager
    def _staging(self) -> Iterator[KVPool]:
        try:
            staged = self._idle.pop()
        except IndexError:
            nbytes = self._regions[-1].offset + self._regions[-1].block_bytes * self._most
            staged = KVPool(PoolMemory.allocate(nbytes, shared=False), self._regions, self._most, "")
        try:
            yield staged
        finally:
            self._idle.append(staged)

    def _batches(self, count: int) -> Iterator[slice]:
        return (slice(first, first + self._most) for first in range(0, count, self._most))


def _rows(part: KVPart) -> int:
    """Return how many rows a block has in one region of a part."""
    return len(part.box[1]) * len(part.box[2])


def _copy(
    source: KVPool,
    source_parts: Sequence[KVPart],
    source_ids: IntArray,
    target: KVPool,
    target_parts: Sequence[KVPart],
    target_ids: IntArray,
) -> None:
    """Copy block ``source_ids[i]`` to block ``target_ids[i]``: into each part of the target what it keeps."""
    there, here = _views(source, source_parts), _views(target, target_parts)
    for number in distinct(source_parts).values():
        for part, views in zip(target_parts, here, strict=True):
            layers, *sides = map(shared, source_parts[number].box, part.box)
            if not (layers and all(sides)):
                continue
            ours = _within(part, layers, sides)
            theirs = _within(source_parts[number], layers, sides)
            for mine, found in zip(views, there[number], strict=True):
                mine[ours[0], target_ids, ours[1], ours[2]] = found[theirs[0], source_ids, theirs[1], theirs[2]]


def _within(part: KVPart, layers: range, sides: Sequence[range]) -> list[slice]:
    """Return where regions, heads and tokens that a part has lie in its views."""
    first = part.box[0].start
    places = [slice(_PLANES * (layers.start - first), _PLANES * (layers.stop - first))]
    return places + [
        slice(side.start - own.start, side.stop - own.start) for own, side in zip(part.box[1:], sides, strict=True)
    ]


def _views(pool: KVPool, parts: Sequence[KVPart]) -> list[list[Bytes]]:
    """Return for each part its numbers [regions, blocks, heads, tokens, bytes of a row], and behind them its scales, if
    rows have some. Raises :class:`KVTransferError` (``layout``) if the regions are others than the layout says."""
    views, begin = [], 0
    for part in parts:
        count = _PLANES * len(part.box[0])
        regions, begin = pool.regions[begin : begin + count], begin + count
        views.append(_views_of(pool, part, regions))
    if begin != len(pool.regions):
        raise KVTransferError("layout", f"{len(pool.regions)} regions are not those of {len(parts)} parts")
    return views


def _views_of(pool: KVPool, part: KVPart, regions: Sequence[KVRegion]) -> list[Bytes]:
    size, distance = regions[0].block_bytes, regions[1].offset - regions[0].offset
    expected = [KVRegion(regions[0].offset + number * distance, size) for number in range(len(regions))]
    heads, tokens = len(part.box[1]), len(part.box[2])
    row_bytes, rest = divmod(size, heads * tokens)
    if list(regions) != expected or rest:
        raise KVTransferError("layout", "the regions of a part have no equal sizes at equal distances")
    number_bytes = row_bytes - part.scale_bytes
    strides = (distance, size, tokens * row_bytes)
    shape = (len(regions), pool.num_blocks, heads, tokens)
    found = [(0, number_bytes)] + [(tokens * number_bytes, part.scale_bytes)] * (part.scale_bytes > 0)
    return [
        np.ndarray((*shape, row), np.uint8, pool.host.buffer, regions[0].offset + begin, (*strides, row, 1))
        for begin, row in found
    ]


class KVCopier:
    """Copies into one pool. Tasks run on the threads of an executor, which also call the callbacks."""

    def __init__(
        self,
        pool: KVPool,
        transports: Iterable[KVTransport],
        executor: Executor,
        failpoints: Failpoints,
        *,
        checksum: bool | None,
    ) -> None:
        """``checksum``: as ``KVConfig.checksum``."""
        self._pool = pool
        self._transports = {transport.name: transport for transport in transports}
        self._executor = executor
        self._failpoints = failpoints
        self._checksum = checksum
        self._lock = threading.RLock()  # an executor may run its work at once
        self._readers: dict[ReaderKey, KVReader] = {}
        """At most a few for each engine in the registry: :meth:`forget_owners` follows it. A limit of their number
        instead kept pools of dead engines mapped below it, and closed readers in use above it."""
        self._common = common_layout(pool.layout)
        """The layout of an owner that does not say how it is divided."""
        self._divisions: dict[str, DividedPool] = {}
        """By layout: a few kinds of engines serve one model."""
        self._copying: Counter[str] = Counter()
        """By owner: copies that run, or wait for a thread."""
        self._left: set[str] = set()
        """Owners that have left while copies from them run or wait."""
        self._closed = False

    def copy(self, task: CopyTask, done: Callable[[list[int], KVTransferError | None], None]) -> None:
        """Copy a batch; the copying thread calls ``done(checksums, error)``. Does nothing after :meth:`close`."""
        # Counted from here on: one that waits for a thread when its owner leaves would open a reader afterwards.
        with self._lock:
            self._copying[task.target.owner] += 1
        self._submit(lambda: self._run(task, done))

    def checksums(self, block_ids: Sequence[int], done: Callable[[list[int]], None]) -> None:
        """Compute checksums of blocks of this pool; the computing thread calls ``done`` with them.
        Does nothing after :meth:`close`."""
        # On a copying thread: a checksum of a long prompt takes longer than other readers want to wait for the KV
        # thread.
        self._submit(lambda: done(self._pool.checksums(block_ids)))

    def interrupt(self, target: KVTarget) -> None:
        """End the read from this target, with an error."""
        if self._pool.apart is not None:
            self._pool.apart.interrupt(target)
        self._forget(target)

    def close(self) -> None:
        """Close all readers; the executor may be shut down from now on. Idempotent."""
        with self._lock:
            self._closed = True
            readers, self._readers = list(self._readers.values()), {}
        for reader in readers:
            reader.close()
        if self._pool.apart is not None:
            self._pool.apart.close()

    def forget_owners(self, owners: Iterable[str]) -> None:
        """Close what was opened to these incarnations of engines, for which no new copy comes."""
        with self._lock:
            left = set(owners)
            # A copy of a load that was given up may still run, and open a reader only now: its thread closes that.
            self._left |= {owner for owner in left if self._copying[owner]}
            readers = [self._readers.pop(key) for key in list(self._readers) if key[0] in left]
        for reader in readers:
            reader.close()
        if left and self._pool.apart is not None:
            self._pool.apart.forget(sorted(left))

    def _submit(self, work: Callable[[], None]) -> None:
        with self._lock:  # the thread that steps closes while the KV thread still runs
            if not self._closed:
                self._executor.submit(work)

    def _run(self, task: CopyTask, done: Callable[[list[int], KVTransferError | None], None]) -> None:
        try:
            with self._ending(task.target.owner):
                sums = self._copy(task)
            compares = sums is None and self._compares(task)
            done(self._checksums_of(task) if compares else sums or [], None)
        except KVTransferError as error:
            log.warning("copying KV failed: %s", error)
            done([], error)
        except Exception as error:
            log.exception("a KV transport failed because of a bug")
            done([], KVTransferError("transport", f"{type(error).__name__}: {error}"))

    @contextlib.contextmanager
    def _ending(self, owner: str) -> Iterator[None]:
        """End a copy that is counted; behind the last one from an owner that has left close what was opened to it."""
        try:
            yield
        finally:
            with self._lock:
                self._copying[owner] -= 1
                self._copying = +self._copying  # without zeros
                left = self._left - self._copying.keys()
                self._left -= left
            self.forget_owners(left)

    def _copy(self, task: CopyTask) -> list[int] | None:
        """Copy a batch. Returns its checksums if workers on other machines have copied it."""
        if self._failpoints.fires("slow_copy"):
            time.sleep(0.05)
        if self._failpoints.fires("copy_fails"):
            raise KVTransferError("transport", "failpoint")
        read = self._read if self._pool.apart is None else functools.partial(self._read_apart, self._pool.apart)
        try:
            return read(task)
        except Exception as error:
            self._forget(task.target)
            # Another layout, prompt or lease stays wrong however often it is asked for; only a connection may be
            # mended.
            if not isinstance(error, KVTransferError) or error.reason != "transport" or not task.is_wanted:
                raise
            # Retry once over a new connection: the old one may have been closed while it was idle.
            return read(task)

    def _read_apart(self, memory: MemoryApart, task: CopyTask) -> list[int]:
        target = msgspec.structs.replace(
            task.target,
            block_ids=task.source_ids,
            generations=[],
            checksums=[],
            layout=task.target.layout or self._common,
        )
        tears = self._failpoints.fires("torn_copy")
        return memory.read(target, task.block_ids, checksum=self._compares(task), tears=tears)

    def _read(self, task: CopyTask) -> None:
        # First: layouts that cannot be joined need no connection.
        divided = self._divided(task.target)
        reader = self._reader(task.target)
        if divided is None:
            reader.read(task.source_ids, task.block_ids, self._pool)
        else:
            divided.read(reader, task.source_ids, task.block_ids)
        self._pool.spread(task.block_ids)
        if self._failpoints.fires("torn_copy"):
            self._pool.damage(task.block_ids[-1])

    def _compares(self, task: CopyTask) -> bool:
        return are_compared(self._checksum, self._transports.get(task.target.transport))

    def _checksums_of(self, task: CopyTask) -> list[int]:
        divided = self._divided(task.target)
        return (self._pool if divided is None else divided).checksums(task.block_ids)

    def _divided(self, target: KVTarget) -> DividedPool | None:
        """Return what copies from a pool that is divided in another way; None: the owner's is as this one."""
        if (layout := target.layout or self._common) == self._pool.layout:
            return None
        with self._lock:
            if (divided := self._divisions.get(layout)) is None:
                divided = self._divisions[layout] = DividedPool(self._pool, layout)
            return divided

    def _reader(self, target: KVTarget) -> KVReader:
        key = _key_of(target)
        with self._lock:
            if (reader := self._readers.get(key)) is not None:
                return reader
        if (transport := self._transports.get(target.transport)) is None:
            raise KVTransferError("transport", f"this engine has no transport {target.transport!r}")
        # Not under the lock: connecting takes half a second with nixl, and interrupt() needs the lock to end a copy
        # that hangs.
        reader = transport.open(target.endpoint, target.layout or self._common)
        with self._lock:
            kept = self._readers.setdefault(key, reader)  # another thread may have opened one in the meantime
        if kept is not reader:
            reader.close()
        return kept

    def _forget(self, target: KVTarget) -> None:
        with self._lock:
            reader = self._readers.pop(_key_of(target), None)
        if reader is not None:
            reader.close()


def _key_of(target: KVTarget) -> ReaderKey:
    return target.owner, target.transport, target.endpoint
