"""Which legs of requests this engine takes."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Literal

from tokenloom.v1 import types_pb2

RoleName = Literal["both", "prefill", "decode"]

BY_NAME: dict[str, types_pb2.EngineRole] = {
    "both": types_pb2.ENGINE_ROLE_BOTH,
    "prefill": types_pb2.ENGINE_ROLE_PREFILL,
    "decode": types_pb2.ENGINE_ROLE_DECODE,
}
NAMES = {value: name for name, value in BY_NAME.items()}


class Role:
    """Told to the coordinator, which places by it; an engine that was sent another leg all the same takes it."""

    def __init__(
        self,
        value: types_pb2.EngineRole,
        publish: Callable[[types_pb2.EngineRole], None],
        leases_ended: Callable[[], Awaitable[None]],
    ) -> None:
        """``publish`` makes a role known; ``leases_ended`` returns once nothing is held for others."""
        self._publish = publish
        self._leases_ended = leases_ended
        self._changing = asyncio.Lock()
        self._set(value)

    async def change(self, value: types_pb2.EngineRole) -> None:
        """Takes the new legs at once, and no more of the others. Without prefill legs, returns when their leases have
        ended; cancelled before that, the engine keeps its former role."""
        async with self._changing:
            former = self._value
            self._set(value)
            if value != types_pb2.ENGINE_ROLE_DECODE:
                return
            try:
                await self._leases_ended()
            except BaseException:
                self._set(former)
                raise

    def _set(self, value: types_pb2.EngineRole) -> None:
        self._value = value
        self._publish(value)
