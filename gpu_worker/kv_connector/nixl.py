"""Moves blocks with nixl: over RDMA and other fabrics if present, otherwise host memory over UCX.

nixl is an optional extra. The agents' metadata says how to reach the owner's memory; the reader chooses what to read.

An agent has no progress thread, because that thread spins even if nothing moves. The reader makes progress while it
waits for its transfer. The owner makes progress while readers may read: connections, and transfers over fabrics that
cannot read memory on their own, need it. The agent is made by the first of them, so an engine whose peers all share
memory never has one.
"""

import contextlib
import functools
import importlib.util
import secrets
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from tokenloom.engine_core.kv_cache.pool_memory import PoolMemory
from tokenloom.engine_core.kv_transfer.kv_transport import (
    BlockIds,
    IntArray,
    KVPool,
    KVReader,
    KVRegion,
    KVTransferError,
    checked_pairs,
    regions_of,
)

from .socket_frames import decoded

_READ_SECONDS = 30.0
_POLL_SECONDS = 100e-6
"""The time between polls of a transfer, because nixl cannot wait. A block of 64 KiB takes 20 us."""
_ATTEND_SECONDS = 200e-6
"""The time between an owner's turns while readers may read: about a tenth of a core."""
_BACKENDS = ["UCX"]


class _Endpoint(msgspec.Struct, array_like=True):
    metadata: bytes
    """Metadata of the owner's agent."""
    address: int
    """Addresses of the pool's regions in the owner's process."""
    layout: str
    num_blocks: int
    regions: list[KVRegion]
    num_slots: int = 0


def is_available() -> bool:
    """Return whether nixl is installed."""
    return importlib.util.find_spec("nixl") is not None


class NixlTransport:
    """Fulfils :class:`tokenloom.engine_core.kv_transfer.kv_transport.KVTransport` with a nixl agent."""

    name = "nixl"
    serves_on_demand = True
    guards_bytes = False

    def __init__(self) -> None:
        """Raises ``ImportError`` if nixl is not installed or cannot be loaded."""
        from nixl._api import nixl_agent, nixl_agent_config  # an optional extra, slow to load

        # With the thread an idle engine pair used 0.7 to 2 cores, without it 0.03.
        config = nixl_agent_config(enable_prog_thread=False, backends=_BACKENDS)
        self._make_agent: Callable[[], Any] = functools.partial(nixl_agent, f"tokenloom-{secrets.token_hex(8)}", config)
        self._agent: Any = None
        self._lock = threading.RLock()  # held for every call of the agent
        self._registered: dict[int, Any] = {}
        """Maps the address of a memory to nixl's handle."""
        self._readers = weakref.WeakSet[NixlReader]()
        self._num_readers: Counter[str] = Counter()
        """By the owner's agent, which is dropped with its last reader."""
        self._attendant = _Attendant(self._progress)

    def serve(self, pool: KVPool) -> bytes | None:
        address = self.register(pool.host)
        with self._lock:
            metadata = self.agent().get_agent_metadata()
        regions = list(pool.regions)
        return msgspec.msgpack.encode(
            _Endpoint(metadata, address, pool.layout, pool.num_blocks, regions, pool.num_slots)
        )

    def attend(self, seconds: float) -> None:
        self._attendant.attend(seconds)

    def open(self, endpoint: bytes, layout: str) -> KVReader:
        try:
            owner = decoded(endpoint, _Endpoint)
        except msgspec.DecodeError as error:
            raise KVTransferError("transport", f"the owner's endpoint: {error}") from error
        if owner.layout != layout:
            raise KVTransferError("layout", f"the owner's blocks are {owner.layout}, this engine's {layout}")
        try:
            with self._lock:
                agent = self.agent()
                peer = agent.add_remote_agent(owner.metadata)
                self._num_readers[peer] += 1
        except Exception as error:  # nixl's own types, one for each status
            raise KVTransferError("transport", f"the owner's agent: {error}") from error
        reader = NixlReader(self, agent, self._lock, peer, owner)
        # With the last reference, which a transfer that runs holds too.
        weakref.finalize(reader, self._forget, peer).atexit = False
        self._readers.add(reader)
        return reader

    def _forget(self, peer: str) -> None:
        with self._lock:
            self._num_readers[peer] -= 1
            if not self._num_readers[peer]:
                del self._num_readers[peer]
                with contextlib.suppress(Exception):  # nixl's own types; the owner may be gone
                    self._agent.remove_remote_agent(peer)

    def close(self) -> None:
        for reader in list(self._readers):
            reader.close()
        self._attendant.close()
        with self._lock:
            for handle in self._registered.values():
                self._agent.deregister_memory(handle)
            self._registered.clear()

    def agent(self) -> Any:
        """Return the agent, which the first call makes; it takes about half a second."""
        with self._lock:
            if self._agent is None:
                self._agent = self._make_agent()
            return self._agent

    def register(self, memory: PoolMemory) -> int:
        """Register a memory with nixl and return its address in this process."""
        address = int(np.frombuffer(memory.buffer, dtype=np.uint8).ctypes.data)
        with self._lock:
            if address not in self._registered:
                agent = self.agent()
                whole = agent.get_reg_descs([(address, memory.nbytes, 0, "")], "DRAM")
                self._registered[address] = agent.register_memory(whole)
        return address

    def _progress(self) -> None:
        with self._lock:
            if self._agent is not None:
                self._agent.get_new_notifs()  # none are sent; looking for them is what makes progress


