"""Replaces the weights of an engine by those of another checkpoint, or of a stream of tensors, and publishes their
fingerprint."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

from tokenloom.model_files import checkpoint, model_path
from tokenloom.model_files.staged_weights import IncomingWeights
from tokenloom.request.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    ResourceExhausted,
)
from tokenloom.services.runtime.tasks import completed
from tokenloom.v1 import engine_pb2

from .control.pause import MODES
from .running_engine import RunningEngine

STAGE_SECONDS = 60.0
"""How long a stream of weights may bring nothing, before another one may come."""
DRAIN_SECONDS = 20.0
"""How long the rest of a wrong stream is read, so that its sender learns what is wrong."""


class Weights:
    """Loads the weights of another checkpoint into the core, one reload at a time."""

    def __init__(self, engine: RunningEngine) -> None:
        self._engine = engine
        self._changing = asyncio.Lock()
        self._staging = asyncio.Lock()

    async def reload(self, path: str, mode: engine_pb2.PauseMode = engine_pb2.PAUSE_MODE_UNSPECIFIED) -> None:
        """Load the weights of the checkpoint ``path``. Without a ``mode``, as of :class:`.Pause`, the engine must be
        paused, or have no live requests. The reload continues if the call is cancelled, so that the core and the mesh
        agree on the weights.

        Raises ``InvalidArgument`` if the path is no checkpoint that can be read, ``FailedPrecondition`` if requests are
        live or the checkpoint does not fit; then the weights stay as they are. If reading fails halfway, it raises
        ``FailedPrecondition`` too, and the engine sleeps until other weights are loaded and it is woken up. The engine
        fails if the mesh cannot learn of weights that were loaded, or if it is unknown which these are.
        """
        directory = _directory(path)
        if mode and mode not in MODES:
            raise InvalidArgument("mode must be ABORT, WAIT or KEEP", "mode")
        task = self._engine.host.spawn(self._try(directory, mode), name="engine-weights")
        # An operator's client that goes away must not leave the core with new weights under the old fingerprint.
        if (error := await asyncio.shield(task)) is not None:
            raise error

    async def check(self, path: str) -> None:
        """Check that :meth:`reload` could load a checkpoint, without loading it. Raises as that."""
        directory = _directory(path)
        await asyncio.to_thread(_fingerprint, directory)
        await self._engine.core.call("check_weights", str(directory))

    async def stage(self, requests: AsyncIterator[engine_pb2.StageWeightsRequest]) -> tuple[Path, bytes]:
        """Keep the weights of a stream, and return their checkpoint and fingerprint. engine.proto lists the errors."""
        if (staged := self._engine.staged) is None:
            raise FailedPrecondition("the engine keeps no weights of others; start it with --staged-weights-dir")
        if self._staging.locked():
            raise ResourceExhausted("another stream brings weights; send these when it has ended")
        async with self._staging:
            begun = asyncio.ensure_future(asyncio.to_thread(staged.begin))
            try:
                incoming = await asyncio.shield(begun)
                await _take_all(requests, incoming)
                return await completed(asyncio.to_thread(incoming.finish))
            finally:
                await completed(_discard(begun))

    async def are(self, path: str) -> bool:
        """Return whether the engine is awake with the weights of the checkpoint ``path``, as its files are now."""
        if await self._engine.core.call("is_sleeping"):
            return False  # it may have dropped them
        directory = _directory(path)
        return await asyncio.to_thread(_fingerprint, directory) == self._engine.identity.fingerprint.weights

    async def _try(self, directory: Path, mode: engine_pb2.PauseMode) -> Exception | None:
        """Reload, and return the error for the caller to raise: a task that raises would end the engine."""
        async with self._changing:
            try:
                await self._reload(directory, mode)
            except Exception as error:  # reading files raises whatever the file system and the formats do
                return error
        return None

    async def _reload(self, directory: Path, mode: engine_pb2.PauseMode) -> None:
        ours = None
        if self._engine.pause.mode == engine_pb2.PAUSE_MODE_UNSPECIFIED:
            if self._engine.load.num_live and not mode:
                raise FailedPrecondition("requests are live; pause the engine first, or set a mode")
            ours = await self._engine.pause.begin(mode or engine_pb2.PAUSE_MODE_WAIT)
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
            if self._engine.staged is not None:
                await asyncio.to_thread(self._engine.staged.use, directory)
            await self._engine.publish_weights(weights, str(directory))
        except Exception as error:
            self._engine.host.failed(error)  # the mesh would take it for an engine with the old weights
            raise


async def _take_all(requests: AsyncIterator[engine_pb2.StageWeightsRequest], incoming: IncomingWeights) -> None:
    """Pass a stream on. Raises what is wrong with it, and ``DeadlineExceeded`` if nothing comes for long."""
    is_first = True
    while True:
        try:
            async with asyncio.timeout(STAGE_SECONDS):
                request = await anext(requests, None)
        except TimeoutError:
            raise DeadlineExceeded(f"no weights came for {STAGE_SECONDS:g} s") from None
        if request is None:
            return
        if request.shared_memory:
            if not is_first or request.data:
                raise InvalidArgument("shared_memory stands alone in the first message", "shared_memory")
            await completed(asyncio.to_thread(incoming.copy_shared_memory, request.shared_memory))
        else:
            await completed(asyncio.to_thread(incoming.write, request.data))
        is_first = False


async def drain(requests: AsyncIterator[engine_pb2.StageWeightsRequest]) -> None:
    """Read what still comes of a stream whose error is known."""
    # gRPC's client in Python reports INTERNAL instead of the status when a write of its fails.
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(DRAIN_SECONDS):
            async for _ in requests:
                pass


async def _discard(begun: "asyncio.Future[IncomingWeights]") -> None:
    """Remove what is not complete, also of a stream that was cancelled before it had begun."""
    with contextlib.suppress(Exception):  # it was raised to the caller
        incoming = await begun
        await asyncio.to_thread(incoming.discard)


def _directory(path: str) -> Path:
    directory = Path(path)
    if not directory.is_absolute() or not model_path.is_checkpoint(directory):
        wanted = "path must be the absolute path of a checkpoint directory or a GGUF file on this host"
        raise InvalidArgument(wanted, "path")
    return directory


def _fingerprint(directory: Path) -> bytes:
    try:
        return checkpoint.weights_fingerprint(directory)
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError) as error:
        raise InvalidArgument(f"path: {error.filename} cannot be read: {error.strerror}", "path") from error
