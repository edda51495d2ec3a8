"""Defines what transports need of a pool that lies in the memory of a device, which the host cannot address."""

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
BlockIds = npt.NDArray[np.integer[Any]]

Wait = Callable[[], None]
"""Waits until a copy that was begun has ended. Raises :class:`.kv_transport.KVTransferError` if the device failed."""


class PeerMemory(Protocol):
    """Holds the pool of another process, mapped into this process's device."""

    def copy(self, source_ids: BlockIds, target_ids: BlockIds) -> None:
        """Copy blocks of the other pool over blocks of this one, in all regions, with one launch; wait for its end.

        Raises :class:`.kv_transport.KVTransferError` (``transport``) if the device failed.
        """

    def close(self) -> None:
        """Release the mapping. No copy may run. Idempotent."""


class DeviceMemory(Protocol):
    """Holds a pool on a device. Its methods may be called by any thread.

    ``packed`` is memory of the host for blocks of some regions: [regions, n, block_bytes] bytes, contiguous.
    """

    @property
    def nbytes(self) -> int:
        """The size of the pool, in bytes."""

    def start_read(self, block_ids: BlockIds, regions: slice, packed: Bytes) -> Wait:
        """Begin to copy blocks [n] to the host, as they are after all steps that the device was given so far."""

    def start_write(self, block_ids: BlockIds, regions: slice, packed: Bytes) -> Wait:
        """Begin to copy blocks [n] from the host, after all steps that the device was given so far. ``packed`` must not
        change before the end."""

    def staging(self, nbytes: int) -> Bytes:
        """Return pinned memory of the host, [nbytes]: the device copies from and to it without the processor."""

    def pin(self, memory: Bytes) -> None:
        """Do the same for memory that exists, such as one that processes share, if the driver allows it."""

    def unpin(self, memory: Bytes) -> None:
        """End :meth:`pin`, before the memory is released."""

    def settle(self) -> None:
        """Wait for all steps that the device was given so far, because other processes read what they wrote."""

    def export(self) -> bytes:
        """Return a handle with which another process of this host maps the pool.

        Raises :class:`.kv_transport.KVTransferError` (``transport``) if this memory cannot be shared.
        """

    def map_peer(self, handle: bytes, num_blocks: int) -> PeerMemory:
        """Map the pool of another process, of so many blocks as large as this pool's, from what it exported.

        Raises :class:`.kv_transport.KVTransferError` (``transport``) if the device cannot reach it.
        """
