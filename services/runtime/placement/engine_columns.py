"""Keeps the numbers of many engines as arrays, so that ranking a thousand engines takes a few array operations."""

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

IntColumn: TypeAlias = NDArray[np.int64]
FloatColumn: TypeAlias = NDArray[np.float64]
BoolColumn: TypeAlias = NDArray[np.bool_]
Rows: TypeAlias = NDArray[np.intp]
"""Numbers of rows, shape [n]: some of the engines, growing."""

_FIRST_ROWS = 16
_BEFORE_ALL_PICKS = 1 << 62


class EngineColumns:
    """Holds one row for each engine. All arrays have shape [capacity]; a row that no engine has is not serving.

    The arrays are replaced when they grow: read them from here for each use.

    Attributes:
        waiting: Requests that wait, counted picks included.
        running: Requests in the batch.
        waiting_tokens: Prompt tokens of waiting requests that are not computed yet, counted picks included.
        free_tokens: Tokens that the free KV blocks hold once all waiting prompts are computed; may be negative.
        max_tokens: Tokens of one request that the KV cache holds at most, were it empty.
        block_size: Tokens of a KV block.
        seats: Requests that may run at the same time; 0: not known.
        prefill_rate: Prompt tokens per second that leave the queue; 0: not known.
        computed_rate: Prompt tokens per second that steps compute, cached ones left out; 0: not known.
        uncached_tokens: Prompt tokens that are to be computed for the requests there, as far as is known.
        session_share: How many of its KV caches the sessions need whose next turns are expected there.
        step_seconds: Mean duration of a step; 0: not known.
        start_rate: Requests per second that leave the queue while requests wait for a seat; 0: not known.
        last_turn: Number of the last pick that chose the engine; below 0: none did. Of equal engines the one with the
            least is chosen, so :meth:`add` gives each new one a number of its own.
        role: An ``EngineRole``.
        kind: Number of its fingerprint, see :class:`.FingerprintKinds`.
        store: Number of the store of KV blocks that it shares, see :meth:`share`; 0: it shares none.
        name_hash: Of name and incarnation, see :func:`.prefix_homes.name_hash`.
        reported_at: When it last reported, in seconds of the owner's clock.
        progressed_at: When its step number last grew, or it had no work.
        is_late: Whether the last report is older than it should be; changed by :meth:`set_late`.
        is_serving: Whether it accepts requests.
    """

    def __init__(self) -> None:
        self._free: list[int] = []
        self.num_rows = 0
        """Rows below this number have been used."""
        self.num_late = 0
        """Engines that are late."""
        self.num_reports = 0
        """How often an engine's load was written here."""
        self._num_added = 0
        self._stores: dict[bytes, int] = {}
        self.waiting: IntColumn = np.zeros(_FIRST_ROWS, np.int64)
        self.running: IntColumn = np.zeros(_FIRST_ROWS, np.int64)
        self.waiting_tokens: IntColumn = np.zeros(_FIRST_ROWS, np.int64)
        self.free_tokens: IntColumn = np.zeros(_FIRST_ROWS, np.int64)
        self.max_tokens: IntColumn = np.zeros(_FIRST_ROWS, np.int64)
        self.block_size: IntColumn = np.zeros(_FIRST_ROWS, np.int64)
        self.seats: IntColumn = np.zeros(_FIRST_ROWS, np.int64)
        self.prefill_rate: FloatColumn = np.zeros(_FIRST_ROWS, np.float64)
        self.computed_rate: FloatColumn = np.zeros(_FIRST_ROWS, np.float64)
        self.uncached_tokens: FloatColumn = np.zeros(_FIRST_ROWS, np.float64)
        self.session_share: FloatColumn = np.zeros(_FIRST_ROWS, np.float64)
        self.step_seconds: FloatColumn = np.zeros(_FIRST_ROWS, np.float64)
        self.start_rate: FloatColumn = np.zeros(_FIRST_ROWS, np.float64)
        self.last_turn: IntColumn = np.zeros(_FIRST_ROWS, np.int64)
        self.role: NDArray[np.int8] = np.zeros(_FIRST_ROWS, np.int8)
        self.kind: IntColumn = np.zeros(_FIRST_ROWS, np.int64)
        self.store: IntColumn = np.zeros(_FIRST_ROWS, np.int64)
        self.name_hash: NDArray[np.uint64] = np.zeros(_FIRST_ROWS, np.uint64)
        self.reported_at: FloatColumn = np.zeros(_FIRST_ROWS, np.float64)
        self.progressed_at: FloatColumn = np.zeros(_FIRST_ROWS, np.float64)
        self.is_late: BoolColumn = np.zeros(_FIRST_ROWS, np.bool_)
        self.is_serving: BoolColumn = np.zeros(_FIRST_ROWS, np.bool_)

    @property
    def capacity(self) -> int:
        return len(self.waiting)

    def add(self) -> int:
        """Return the number of a row of zeros, for one more engine, except that no pick has chosen it."""
        if self._free:
            row = self._free.pop()
        else:
            if self.num_rows == self.capacity:
                for name, column in self._columns().items():
                    setattr(self, name, np.concatenate([column, np.zeros_like(column)]))
            row, self.num_rows = self.num_rows, self.num_rows + 1
        self.begin_turns(row)
        return row

    def begin_turns(self, row: int) -> None:
        """Note that no pick has chosen the engine; it comes after others of which that is true."""
        self._num_added += 1
        self.last_turn[row] = self._num_added - _BEFORE_ALL_PICKS

    @property
    def has_stores(self) -> bool:
        """Whether an engine has shared a store of KV blocks."""
        return bool(self._stores)

    def share(self, row: int, store: bytes) -> None:
        """Note which store of KV blocks an engine shares; empty: none."""
        self.store[row] = 0
        if store and store not in self._stores:
            used = set(self.store.tolist())
            self._stores = {known: number for known, number in self._stores.items() if number in used}
            self._stores[store] = next(number for number in range(1, len(used) + 2) if number not in used)
        if store:
            self.store[row] = self._stores[store]

    def share_store(self, row: int, others: Sequence[int]) -> bool:
        """Return whether an engine can load from a store what one of the others has."""
        return any(self.store[row] == self.store[other] != 0 for other in others)

    def set_late(self, row: int, is_late: bool) -> None:
        """Note whether an engine is late with its report."""
        self.num_late += is_late - int(self.is_late[row])
        self.is_late[row] = is_late

    def remove(self, row: int) -> None:
        """Clear the row of an engine that is gone; another engine may get its number."""
        self.set_late(row, False)
        for column in self._columns().values():
            column[row] = 0
        self._free.append(row)

    def serving(self, is_of_pool: BoolColumn) -> Rows:
        """Return the engines that serve and whose kind ``is_of_pool`` (shape [kinds])."""
        return np.flatnonzero(self.is_serving[: self.num_rows] & is_of_pool[self.kind[: self.num_rows]])

    def _columns(self) -> dict[str, NDArray[np.generic]]:
        return {name: value for name, value in vars(self).items() if isinstance(value, np.ndarray)}
