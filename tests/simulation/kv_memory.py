"""A KV transport within the process of the simulation: a reader copies out of its owner's pool while both can talk."""

from tokenloom.engine_core.kv_transfer.kv_transport import BlockIds, KVPool, KVTransferError, checked_pairs, copy_blocks

from .network import Network
from .virtual_loop import Process


class Pools:
    """Knows the pools of all processes by their endpoint."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self.served: dict[bytes, tuple[Process, KVPool]] = {}


class MemoryTransport:
    """Implements ``KVTransport`` for one engine."""

    name = "shm"
    serves_on_demand = False
    guards_bytes = True

    def __init__(self, pools: Pools, process: Process) -> None:
        self._pools = pools
        self._process = process

    def serve(self, pool: KVPool) -> bytes | None:
        endpoint = f"{self._process.name} {len(self._pools.served)}".encode()
        self._pools.served[endpoint] = self._process, pool
        return endpoint

    def attend(self, seconds: float) -> None:
        """Do nothing: the reader copies on its own."""

    def open(self, endpoint: bytes, layout: str) -> "MemoryReader":
        if endpoint not in self._pools.served:
            raise KVTransferError("transport", "there is no such pool")
        owner, pool = self._pools.served[endpoint]
        if pool.layout != layout:
            raise KVTransferError("layout", "the layouts differ")
        return MemoryReader(self._pools.network, self._process, owner, pool)

    def close(self) -> None:
        """Do nothing: the pool is not served any more once its process has ended."""


class MemoryReader:
    """Implements ``KVReader``."""

    def __init__(self, network: Network, reader: Process, owner: Process, pool: KVPool) -> None:
        self._network = network
        self._reader = reader
        self._owner = owner
        self._pool = pool

    def read(self, source_block_ids: BlockIds, target_block_ids: BlockIds, pool: KVPool) -> None:
        owner, reader = self._owner.name, self._reader.name
        if self._owner.is_dead or self._network.is_cut(owner, reader) or self._network.is_cut(reader, owner):
            raise KVTransferError("transport", "the owner cannot be reached")
        theirs = self._pool
        for pairs in checked_pairs(source_block_ids, theirs.num_blocks, target_block_ids, pool, theirs.num_slots):
            there, here = theirs.planes_of(is_state=pairs.is_state), pool.planes_of(is_state=pairs.is_state)
            copy_blocks(there, pairs.source, here, pairs.target)

    def close(self) -> None:
        """Do nothing: there is nothing to close."""
