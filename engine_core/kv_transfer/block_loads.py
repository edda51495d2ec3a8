"""Tracks loads: transfers of blocks from another engine's pool into this engine's pool.

A load copies the blocks that the owner has ready, asks for the owner's verdict when all are copied, and always ends as
one :class:`LoadResult`. Copied blocks are not used before the verdict.
"""

import enum
import time
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ..data.kv_groups import NULL_BLOCK
from ..data.kv_messages import KVEvent, KVTarget, KVVerdict, KVVerify
from .kv_transport import KVTransferError

_MAX_EARLY = 4096
"""Limit of requests that the front may mention before the scheduler does."""


@dataclass(frozen=True, slots=True)
class LoadOrder:
    """Describes the blocks that the scheduler wants to be loaded."""

    request_id: str
    target: KVTarget
    positions: Sequence[int]
    """[n] indices of the target's blocks to load, ascending; other blocks were found in this pool or are not needed."""
    block_ids: list[int]
    """[n] blocks of this pool to fill."""
    block_size: int
    is_complete: bool
    """Whether the prefill was complete on arrival; otherwise ``KVRemoteProgress`` reports its progress."""
    num_groups: int = 1
    """How many of the target's blocks hold the KV of one block of tokens."""

    @property
    def asks_for_absent(self) -> bool:
        """Return whether the owner does not keep a block that is to be loaded."""
        table = self.target.block_ids
        return self.num_groups > 1 and any(table[position] == NULL_BLOCK for position in self.positions)


@dataclass(frozen=True, slots=True)
class LoadResult:
    """Describes how a load ended. Nothing writes to its blocks any more."""

    request_id: str
    block_ids: list[int]
    transport: str
    failure: str | None
    """None if the blocks are valid, empty if they are not wanted any more, otherwise one of ``LEASE_ENDS``."""


@dataclass(slots=True)
class CopyTask:
    """Describes a batch of blocks for a copying thread."""

    request_id: str
    target: KVTarget
    source_ids: list[int]
    block_ids: list[int]
    is_wanted: bool = True
    """Set to false when the load has failed, so that the copy is not retried."""


class _State(enum.Enum):
    COPYING = enum.auto()
    VERIFYING = enum.auto()
    FAILED = enum.auto()
    """The load has failed, but the copying thread, which cannot be interrupted, may still write to the pool."""


@dataclass(slots=True)
class _Load:
    order: LoadOrder
    deadline: float
    num_ready: int = 0
    num_copied: int = 0
    copying: CopyTask | None = None
    state: _State = _State.COPYING
    failure: str = ""
    verify_sent: bool = False
    checksums: list[int] = field(default_factory=list)