class _Attendant:
    """Calls a function often, on a thread of its own, while readers may read. The thread sleeps otherwise."""

    def __init__(self, progress: Callable[[], None]) -> None:
        self._progress = progress
        self._changed = threading.Condition()
        self._until = 0.0
        self._is_closed = False
        self._thread: threading.Thread | None = None

    def attend(self, seconds: float) -> None:
        """Call the function for the next ``seconds``, which replace an earlier number. Does nothing once closed."""
        with self._changed:
            self._until = time.monotonic() + seconds
            if self._thread is None and not self._is_closed:
                self._thread = threading.Thread(target=self._run, name="kv-nixl", daemon=True)
                self._thread.start()
            self._changed.notify()

    def close(self) -> None:
        """End the thread. Idempotent."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
            thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()

    def _run(self) -> None:
        while self._wait():
            self._progress()
            time.sleep(_ATTEND_SECONDS)

    def _wait(self) -> bool:
        """Wait until readers may read. Returns False when closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or time.monotonic() < self._until)
            return not self._is_closed


class NixlReader:
    """Reads from one owner's agent."""

    def __init__(
        self, transport: NixlTransport, agent: Any, lock: threading.RLock, peer: str, owner: _Endpoint
    ) -> None:
        self._transport = transport
        self._agent = agent
        self._lock = lock
        self._peer = peer
        self._owner = owner
        self._closed = False

    def read(self, source_block_ids: BlockIds, target_block_ids: BlockIds, pool: KVPool) -> None:
        owner = self._owner
        if [region.block_bytes for region in owner.regions] != pool.region_bytes:
            raise KVTransferError("layout", "the owner's regions are of other sizes than this pool's")
        found = checked_pairs(source_block_ids, owner.num_blocks, target_block_ids, pool, owner.num_slots)
        if not found:
            return
        address = self._transport.register(pool.host)
        pairs = [(regions_of(owner.regions, is_state=each.is_state), each) for each in found]
        theirs = np.concatenate([_descriptors(owner.address, regions, each.source) for regions, each in pairs])
        ours = np.concatenate(
            [_descriptors(address, pool.regions_of(is_state=each.is_state), each.target) for each in found]
        )
        try:
            self._transfer(ours, theirs)
        except KVTransferError:
            raise
        except Exception as error:  # nixl's own types, one for each status
            raise KVTransferError("transport", f"nixl: {error}") from error

    def close(self) -> None:
        self._closed = True

    def _transfer(self, ours: npt.NDArray[np.uint64], theirs: npt.NDArray[np.uint64]) -> None:
        agent, lock = self._agent, self._lock
        with lock:
            handle = agent.initialize_xfer(
                "READ", agent.get_xfer_descs(ours, "DRAM"), agent.get_xfer_descs(theirs, "DRAM"), self._peer
            )
        try:
            with lock:
                state = agent.transfer(handle)
            end = time.monotonic() + _READ_SECONDS
            while state == "PROC":
                if self._closed or time.monotonic() > end:
                    raise KVTransferError("transport", "closed" if self._closed else "nixl: no end in time")
                time.sleep(_POLL_SECONDS)
                with lock:
                    state = agent.check_xfer_state(handle)
            if state != "DONE":
                raise KVTransferError("transport", f"nixl: {state}")
        finally:
            with lock:
                agent.release_xfer_handle(handle)


def _descriptors(address: int, regions: Sequence[KVRegion], ids: IntArray) -> npt.NDArray[np.uint64]:
    """Return [regions * n, 3]: address, bytes and device of every piece."""
    offsets = np.array([region.offset for region in regions], dtype=np.uint64)[:, None]
    sizes = np.array([region.block_bytes for region in regions], dtype=np.uint64)[:, None]
    found = np.zeros((len(regions), len(ids), 3), dtype=np.uint64)
    found[:, :, 0] = np.uint64(address) + offsets + sizes * ids.astype(np.uint64)
    found[:, :, 1] = sizes
    return found.reshape(-1, 3)
