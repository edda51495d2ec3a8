"""Renders chat templates in processes that can be killed, so that no template blocks or brings down the service."""

import asyncio
import json
import socket
import subprocess
import sys
from collections.abc import Sequence
from typing import Self

from tokenloom.request import errors

from .output_format import PARSED_MARKS
from .render_worker import LENGTH, RenderJob, RenderReply, RenderSetup, pack
from .spelled_tokens import Rendered

MAX_WAITING = 256
"""Conversations that wait for a worker; more are refused with an error that invites a retry."""
_MEMORY_BYTES = 1 << 30
_START_SECONDS = 20.0


class RenderProcess:
    """Runs one worker: a child process that answers one message with one message."""

    def __init__(
        self, process: "subprocess.Popen[bytes]", reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer

    @classmethod
    async def start(cls, setup: RenderSetup) -> Self:
        """Start a worker. Raises ``Unavailable`` when it does not start, ``InvalidArgument`` for a wrong template."""
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                process = await asyncio.to_thread(_spawn, theirs)
        except BaseException:
            ours.close()
            raise
        worker = cls(process, *await asyncio.open_unix_connection(sock=ours))
        try:
            reply = await worker.exchange(pack(setup), _START_SECONDS)
        except (TimeoutError, asyncio.IncompleteReadError, ConnectionError) as error:
            await worker.kill()
            raise errors.Unavailable("The process that renders chat templates does not start.") from error
        except asyncio.CancelledError:
            await worker.kill()
            raise
        if "refused" in reply:
            await worker.kill()
            raise errors.InvalidArgument(reply["refused"], "model")
        return worker

    async def exchange(self, request: bytes, seconds: float) -> RenderReply:
        """Send a packed message and return the answer. When this is cut short, :meth:`kill` the process.

        Raises ``TimeoutError`` after ``seconds``, ``IncompleteReadError`` or ``ConnectionError`` if the process ended.
        """
        async with asyncio.timeout(seconds):
            self._writer.write(request)
            await self._writer.drain()
            (length,) = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))
            reply: RenderReply = json.loads(await self._reader.readexactly(length))
            return reply

    async def kill(self) -> None:
        """End the process at once."""
        self._process.kill()
        self._writer.close()
        await asyncio.to_thread(self._process.wait)


class Renderer:
    """Shares a few workers; one that runs out of time or memory is killed, and replaced when it is next needed."""

    def __init__(
        self,
        source: str,
        special_tokens: dict[str, str],
        *,
        control_tokens: Sequence[str] = (),
        num_workers: int,
        seconds: float,
    ) -> None:
        """``special_tokens``: by the name that the template uses. ``control_tokens``: those that texts of clients do
        not write. ``seconds``: limit of each rendering."""
        self._setup = RenderSetup(
            source=source,
            special_tokens=special_tokens,
            control_tokens=list(control_tokens),
            parsed_marks=list(PARSED_MARKS),
            memory_bytes=_MEMORY_BYTES,
            seconds=2 * seconds,  # applies only if this process ended and cannot kill it
        )
        self._seconds = seconds
        self._waiting = 0
        self._idle: asyncio.Queue[RenderProcess | None] = asyncio.Queue(num_workers)  # None: to be started
        for _ in range(num_workers):
            self._idle.put_nowait(None)

    async def start(self) -> None:
        """Start the workers.

        Raises ``InvalidArgument`` when the template is not valid, or leaves out what users say.
        """
        for _ in range(self._idle.qsize()):
            worker = self._idle.get_nowait()
            self._idle.put_nowait(worker or await RenderProcess.start(self._setup))

    async def render(self, job: RenderJob) -> Rendered:
        """Return the rendered conversation.

        Raises ``InvalidArgument`` when the template refuses it, ``ResourceExhausted`` when it grows past its limit or
        too many conversations wait, ``DeadlineExceeded`` when it takes too long.
        """
        request = pack(job)
        if self._waiting >= MAX_WAITING:
            raise errors.ResourceExhausted(f"{MAX_WAITING} conversations already wait to be rendered; retry.")
        self._waiting += 1
        try:
            worker = await self._idle.get()  # None: one has to be started
        finally:
            self._waiting -= 1
        kept: RenderProcess | None = None
        try:
            worker = worker or await RenderProcess.start(self._setup)
            reply = await worker.exchange(request, self._seconds)
            kept = worker
        except TimeoutError:
            message = f"Rendering the conversation took longer than {self._seconds:g} s and was stopped."
            raise errors.DeadlineExceeded(message) from None
        except (asyncio.IncompleteReadError, ConnectionError):
            raise errors.ResourceExhausted(
                "Rendering the conversation took too much memory.", retry_after=None
            ) from None
        finally:
            # After any failure, cancellation included, the worker may be in the middle of a job, so it is given up.
            self._idle.put_nowait(kept)
            if worker is not None and kept is None:
                await worker.kill()
        if "refused" in reply:
            raise errors.InvalidArgument(reply["refused"], "messages")
        if "too_long" in reply:
            raise errors.ResourceExhausted(reply["too_long"], retry_after=None)
        return Rendered(reply["text"], reply["masks"], reply["reasoning_start"])

    async def close(self) -> None:
        """End the workers. Call this when nothing renders any more."""
        while not self._idle.empty():
            if (worker := self._idle.get_nowait()) is not None:
                await worker.kill()


def _spawn(theirs: socket.socket) -> "subprocess.Popen[bytes]":
    # Not through the event loop: uvloop forks, which gRPC's threads do not take well; subprocess uses vfork.
    command = [sys.executable, "-m", f"{__package__}.render_worker"]
    return subprocess.Popen(command, stdin=theirs.fileno(), stdout=theirs.fileno())
