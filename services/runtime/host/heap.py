"""Decides when the garbage collector walks the heap of a service: a full pass stops the event loop, and every stream,
for as long as the live requests are many."""

import asyncio
import gc
import logging
import sys
from collections.abc import Callable
from typing import Final, NoReturn

log = logging.getLogger(__name__)

CHEAP_BLOCKS: Final = 40_000
"""While no more blocks of memory are in use than this since the start (by 150 held requests of a gateway), a full pass
takes 5 to 10 ms."""
MAX_GROWTH_BLOCKS: Final = 2_000_000
"""A full pass runs at the latest when so many more blocks are in use than after the last one: some 200 MB."""
_PERIOD_SECONDS: Final = 1.0
_CHEAP_PERIODS: Final = 10
_YOUNG: Final = 700
_MIDDLE: Final = 10
_NEVER: Final = 2**31 - 1


class Heap:
    """Runs full passes of the garbage collector when they are cheap, or needed. Young objects are collected as usual.

    Requests end without cycles, so their memory does not wait for a pass: reference counts free it. A pass is for what
    libraries and rare errors leave behind.
    """

    def __init__(self, used_blocks: Callable[[], int] = sys.getallocatedblocks) -> None:
        """``used_blocks`` returns how many blocks of memory Python's objects use."""
        self._used_blocks = used_blocks
        self._blocks_at_start = self._blocks_after_pass = 0
        self._periods_since_pass = 0

    def freeze(self) -> None:
        """Exclude what exists now from all later passes, because most of it stays; and end Python's own full passes."""
        # Collected first: what is garbage now would be frozen with the rest, and would stay for the life of the
        # process.
        gc.collect()
        gc.freeze()
        # Python makes a full pass when old objects have grown by a quarter. In a gateway with 2,600 requests of 130
        # objects each, such a pass took up to 0.13 s of CPU, in which no stream got a token.
        gc.set_threshold(_YOUNG, _MIDDLE, _NEVER)
        self._blocks_at_start = self._blocks_after_pass = self._used_blocks()

    async def run(self) -> NoReturn:
        """Look after the heap until cancelled."""
        while True:
            await asyncio.sleep(_PERIOD_SECONDS)
            self.observe()

    def observe(self) -> None:
        """Run a full pass if it is due; called once a period."""
        self._periods_since_pass += 1
        blocks = self._used_blocks()
        if blocks - self._blocks_after_pass > MAX_GROWTH_BLOCKS:
            log.info("collecting garbage, because memory has grown by %d blocks", blocks - self._blocks_after_pass)
            self._collect()
        # The number of live blocks stands for the time of a pass, which grows with it: few blocks mean that no burst is
        # on.
        elif blocks - self._blocks_at_start <= CHEAP_BLOCKS and self._is_pass_useful():
            self._collect()

    def _is_pass_useful(self) -> bool:
        """Return whether objects have become old since the last pass, and that pass is long enough ago."""
        return self._periods_since_pass >= _CHEAP_PERIODS and gc.get_count()[2] > 0

    def _collect(self) -> None:
        gc.collect()
        self._periods_since_pass = 0
        self._blocks_after_pass = self._used_blocks()
