"""Remembers after which beginnings of prompts engines keep the states of layers that have one. No I/O.

Of a prompt, such an engine has cached what lies before the last boundary that it shares with a kept state, however many
of the blocks behind it are in its KV cache too.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from tokenloom.request.prefix_schedule import LEADING_BLOCKS, num_named
from tokenloom.services.runtime.placement.engine_columns import IntColumn


class _Kept(NamedTuple):
    """Holds the named blocks after which an engine keeps a state, the latest last."""

    boundary: int
    most: int
    blocks: OrderedDict[int, None]


class StateBoundaries:
    """Names engines by their rows. Of each it remembers as many boundaries as it has slots, the latest ones."""

    def __init__(self) -> None:
        self._rows: dict[int, _Kept] = {}

    def __bool__(self) -> bool:
        return bool(self._rows)

    def open(self, row: int, num_slots: int, boundary: int) -> None:
        """Add an engine, or forget what was remembered of the one in its row. ``boundary``: tokens after whose
        multiples it keeps states; 0: it keeps none."""
        self._rows.pop(row, None)
        if num_slots and boundary:
            self._rows[row] = _Kept(boundary, num_slots, OrderedDict())

    def close(self, row: int) -> None:
        """Remove an engine."""
        self._rows.pop(row, None)

    def forget(self, row: int) -> None:
        """Forget all boundaries of an engine."""
        if row in self._rows:
            self._rows[row].blocks.clear()

    def picked(self, row: int, hashes: Sequence[int], prompt_tokens: int, block_size: int) -> None:
        """Remember the boundary at the end of a prompt that an engine will compute. ``hashes``: of its named blocks."""
        if (kept := self._rows.get(row)) is None or not block_size:
            return
        num_blocks = (prompt_tokens - 2) // kept.boundary * kept.boundary // block_size
        if (count := min(num_named(num_blocks), len(hashes))) > 0:
            self.store(row, [hashes[count - 1]])

    def store(self, row: int, blocks: Iterable[int]) -> None:
        """Remember named blocks after which an engine keeps states."""
        if (kept := self._rows.get(row)) is None:
            return
        for block in blocks:
            kept.blocks[block] = None
            kept.blocks.move_to_end(block)
            if len(kept.blocks) > kept.most:
                kept.blocks.popitem(last=False)

    def remove(self, row: int, blocks: Iterable[int]) -> None:
        """Forget named blocks after which an engine keeps no state any more."""
        if (kept := self._rows.get(row)) is not None:
            for block in blocks:
                kept.blocks.pop(block, None)

    def put_into(self, num_blocks: IntColumn, hashes: Sequence[int]) -> None:
        """Replace how many leading blocks of a prompt each engine has, by row, for those that keep states."""
        for row, kept in self._rows.items():
            shared = (count for count in range(len(hashes), 0, -1) if hashes[count - 1] in kept.blocks)
            num_blocks[row] = LEADING_BLOCKS[next(shared, 0)]
