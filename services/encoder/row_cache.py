"""Keeps rows that were computed, and lets calls for the same ones share a computation."""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, NoReturn

from tokenloom.services.runtime.tasks import Tasks

from .row_maker import Rows


@dataclass(slots=True)
class _Flight:
    """A computation. ``num_waiting``: calls that wait for it."""

    task: "asyncio.Task[Rows | Exception]"
    num_waiting: int = 0


class RowCache:
    """Keeps the rows that were used last, by key, up to a number of bytes.

    Attributes:
        num_bytes: Of the rows that it holds.
        num_computed, num_found, num_joined: Calls that began a computation, that found rows, and that waited for the
            computation of another call.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._rows: OrderedDict[bytes, Rows] = OrderedDict()  # used last: last
        self._flights: dict[bytes, _Flight] = {}
        self._tasks = Tasks(_never)
        self.num_bytes = self.num_computed = self.num_found = self.num_joined = 0

    async def get(self, key: bytes, make: Callable[[], Coroutine[Any, Any, Rows]]) -> Rows:
        """Return the rows of a key; ``make`` computes them if they are not there. Raises what ``make`` raises.

        A computation ends when the last call that waits for it is cancelled.
        """
        if (rows := self._rows.get(key)) is not None:
            self._rows.move_to_end(key)
            self.num_found += 1
            return rows
        if (flight := self._flights.get(key)) is None:
            self.num_computed += 1
            flight = self._flights[key] = _Flight(self._tasks.spawn(_outcome(make), name="rows"))
        else:
            self.num_joined += 1
        flight.num_waiting += 1
        try:
            outcome = await asyncio.shield(flight.task)
        finally:
            flight.num_waiting -= 1
            # A call after the last one that waited begins anew, and does not join what is being cancelled.
            if not flight.num_waiting and self._flights.get(key) is flight:
                del self._flights[key]
                flight.task.cancel()
        if isinstance(outcome, Exception):
            raise outcome
        self._keep(key, outcome)
        return outcome

    def clear(self) -> None:
        """Forget all rows."""
        self._rows.clear()
        self.num_bytes = 0

    async def close(self) -> None:
        """Cancel the computations."""
        await self._tasks.close()

    def _keep(self, key: bytes, rows: Rows) -> None:
        if key in self._rows or len(rows.data) > self._max_bytes:
            return
        self._rows[key] = rows
        self.num_bytes += len(rows.data)
        while self.num_bytes > self._max_bytes:
            _, dropped = self._rows.popitem(last=False)
            self.num_bytes -= len(dropped.data)


async def _outcome(make: Callable[[], Coroutine[Any, Any, Rows]]) -> Rows | Exception:
    """Return what a computation raises: of any kind, and for each call that waits."""
    try:
        return await make()
    except Exception as error:
        return error


def _never(error: BaseException) -> NoReturn:
    raise AssertionError("a computation returns its error") from error
