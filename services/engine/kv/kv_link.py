"""Carries calls to the core's KV thread and its answers, and the requests that the thread makes on its own."""

import asyncio
import contextlib
import itertools
from collections.abc import Callable
from typing import Protocol

from tokenloom.engine_core.data.errors import EngineDeadError
from tokenloom.engine_core.data.kv_messages import (
    KVAnswer,
    KVCall,
    KVEvent,
    KVOwnersLeft,
    KVRemoteProgress,
    KVVerdict,
    KVVerify,
)
from tokenloom.request.errors import Unavailable


class KVChannel(Protocol):
    """Describes the part of a core's client that reaches its KV thread."""

    async def kv_send(self, call: KVCall) -> None:
        """Send a message to the KV thread. Raises ``EngineDeadError``."""

    async def kv_receive(self) -> KVEvent:
        """Wait for the next message and return it. Raises ``EngineDeadError``."""


class KVLink:
    """Matches answers to their calls. Calls are answered only while :meth:`run` runs."""

    def __init__(self, channel: KVChannel) -> None:
        self._channel = channel
        self._ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[KVAnswer]] = {}  # as many as there are callers that wait
        self._dead = False

    async def run(self, on_verify: Callable[[KVVerify], None]) -> None:
        """Resolve calls with their answers and pass each ``KVVerify`` to ``on_verify``, until the core has died."""
        try:
            while True:
                match await self._channel.kv_receive():
                    case KVAnswer() as answer:
                        if (future := self._waiting.get(answer.call_id)) is not None and not future.done():
                            future.set_result(answer)
                    case KVVerify() as verify:
                        on_verify(verify)
        except EngineDeadError:
            pass  # CoreLink.run raises the same error and ends the service
        finally:
            self._dead = True
            for future in self._waiting.values():
                if not future.done():
                    future.set_exception(Unavailable("the engine failed"))

    async def send(self, message: KVRemoteProgress | KVVerdict | KVOwnersLeft) -> None:
        """Send news about the loads of this engine. A dead core does not get it, but its loads ended with it."""
        with contextlib.suppress(EngineDeadError):
            await self._channel.kv_send(message)

    async def call(self, make: Callable[[int], KVCall]) -> KVAnswer:
        """Send the call that ``make`` returns for a call id. Raises ``Unavailable`` if the core is dead."""
        if self._dead:
            raise Unavailable("the engine failed")
        number = next(self._ids)
        future: asyncio.Future[KVAnswer] = asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        try:
            await self._channel.kv_send(make(number))
            return await future
        except EngineDeadError:
            raise Unavailable("the engine failed") from None
        finally:
            del self._waiting[number]