class Loads:
    """Owns all loads of an engine. Only the KV thread uses it."""

    def __init__(
        self,
        *,
        copy: Callable[[CopyTask], None],
        interrupt: Callable[[KVTarget], None],
        send: Callable[[KVEvent], None],
        finish: Callable[[LoadResult], None],
        timeout_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            copy: Makes another thread copy a batch; :meth:`copied` must be called with the result.
            interrupt: Ends a copy that hangs.
            send: Sends a message to the front.
            finish: Receives the result of a load.
        """
        self._copy = copy
        self._interrupt = interrupt
        self._send = send
        self._finish = finish
        self._timeout = timeout_seconds
        self._clock = clock
        self._loads: dict[str, _Load] = {}
        self._early: OrderedDict[str, tuple[int, str]] = OrderedDict()  # tokens ready, failure

    def __len__(self) -> int:
        return len(self._loads)

    def start(self, order: LoadOrder) -> None:
        """Begin a load. Messages of the front that arrived for this request before still count."""
        # Progress and verdicts come over the front's socket, orders from the thread that steps: either may be first.
        load = self._loads[order.request_id] = _Load(order, self._clock() + self._timeout)
        tokens_ready, failure = self._early.pop(order.request_id, (0, ""))
        if failure:
            self._fail(load, failure)
        elif order.asks_for_absent:
            self._fail(load, "layout")
        else:
            self._set_ready(load, order.target.num_tokens if order.is_complete else tokens_ready)

    def give_up(self, request_id: str) -> None:
        """End the load of a request that does not want the blocks (any more), so that the front releases the lease."""
        self._early.pop(request_id, None)
        if (load := self._loads.get(request_id)) is not None:
            self._fail(load, "")
        else:
            self._send(KVVerify(request_id, copied=False))

    def progress(self, request_id: str, tokens_ready: int) -> None:
        """Note that the owner has ``tokens_ready`` tokens ready."""
        if (load := self._loads.get(request_id)) is not None:
            self._set_ready(load, tokens_ready)
        else:
            self._note_early(request_id, tokens_ready, "")

    def verdict(self, verdict: KVVerdict) -> None:
        """Process the owner's verdict. A negative one may come unasked, when the lease is lost."""
        load = self._loads.get(verdict.request_id)
        if load is None:
            if not verdict.valid:
                self._note_early(verdict.request_id, 0, verdict.reason or "transport")
        elif not verdict.valid:
            self._fail(load, verdict.reason or "transport")
        elif load.state is _State.VERIFYING:
            if not _agree(verdict.checksums, load):
                self._fail(load, "checksum")
            else:
                self._end(load, None)

    def copied(self, task: CopyTask, checksums: list[int], error: KVTransferError | None) -> None:
        """Process the result of a batch. ``checksums``: of its blocks, if checksums are compared."""
        load = self._loads[task.request_id]
        load.copying = None
        load.num_copied += len(task.block_ids)
        load.checksums += checksums
        if load.state is _State.FAILED:
            self._end(load, load.failure)
        elif error is not None:
            self._fail(load, error.reason)
        else:
            self._advance(load)

    def expire(self) -> float | None:
        """Fail loads that have timed out. Returns the seconds until the next timeout, None without a load."""
        now = self._clock()
        for load in list(self._loads.values()):
            if load.deadline <= now and load.state is not _State.FAILED:
                self._fail(load, "timeout")
        deadlines = [load.deadline for load in self._loads.values() if load.state is not _State.FAILED]
        return max(0.0, min(deadlines) - now) if deadlines else None

    def _set_ready(self, load: _Load, tokens_ready: int) -> None:
        order = load.order
        if tokens_ready >= order.target.num_tokens:
            num_ready = len(order.block_ids)
        else:
            # Whole blocks only: the owner still writes into the block of the last ready token.
            num_ready = bisect_left(order.positions, tokens_ready // order.block_size * order.num_groups)
        load.num_ready = max(load.num_ready, num_ready)
        if load.state is _State.COPYING:
            self._advance(load)

    def _advance(self, load: _Load) -> None:
        """Copy the blocks that are ready; ask for the verdict when all are copied."""
        order = load.order
        # Counted from the last progress: a long prompt of a slow owner may take longer than any one limit.
        load.deadline = self._clock() + self._timeout
        if load.copying is not None:
            return
        if load.num_copied == len(order.block_ids):
            # A copy races with the owner, which may have lost the lease and reused the blocks meanwhile. Only its
            # verdict after the copy says that every byte belonged to this prompt.
            load.state = _State.VERIFYING
            self._verify(load, copied=True)
        elif load.num_ready > load.num_copied:
            begin, end = load.num_copied, load.num_ready
            sources = [order.target.block_ids[position] for position in order.positions[begin:end]]
            load.copying = CopyTask(order.request_id, order.target, sources, order.block_ids[begin:end])
            self._copy(load.copying)

    def _fail(self, load: _Load, failure: str) -> None:
        if load.state is _State.FAILED:
            return
        load.state = _State.FAILED
        load.failure = failure
        # Before the load ends: the owner gets its blocks back although a copy may hang here for a while.
        self._verify(load, copied=False)
        if load.copying is None:
            self._end(load, failure)
            return
        load.copying.is_wanted = False
        if failure == "timeout":
            self._interrupt(load.order.target)

    def _verify(self, load: _Load, *, copied: bool) -> None:
        if not load.verify_sent:
            load.verify_sent = True
            self._send(KVVerify(load.order.request_id, copied, load.failure))

    def _end(self, load: _Load, failure: str | None) -> None:
        order = load.order
        del self._loads[order.request_id]
        self._finish(LoadResult(order.request_id, order.block_ids, order.target.transport, failure))

    def _note_early(self, request_id: str, tokens_ready: int, failure: str) -> None:
        earlier, why = self._early.pop(request_id, (0, ""))
        self._early[request_id] = (max(earlier, tokens_ready), why or failure)
        # A request that the front mentions and then aborts never starts a load, so nothing else would remove its entry.
        if len(self._early) > _MAX_EARLY:
            self._early.popitem(last=False)


def _agree(theirs: Sequence[int], load: _Load) -> bool:
    """Return whether the owner's checksums, if both sides have them, are those of the copied blocks. The owner must
    have one for each of the target's blocks."""
    if not theirs or not load.checksums:
        return True
    order = load.order
    return len(theirs) == len(order.target.block_ids) and [theirs[i] for i in order.positions] == load.checksums
