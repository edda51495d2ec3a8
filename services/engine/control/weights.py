"""The engine's weights while it serves: taken from another checkpoint, and made known by their fingerprint."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

from tokenloom import checkpoint
from tokenloom.engine_core.client.async_core_client import AsyncClient
from tokenloom.request.errors import FailedPrecondition, InvalidArgument, TokenloomError
from tokenloom.v1 import engine_pb2

from ..core.core_utility import call_core
from ..load import LoadTracker
from .pause import Pause


class Weights:
    """Replaces the core's weights and tells the mesh."""

    def __init__(
        self,
        client: AsyncClient,
        pause: Pause,
        load: LoadTracker,
        tell: Callable[[bytes], Awaitable[None]],
        spawn: Callable[[Coroutine[Any, Any, TokenloomError | None]], "asyncio.Task[TokenloomError | None]"],
    ) -> None:
        """``tell`` makes a new fingerprint of weights known; ``spawn`` starts a task that lives with the service."""
        self._spawn = spawn
        self._client = client
        self._pause = pause
        self._load = load
        self._tell = tell
        self._changing = asyncio.Lock()

    async def reload(self, path: str) -> None:
        """Takes the weights of the checkpoint directory ``path``, paused or with nobody live. Goes on when cancelled:
        the core and the mesh must not believe different things.

        Raises ``InvalidArgument`` for a path that is no checkpoint, ``FailedPrecondition`` when requests are live, or
        when the checkpoint does not fit: then everything is as before.
        """
        directory = Path(path)
        if not directory.is_absolute() or not (directory / "config.json").is_file():
            raise InvalidArgument("path must be the absolute path of a checkpoint directory on this host", "path")
        if (error := await asyncio.shield(self._spawn(self._try(directory)))) is not None:
            raise error

    async def _try(self, directory: Path) -> TokenloomError | None:
        try:
            async with self._changing:
                await self._reload(directory)
        except TokenloomError as error:
            return error
        return None

    async def _reload(self, directory: Path) -> None:
        is_ours = self._pause.mode == engine_pb2.PAUSE_MODE_UNSPECIFIED
        if is_ours:
            if self._load.num_live:
                raise FailedPrecondition("requests are live: pause the engine first")
            await self._pause.begin(engine_pb2.PAUSE_MODE_WAIT)
        try:
            weights = await asyncio.to_thread(checkpoint.weights_fingerprint, directory)
            await call_core(self._client, "reload_weights", str(directory))
            await self._tell(weights)
        finally:
            if is_ours:
                await self._pause.end()
