"""The front's line to the core's KV thread: calls and their answers, and what the thread asks by itself."""

import asyncio
import contextlib
import itertools
from collections.abc import Callable
from typing import Protocol

from tokenloom.engine_core.errors import EngineDeadError
from tokenloom.engine_core.kv_transfer.kv_messages import (
    KVAcquire,
    KVAnswer,
    KVCall,
    KVEvent,
    KVProgress,
    KVRelease,
    KVRemoteProgress,
    KVRenew,
    KVVerdict,
    KVVerify,
)
from tokenloom.request.errors import Unavailable


class KVChannel(Protocol):
    """The part of a core's client that leads to its KV thread."""

    async def kv_send(self, call: KVCall) -> None:
        """Raises ``EngineDeadError``."""

    async def kv_receive(self) -> KVEvent:
        """Waits for the next one. Raises ``EngineDeadError``."""


class KVLink:
    """Demultiplexes the channel; :meth:`run` must run for anything to be answered."""

    def __init__(self, channel: KVChannel) -> None:
        self._channel = channel
        self._ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[KVAnswer]] = {}  # as many as there are callers that wait
        self._dead = False

    async def run(self, on_verify: Callable[[KVVerify], None]) -> None:
        """Hands out answers, and each ``KVVerify`` to ``on_verify``, until the core is dead."""
        try:
            while True:
                match await self._channel.kv_receive():
                    case KVAnswer() as answer:
                        if (future := self._waiting.get(answer.call_id)) is not None and not future.done():
                            future.set_result(answer)
                    case KVVerify() as verify:
                        on_verify(verify)
        except EngineDeadError:
            pass  # the front learns it where outputs end
        finally:
            self._dead = True
            for future in self._waiting.values():
                if not future.done():
                    future.set_exception(Unavailable("the engine failed"))

    async def acquire(
        self, lease_id: bytes, *, kv_layout: str, prompt_digest: bytes, transports: list[str]
    ) -> KVAnswer:
        """Takes up a lease held here."""
        return await self._call(lambda number: KVAcquire(number, lease_id, kv_layout, prompt_digest, transports))

    async def progress(self, acquisition_id: bytes, tokens_seen: int) -> KVAnswer:
        """Returns once more than ``tokens_seen`` tokens are ready, or the lease ended."""
        return await self._call(lambda number: KVProgress(number, acquisition_id, tokens_seen))

    async def renew(self, acquisition_id: bytes) -> KVAnswer:
        """Keeps a lease alive."""
        return await self._call(lambda number: KVRenew(number, acquisition_id))

    async def release(self, acquisition_id: bytes, generations: list[int]) -> KVAnswer:
        """Compares generations and ends a lease."""
        return await self._call(lambda number: KVRelease(number, acquisition_id, generations))

    async def tell(self, message: KVRemoteProgress | KVVerdict) -> None:
        """About a load of this engine's own; to a dead core it is lost, like the load."""
        with contextlib.suppress(EngineDeadError):
            await self._channel.kv_send(message)

    async def _call(self, make: Callable[[int], KVCall]) -> KVAnswer:
        """Raises ``Unavailable`` when the core is dead."""
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
