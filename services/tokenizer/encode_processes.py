"""Encodes long texts in processes that are started when the first such text comes."""

import asyncio
import signal

import msgspec

from tokenloom.request import errors

from .encode_worker import EncodeJob, EncodeReply, EncodeSetup, pack
from .render_worker import OUT_OF_MEMORY
from .renderer import HelperProcess

_SECONDS = 120.0
"""As long as a call may take, on a busy machine, until its process is given up."""
_START_SECONDS = 60.0
_MODULE = "encode_worker"
_TOO_MUCH_MEMORY = (-signal.SIGABRT, OUT_OF_MEMORY)
_MAX_DEATHS = 3
_NO_START = "The process that encodes long texts does not start."


class EncodeProcesses:
    """Shares a few processes. The callers take turns before they call."""

    def __init__(self, setup: EncodeSetup, num_processes: int) -> None:
        self._setup = setup
        self._idle: asyncio.LifoQueue[HelperProcess | None] = asyncio.LifoQueue(num_processes)  # None: to be started
        for _ in range(num_processes):
            self._idle.put_nowait(None)

    async def run(self, job: EncodeJob) -> bytes:
        """Return the response of a call.

        Raises ``InvalidArgument`` for a text that the tokenizer refuses, ``ResourceExhausted`` for one that takes too
        much memory, ``Unavailable`` when no process starts, and ``Internal`` after the ends of several.
        """
        request = pack(job)
        for _ in range(_MAX_DEATHS):
            process = await self._idle.get()
            kept: HelperProcess | None = None
            data, status = b"", 0
            try:
                if process is None or process.reader.at_eof():
                    process = await self._successor(process)
                data = await process.talk(request, _SECONDS)
                kept = process
            except TimeoutError as error:
                raise errors.Unavailable("The machine is too busy to encode the text; retry.") from error
            except (asyncio.IncompleteReadError, ConnectionError):
                pass  # its status says why
            finally:
                # After any failure, cancellation included, it may be in the middle of a call, so it is given up.
                self._idle.put_nowait(kept)
                if process is not None and kept is None:
                    status = await process.kill()
            if kept is not None:
                return _response(data)
            if status in _TOO_MUCH_MEMORY:
                raise errors.ResourceExhausted("Encoding the text takes too much memory.", retry_after=None)
        raise errors.Internal(f"{_MAX_DEATHS} processes ended while they encoded the text")

    async def close(self) -> None:
        """End the processes. Call this when nothing is encoded any more."""
        while not self._idle.empty():
            if (process := self._idle.get_nowait()) is not None:
                await process.kill()

    async def _successor(self, ended: HelperProcess | None) -> HelperProcess:
        if ended is not None:
            await ended.kill()
        try:
            process = await HelperProcess.launch(_MODULE)
        except OSError as error:  # no process or descriptor is left
            raise errors.Unavailable(_NO_START) from error
        try:
            _response(await process.talk(pack(self._setup), _START_SECONDS))
        except (TimeoutError, asyncio.IncompleteReadError, ConnectionError, errors.InvalidArgument) as error:
            await process.kill()
            raise errors.Unavailable(_NO_START) from error
        except asyncio.CancelledError:
            await process.kill()
            raise
        return process


def _response(data: bytes) -> bytes:
    reply = msgspec.msgpack.decode(data, type=EncodeReply)
    if reply.refused:
        raise errors.InvalidArgument(reply.refused, reply.field or None)
    return reply.response
