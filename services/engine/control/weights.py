"""Replaces the weights of an engine that serves, and publishes their fingerprint."""

import asyncio
from pathlib import Path

from tokenloom.model_files import checkpoint, model_path
from tokenloom.request.errors import FailedPrecondition, InvalidArgument
from tokenloom.v1 import engine_pb2

from ..running_engine import RunningEngine


class Weights:
    """Loads the weights of another checkpoint into the core, one reload at a time."""

    def __init__(self, engine: RunningEngine) -> None:
        self._engine = engine
        self._changing = asyncio.Lock()

    async def reload(self, path: str) -> None:
        """Load the weights of the checkpoint ``path``. The engine must be paused, or have no live requests.
        The reload continues if the call is cancelled, so that the core and the mesh agree on the weights.

        Raises ``InvalidArgument`` if the path is no checkpoint that can be read, ``FailedPrecondition`` if requests are
        live or the checkpoint does not fit; then the weights stay as they are. If reading fails halfway, it raises
        ``FailedPrecondition`` too, and the engine sleeps until other weights are loaded and it is woken up. The engine
        fails if the mesh cannot learn of weights that were loaded, or if it is unknown which these are.
        """
        directory = Path(path)
        if not directory.is_absolute() or not model_path.is_checkpoint(directory):
            wanted = "path must be the absolute path of a checkpoint directory or a GGUF file on this host"
            raise InvalidArgument(wanted, "path")
        task = self._engine.host.spawn(self._try(directory), name="engine-weights")
        # An operator's client that goes away must not leave the core with new weights under the old fingerprint.
        if (error := await asyncio.shield(task)) is not None:
            raise error

    async def _try(self, directory: Path) -> Exception | None:
        """Reload, and return the error, which is the caller's. A task that raises would end the engine."""
        async with self._changing:
            try:
                await self._reload(directory)
            except Exception as error:  # reading files raises whatever the file system and the formats do
                return error
        return None

    async def _reload(self, directory: Path) -> None:
        ours = None
        if self._engine.pause.mode == engine_pb2.PAUSE_MODE_UNSPECIFIED:
            if self._engine.load.num_live:
                raise FailedPrecondition("requests are live; pause the engine first")
            ours = await self._engine.pause.begin(engine_pb2.PAUSE_MODE_WAIT)
        try:
            # Read before the load and compared after it: files that changed in between were served under the old
            # fingerprint, beside engines with the old weights.
            weights = await asyncio.to_thread(_fingerprint, directory)
            await self._engine.core.call("reload_weights", str(directory))
            await self._publish(directory, weights)
        finally:
            # A reload that failed halfway leaves the core asleep without weights; the engine then stays paused.
            if ours is not None and not await self._engine.core.call("is_sleeping"):
                await self._engine.pause.end(ours)

    async def _publish(self, directory: Path, weights: bytes) -> None:
        """Report the fingerprint that the checkpoint had before it was loaded, and must have still: the core may have
        loaded what its files became meanwhile."""
        try:
            if await asyncio.to_thread(_fingerprint, directory) != weights:
                raise FailedPrecondition("the checkpoint's files changed while they were loaded")
            await self._engine.publish_weights(weights)
        except Exception as error:
            self._engine.host.failed(error)  # the mesh would take it for an engine with the old weights
            raise


def _fingerprint(directory: Path) -> bytes:
    try:
        return checkpoint.weights_fingerprint(directory)
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError) as error:
        raise InvalidArgument(f"path: {error.filename} cannot be read: {error.strerror}", "path") from error
