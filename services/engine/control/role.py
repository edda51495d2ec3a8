"""Holds the role of an engine: which legs of requests it takes."""

import asyncio
from collections.abc import Awaitable, Callable

from tokenloom.v1 import types_pb2

BY_NAME: dict[str, types_pb2.EngineRole] = {
    "both": types_pb2.ENGINE_ROLE_BOTH,
    "prefill": types_pb2.ENGINE_ROLE_PREFILL,
    "decode": types_pb2.ENGINE_ROLE_DECODE,
}
NAMES = {value: name for name, value in BY_NAME.items()}


class Role:
    """Publishes and changes the role. The coordinator places requests by it; an engine accepts any leg it receives."""

    def __init__(
        self,
        value: types_pb2.EngineRole,
        publish: Callable[[types_pb2.EngineRole], None],
        leases_ended: Callable[[], Awaitable[None]],
    ) -> None:
        """``publish`` reports a role to the mesh; ``leases_ended`` returns once no KV is held for other engines."""
        self._publish = publish
        self._leases_ended = leases_ended
        self._changing = asyncio.Lock()
        self._set(value)

    async def change(self, value: types_pb2.EngineRole) -> None:
        """Publish a new role at once. If it excludes prefill legs, return when their leases have ended; if cancelled
        before that, the engine returns to its former role."""
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
