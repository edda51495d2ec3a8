"""Joins what the workers of an engine are into one: their configurations, models, KV pools and answers.

The pools of workers in processes of their own are one shared memory, of which each rank has an equal part. The core's
process makes the memory, and moves blocks in and out of it. A worker inherits its descriptor, lays its cache out in its
part, and reports where the blocks are. Workers on several machines have memories of their own instead, and move blocks
themselves. To other engines the parts are one pool, whose block i is block i of every rank.

A call that only some ranks have made is an error of its own kind.
"""

import contextlib
import dataclasses
import functools
import itertools
import os
import zlib
from collections.abc import Callable, Sequence

import msgspec
from msgspec.structs import replace

from ..data.config import EngineConfig
from ..data.errors import ExecutorFailedError, PeerLostError, RanksDifferError, WeightsDamagedError, WorkerLostError
from ..data.handshake import WarmUp
from ..data.kv_groups import KVCacheConfig
from ..data.kv_messages import KVTarget
from ..data.model_info import ModelInfo
from ..kv_cache.pool_memory import PoolMemory, create_memfd, whole_pages
from ..kv_transfer.kv_transport import BlockIds, KVPool, KVRegion, KVTransferError, MemoryApart, PartsEndpoint
from ..kv_transfer.pool_parts import PartAnswer, PartChecksums, PartForget, PartMessage, PartRead, PartSums
from .worker import Worker


class RankPool(msgspec.Struct, frozen=True):
    """Describes the pool that one rank has registered, for the core."""

    regions: list[KVRegion]
    """With offsets relative to the rank's part."""
    num_blocks: int
    layout: str
    """``ModelInfo.kv_layout`` of this rank."""
    num_slots: int = 0
    """As in :class:`..kv_transfer.kv_transport.KVPool`."""
    warm_up: WarmUp = WarmUp()
    """What the rank computed after it had made the pool."""
    endpoint: bytes = b""
    """Where the rank serves its part, if it is on a machine of its own."""


def make_rank_pool(worker: Worker, kv_cache: KVCacheConfig, memory: PoolMemory) -> RankPool:
    """Make the pool of a rank in its part of the memory, and return where its blocks are."""
    warm_up = worker.initialize_kv_cache(kv_cache, memory)
    pool = worker.kv_pool()
    return RankPool(list(pool.regions), pool.num_blocks, pool.layout, pool.num_slots, warm_up)


