"""Utility calls of a client in an event loop, and their answers."""

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Sequence

from ..control.utilities import UtilityCall
from ..wire.messages import EngineCoreOutputs
from ..wire.serialization import to_raw
from .core_client import utility_result


class PendingCalls:
    """Utility calls that wait for their answers."""

    def __init__(self) -> None:
        self._ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[object]] = {}  # as many as there are callers that wait

    async def make(self, method: str, args: Sequence[object], send: Callable[[UtilityCall], Awaitable[None]]) -> object:
        """Sends a call and waits for its answer."""
        call = UtilityCall(next(self._ids), method, [to_raw(arg) for arg in args])
        future = self._waiting[call.call_id] = asyncio.get_running_loop().create_future()
        try:
            await send(call)
            return await future
        finally:
            del self._waiting[call.call_id]

    def take(self, outputs: EngineCoreOutputs) -> bool:
        """Whether ``outputs`` was an answer; then whoever waits for it has it."""
        if (answer := outputs.utility_output) is None:
            return False
        future = self._waiting.get(answer.call_id)
        if future is not None and not future.done():
            try:
                future.set_result(utility_result(answer))
            except Exception as error:
                future.set_exception(error)
        return True

    def fail(self, error: Exception) -> None:
        for future in list(self._waiting.values()):
            if not future.done():
                future.set_exception(error)
