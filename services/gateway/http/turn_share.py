"""Spreads what many connections cause at once over turns of the event loop, so that no turn takes long."""

import asyncio
from collections import deque
from collections.abc import Callable
from functools import partial

REQUESTS_PER_TURN = 8
"""Reads of connections that are parsed in one turn: each may begin a request, which takes about 0.3 ms."""
ANSWERS_PER_TURN = 16
"""Answers that begin or end in one turn; each takes about 0.15 ms. A step of an engine may begin hundreds."""


class TurnShare:
    """Admits a limited number of pieces of work in each turn of the event loop. Further ones wait, in order.

    What waits is bounded by the connections of the gateway.
    """

    def __init__(self, pieces_per_turn: int) -> None:
        self._limit = pieces_per_turn
        self._num_taken = 0
        self._waiting: deque[Callable[[], object]] = deque()

    def take(self) -> bool:
        """Return whether a piece may be done now."""
        if self._num_taken >= self._limit:
            return False
        if not self._num_taken:
            asyncio.get_running_loop().call_soon(self._begin_turn)
        self._num_taken += 1
        return True

    def call(self, piece: Callable[[], object]) -> None:
        """Call ``piece`` in a later turn, because :meth:`take` has returned False."""
        self._waiting.append(piece)

    async def wait(self) -> None:
        """Return when a piece may be done."""
        if not self.take():
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self.call(partial(_wake, turn))
            await turn

    def _begin_turn(self) -> None:
        loop = asyncio.get_running_loop()
        self._num_taken = min(len(self._waiting), self._limit)
        if self._num_taken:
            loop.call_soon(self._begin_turn)
        for _ in range(self._num_taken):
            loop.call_soon(self._waiting.popleft())


def _wake(turn: "asyncio.Future[None]") -> None:
    if not turn.done():  # otherwise its request has ended
        turn.set_result(None)
