"""Groups the rows of a step by the slots of their adapters."""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..kernels.library import LoraRows
from ..kernels.threads import kernel_threads


class AdaptedRows:
    """Holds the rows of a step that have an adapter, those of an adapter next to each other."""

    def __init__(self, slots: npt.NDArray[np.int32], num_slots: int) -> None:
        """``slots`` [T]: the slot of each row's adapter, below ``num_slots``; -1: it has none. At least
        one row has one."""
        # The kernel takes pointers to matrices from the slot's entry: one behind the last would be any memory.
        assert slots.max() < num_slots, f"a row names slot {slots.max()} of {num_slots}, which is not there"
        order = np.argsort(slots, kind="stable").astype(np.int32)
        first = int(np.count_nonzero(slots < 0))
        self._rows = order[first:]
        self._slots, starts = np.unique(slots[self._rows], return_index=True)
        self._starts = np.append(starts, len(self._rows)).astype(np.int32)

    def fill(self, struct: LoraRows) -> None:
        """Describe the rows to kernels, as long as this object lives."""
        struct.rows, struct.starts = self._rows.ctypes.data, self._starts.ctypes.data
        struct.slots, struct.num_groups = self._slots.ctypes.data, len(self._slots)
        struct.num_threads = kernel_threads()

    def groups(self, device: torch.device) -> Iterator[tuple[int, Tensor]]:
        """Yield each slot with the indices of its rows, int64 on ``device``."""
        for index, slot in enumerate(self._slots.tolist()):
            rows = self._rows[self._starts[index] : self._starts[index + 1]]
            yield slot, torch.from_numpy(rows.astype(np.int64)).to(device)