class RankPools:
    """Owns the memory of all ranks' pools."""

    def __init__(self, world_size: int, num_copies: int = 1) -> None:
        """Create the memory, which is empty until :meth:`allocate`. ``num_copies``: how often the ranks have each
        block. Raises ``OSError`` if the system has none.

        Attributes:
            fd: The descriptor that the workers inherit.
        """
        self._world_size = world_size
        self._num_copies = num_copies
        # One memory for all ranks, so that the core moves blocks with one set of transports. In vLLM each worker has
        # its own, and a reader connects to every rank. The price: no huge pages on most kernels.
        self.fd = create_memfd()
        self._memory: PoolMemory | None = None
        self._part_bytes = 0

    def allocate(self, nbytes: int) -> int:
        """Give each rank ``nbytes``. Returns the size of a part, in whole pages: that of rank r begins at r times it.
        Called once."""
        # A part begins on a page, because mmap takes no other offset.
        self._part_bytes = whole_pages(nbytes)
        self._memory = PoolMemory.of_memfd(self.fd, self._part_bytes * self._world_size)
        return self._part_bytes

    def merge(self, parts: Sequence[RankPool]) -> KVPool:
        """Return the pool that consists of what the ranks have registered, in order of their ranks.

        Raises ``ValueError`` if the ranks differ in their number of blocks or slots.
        """
        assert self._memory is not None, "allocate comes first"
        return _merged_pool(self._memory, self._part_bytes, parts, self._num_copies)

    def close(self) -> None:
        """Close the descriptors; views of the memory stay valid. Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
        if self._memory is not None:
            self._memory.close()


def _merged_pool(
    memory: PoolMemory | MemoryApart, part_bytes: int, parts: Sequence[RankPool], num_copies: int
) -> KVPool:
    """Return the pool whose parts begin at multiples of ``part_bytes``. Raises as :meth:`RankPools.merge`."""
    counts = {(part.num_blocks, part.num_slots) for part in parts}
    if len(counts) != 1:
        raise ValueError(f"the ranks' KV pools have {sorted(counts)} blocks and slots; all need the same numbers")
    num_blocks, num_slots = counts.pop()
    count = len(parts) // num_copies
    regions, *copies = (
        tuple(
            KVRegion(rank * part_bytes + region.offset, region.block_bytes, region.is_state)
            for rank in range(first, first + count)
            for region in parts[rank].regions
        )
        for first in range(0, len(parts), count)
    )
    layout = merged_layout([part.layout for part in parts[:count]])
    return KVPool(memory, regions, num_blocks, layout, num_slots, tuple(copies))


Send = Callable[[Sequence[bytes]], Callable[[], Sequence[bytes]]]
"""Sends a message of :mod:`..kv_transfer.pool_parts` to each of the first workers, and returns what waits for their
answers. Both raise ``ExecutorFailedError`` or ``ValueError`` if a worker fails."""


class RankParts(MemoryApart):
    """Holds the parts of a pool that workers on several machines keep, each of which serves its own."""

    def __init__(self, send: Send, parts: Sequence[RankPool], part_bytes: int, num_copies: int = 1) -> None:
        """``parts``: of all ranks, with their endpoints; ``num_copies``: as for :class:`RankPools`."""
        self._send = send
        self._world_size = len(parts)
        self._count = len(parts) // num_copies
        own = parts[: self._count]
        self._layout = merged_layout([part.layout for part in own])
        self._firsts = list(itertools.accumulate((len(part.regions) for part in own), initial=0))
        self.nbytes = part_bytes * len(parts)
        served = PartsEndpoint([(part.endpoint, part.layout, len(part.regions)) for part in own])
        self.endpoints = {"socket": msgspec.msgpack.encode(served)}

    def read(self, target: KVTarget, block_ids: BlockIds, *, checksum: bool, tears: bool) -> list[int]:
        ids = [int(block_id) for block_id in block_ids]
        orders: list[PartMessage] = []
        for rank in range(self._world_size):  # those that have copies of a part read it too
            number = rank % self._count
            orders.append(PartRead(target, ids, self._layout, number, self._firsts[number], checksum, tears))
        answers = self._ask(orders)
        return _joined_sums([found for answer in answers for found in answer.sums]) if checksum else []

    def checksums(self, block_ids: Sequence[int]) -> list[int]:
        answers = self._ask([PartChecksums(list(block_ids))] * self._count)
        parts = [replace(answer.sums[0], numbers=[number]) for number, answer in enumerate(answers)]
        return _joined_sums(parts)

    def interrupt(self, target: KVTarget) -> None:
        self._tell(PartForget(endpoint=target.endpoint))

    def forget(self, owners: Sequence[str]) -> None:
        self._tell(PartForget(list(owners)))

    def close(self) -> None:
        self._tell(PartForget(every=True))

    def _ask(self, messages: Sequence[PartMessage]) -> list[PartAnswer]:
        try:
            found = self._send([msgspec.msgpack.encode(message) for message in messages])()
        except (ValueError, ExecutorFailedError) as error:
            raise KVTransferError("transport", f"a worker: {error}") from error
        answers = [msgspec.msgpack.decode(answer, type=PartAnswer) for answer in found]
        failures = [(rank, answer) for rank, answer in enumerate(answers) if answer.failure]
        if failures:
            # Any other reason than a lost connection stays, however often the blocks are asked for.
            rank, worst = min(failures, key=lambda each: each[1].failure == "transport")
            raise KVTransferError(worst.failure, f"worker {rank}: {worst.detail}")
        return answers

    def _tell(self, message: PartForget) -> None:
        with contextlib.suppress(ValueError, ExecutorFailedError):  # of workers that are lost nothing is open
            self._send([msgspec.msgpack.encode(message)] * self._world_size)


def parts_pool(send: Send, parts: Sequence[RankPool], nbytes: int, num_copies: int) -> KVPool:
    """Return the pool whose parts, of ``nbytes`` each, these ranks serve. Raises as :meth:`RankPools.merge`."""
    part_bytes = whole_pages(nbytes)
    pool = _merged_pool(RankParts(send, parts, part_bytes, num_copies), part_bytes, parts, num_copies)
    return dataclasses.replace(pool, copies=())  # whose ranks read for themselves


def _joined_sums(parts: Sequence[PartSums]) -> list[int]:
    """Return the CRC-32 of each block from those of its parts. Raises :class:`KVTransferError` (``checksum``) if two
    workers have read different bytes of one part."""
    by_number: dict[int, PartSums] = {}
    for part in parts:
        for number in part.numbers:
            if by_number.setdefault(number, part).sums != part.sums:
                raise KVTransferError("checksum", f"two workers have different bytes of part {number}")
    first, *others = (by_number[number] for number in range(len(by_number)))
    sums = list(first.sums)
    for part in others:
        columns = zip(sums, part.sums, part.nbytes, strict=True)
        sums = [crc_of_both(one, other, nbytes) for one, other, nbytes in columns]
    return sums


def crc_of_both(first: int, second: int, nbytes: int) -> int:
    """Return the CRC-32 of bytes with the checksum ``first``, followed by ``nbytes`` with the checksum ``second``."""
    for bit, shifted in enumerate(_shifted_bits(nbytes)):
        if first >> bit & 1:
            second ^= shifted
    return second


@functools.lru_cache(maxsize=64)
def _shifted_bits(nbytes: int) -> list[int]:
    """Return what each bit of a checksum becomes behind ``nbytes``: the map is linear, apart from a constant."""
    zeros = bytes(nbytes)
    constant = zlib.crc32(zeros)
    return [zlib.crc32(zeros, 1 << bit) ^ constant for bit in range(32)]


def merged_layout(layouts: Sequence[str]) -> str:
    """Return the layout of a pool whose parts have these layouts, in order of their ranks."""
    # Each names its place: engines exchange blocks by what layouts have in common (``data.kv_groups``).
    return "+".join(layouts)


def merged_info(models: Sequence[ModelInfo], output_rank: int, num_copies: int = 1) -> ModelInfo:
    """Return what the core needs of these workers' models, in order of their ranks, which have each block
    ``num_copies`` times.

    Every pool has the same number of blocks, so a block is counted with the size that it has in the rank with the most
    layers.
    """
    # The last stage may have no layer that keeps a state, and knows nothing of how the others compute theirs.
    stateful = next((model for model in models if model.state_bytes), models[output_rank])
    return replace(
        models[output_rank],
        numerics=stateful.numerics,
        state_chunk=stateful.state_chunk,
        kv_bytes_per_token=max(model.kv_bytes_per_token for model in models),
        state_bytes=max(model.state_bytes for model in models),
        kv_layout=merged_layout([model.kv_layout for model in models[: len(models) // num_copies]]),
        fall_backs=list(dict.fromkeys(each for model in models for each in model.fall_backs)),
    )


def rank_config(config: EngineConfig, rank: int, rendezvous: str, num_on_host: int) -> EngineConfig:
    """Return the configuration of the worker ``rank``, which finds the others at ``rendezvous``.

    Args:
        config: That of the engine.
        rank: In [0, world_size).
        rendezvous: As in ``ParallelConfig.rendezvous``.
        num_on_host: How many workers of the engine share its machine: each gets a part of its cores, and counts as a
            user of its memory.
    """
    cache, worker = config.cache, config.worker
    if num_on_host > 1:
        cache = replace(cache, engines_on_host=cache.engines_on_host * num_on_host)
        place = rank % num_on_host
        cpus = worker.cpus[place::num_on_host] if len(worker.cpus) >= num_on_host else worker.cpus
        cores = worker.num_threads or len(worker.cpus) or len(os.sched_getaffinity(0))
        worker = replace(worker, cpus=cpus, num_threads=max(1, cores // num_on_host))
    parallel = replace(config.parallel, rank=rank, rendezvous=rendezvous)
    return replace(config, cache=cache, worker=worker, parallel=parallel)


def most_in_flight(config: EngineConfig) -> int:
    """Return how many steps workers in processes of their own may have begun: one for each stage, and one more than the
    computing one where the next is scheduled meanwhile."""
    return max(config.parallel.pipeline_parallel_size, 2 if config.scheduler.async_scheduling else 1)


def joined_results(answers: Sequence[object | Exception]) -> list[object]:
    """Return the results by rank.

    Raises ``ValueError`` if every rank refuses the call, so that no rank has changed; ``WeightsDamagedError`` if the
    weights of a worker are damaged, ``WorkerLostError`` if one is lost, ``PeerLostError`` if one of another engine is;
    ``RanksDifferError`` if some ranks made the call and others did not; ``ExecutorFailedError`` otherwise.
    """
    errors = {rank: answer for rank, answer in enumerate(answers) if isinstance(answer, Exception)}
    if not errors:
        return list(answers)
    for kind in (WeightsDamagedError, WorkerLostError, PeerLostError):
        for error in errors.values():
            if isinstance(error, kind):
                raise error
    failures = [error for error in errors.values() if not isinstance(error, ValueError)]
    # When every rank refuses, nothing has changed anywhere, and the caller gets the refusal. When only some do,
    # the ranks differ, and the caller has to undo or to give the state up.
    if len(errors) == len(answers):
        raise (failures or list(errors.values()))[0]
    made = {rank: answer for rank, answer in enumerate(answers) if rank not in errors}
    reasons = "; ".join(_reason(rank, error) for rank, error in errors.items())
    text = f"{reasons}; done by {', '.join(f'worker {rank}' for rank in made)}"
    raise RanksDifferError(text, list(made.values()), is_refused=not failures)


def _reason(rank: int, error: Exception) -> str:
    is_named = isinstance(error, ExecutorFailedError) and str(error).startswith(f"worker {rank}: ")
    return str(error) if is_named else f"worker {rank}: {error}"
