"""Copies blocks and computes their checksums on threads of their own, next to the steps."""

import contextlib
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor

from ..data.kv_messages import KVTarget
from .block_loads import CopyTask
from .failpoints import Failpoints
from .kv_transport import KVPool, KVReader, KVTransferError, KVTransport

log = logging.getLogger(__name__)

NUM_THREADS = 2
"""Copies are limited by memory bandwidth, so more threads would not be faster."""

ReaderKey = tuple[str, str, bytes]
"""Owner, transport and endpoint."""


class KVCopier:
    """Copies into one pool. Tasks run on the threads of an executor, which also call the callbacks."""

    def __init__(
        self,
        pool: KVPool,
        transports: Iterable[KVTransport],
        executor: Executor,
        failpoints: Failpoints,
        *,
        checksum: bool,
    ) -> None:
        self._pool = pool
        self._transports = {transport.name: transport for transport in transports}
        self._executor = executor
        self._failpoints = failpoints
        self._checksum = checksum
        self._lock = threading.RLock()  # an executor may run its work at once
        self._readers: dict[ReaderKey, KVReader] = {}
        """At most a few for each engine in the registry: :meth:`forget_owners` follows it. A limit of their number
        instead kept pools of dead engines mapped below it, and closed readers in use above it."""
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
        self._forget(target)

    def close(self) -> None:
        """Close all readers; the executor may be shut down from now on. Idempotent."""
        with self._lock:
            self._closed = True
            readers, self._readers = list(self._readers.values()), {}
        for reader in readers:
            reader.close()

    def forget_owners(self, owners: Iterable[str]) -> None:
        """Close what was opened to these incarnations of engines, for which no new copy comes."""
        with self._lock:
            left = set(owners)
            # A copy of a load that was given up may still run, and open a reader only now: its thread closes that.
            self._left |= {owner for owner in left if self._copying[owner]}
            readers = [self._readers.pop(key) for key in list(self._readers) if key[0] in left]
        for reader in readers:
            reader.close()

    def _submit(self, work: Callable[[], None]) -> None:
        with self._lock:  # the thread that steps closes while the KV thread still runs
            if not self._closed:
                self._executor.submit(work)

    def _run(self, task: CopyTask, done: Callable[[list[int], KVTransferError | None], None]) -> None:
        try:
            with self._ending(task.target.owner):
                self._copy(task)
            done(self._pool.checksums(task.block_ids) if self._checksum else [], None)
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

    def _copy(self, task: CopyTask) -> None:
        if self._failpoints.fires("slow_copy"):
            time.sleep(0.05)
        if self._failpoints.fires("copy_fails"):
            raise KVTransferError("transport", "failpoint")
        try:
            self._reader(task.target).read(task.source_ids, task.block_ids, self._pool)
        except Exception as error:
            self._forget(task.target)
            # Another layout, prompt or lease stays wrong however often it is asked for; only a connection may be
            # mended.
            if not isinstance(error, KVTransferError) or error.reason != "transport" or not task.is_wanted:
                raise
            # Retry once over a new connection: the old one may have been closed while it was idle.
            self._reader(task.target).read(task.source_ids, task.block_ids, self._pool)
        if self._failpoints.fires("torn_copy"):
            self._pool.damage(task.block_ids[-1])

    def _reader(self, target: KVTarget) -> KVReader:
        key = _key_of(target)
        with self._lock:
            if (reader := self._readers.get(key)) is not None:
                return reader
        if (transport := self._transports.get(target.transport)) is None:
            raise KVTransferError("transport", f"this engine has no transport {target.transport!r}")
        # Not under the lock: connecting takes half a second with nixl, and interrupt() needs the lock to end a copy
        # that hangs.
        reader = transport.open(target.endpoint, self._pool.layout)
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
