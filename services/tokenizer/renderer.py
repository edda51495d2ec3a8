"""Renders chat templates in processes that can be killed, so that no template blocks or brings down the service."""

import asyncio
import signal
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable, Sequence
from typing import Self

import msgspec

from tokenloom.process.process_guard import is_stopped
from tokenloom.request import errors

from .output_format import PARSED_MARKS
from .render_worker import LENGTH, OUT_OF_MEMORY, RenderJob, RenderReply, RenderSetup, pack
from .spelled_tokens import Rendered

_MEMORY_BYTES = 1 << 30
_START_SECONDS = 20.0
MAX_DEATHS = 3
"""Workers that may end, by no limit of theirs, while they render one conversation. Each is replaced at once."""
_WAIT_SECONDS = 30.0
"""As long as a rendering may take, on a busy machine, until it is given up and not judged."""
_LOOK_SECONDS = 0.5
"""How often a worker that owes an answer is looked at: its own limits of time do not end one that is stopped."""
_TOO_MUCH_MEMORY = (-signal.SIGABRT, OUT_OF_MEMORY)  # a library that gets no more memory aborts


class HelperProcess:
    """Runs a child process that answers one message with one message."""

    def __init__(
        self, process: "subprocess.Popen[bytes]", reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.reader = reader
        """It is at its end as soon as the process is."""
        self._process = process
        self._writer = writer

    @classmethod
    async def launch(cls, module: str) -> Self:
        """Start the process of a module of this folder. Raises ``OSError``."""
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                process = await asyncio.to_thread(_spawn, theirs, module)
        except BaseException:
            ours.close()
            raise
        return cls(process, *await asyncio.open_unix_connection(sock=ours))

    async def talk(self, request: bytes, seconds: float) -> bytes:
        """Send a packed message and return the answer. When this is cut short, :meth:`kill` the process.

        Raises ``TimeoutError`` after ``seconds``, ``IncompleteReadError`` or ``ConnectionError`` if the process ended.
        One that is stopped meanwhile is ended.
        """
        self._looks = asyncio.get_running_loop().call_later(_LOOK_SECONDS, self._look)
        try:
            async with asyncio.timeout(seconds):
                self._writer.write(request)
                await self._writer.drain()
                (length,) = LENGTH.unpack(await self.reader.readexactly(LENGTH.size))
                return await self.reader.readexactly(length)
        finally:
            self._looks.cancel()

    async def kill(self) -> int:
        """End the process at once. Returns its status: that of its own end if it has ended already."""
        self._process.kill()
        self._writer.close()
        return await asyncio.to_thread(self._process.wait)

    def _look(self) -> None:
        if is_stopped(self._process.pid):
            self._process.kill()
        else:
            self._looks = asyncio.get_running_loop().call_later(_LOOK_SECONDS, self._look)


class RenderProcess(HelperProcess):
    """Runs one worker.

    Attributes:
        tool_format: How the template writes calls, as a message carries it; empty if no description fits.
    """

    tool_format = b""

    @classmethod
    async def start(cls, setup: RenderSetup) -> Self:
        """Start a worker. Raises ``Unavailable`` when it does not start, ``InvalidArgument`` for a wrong template."""
        try:
            worker = await cls.launch("render_worker")
        except OSError as error:  # no process or descriptor is left
            raise errors.Unavailable("The process that renders chat templates does not start.") from error
        try:
            reply: RenderReply = msgspec.msgpack.decode(await worker.talk(pack(setup), _START_SECONDS))
        except (TimeoutError, asyncio.IncompleteReadError, ConnectionError) as error:
            await worker.kill()
            raise errors.Unavailable("The process that renders chat templates does not start.") from error
        except asyncio.CancelledError:
            await worker.kill()
            raise
        if "refused" in reply:
            await worker.kill()
            raise errors.InvalidArgument(reply["refused"], "model")
        worker.tool_format = reply.get("tool_format", b"")
        return worker


class Renderer:
    """Shares a few workers; one that ends, or runs out of time or memory, is replaced when it is next needed.

    Attributes:
        tool_format: That of the workers, once they have started.
    """

    def __init__(
        self,
        source: str,
        special_tokens: dict[str, str],
        *,
        control_tokens: Sequence[str] = (),
        num_workers: int,
        seconds: float,
        start_worker: Callable[[RenderSetup], Awaitable[RenderProcess]] = RenderProcess.start,
    ) -> None:
        """``special_tokens``: by the name that the template uses. ``control_tokens``: those that texts of clients do
        not write. ``seconds``: limit of the processor time of each rendering."""
        self.tool_format = b""
        self._start_worker = start_worker
        self._setup = RenderSetup(
            source=source,
            special_tokens=special_tokens,
            control_tokens=list(control_tokens),
            parsed_marks=list(PARSED_MARKS),
            memory_bytes=_MEMORY_BYTES,
            seconds=seconds,
            wait_seconds=_WAIT_SECONDS,
        )
        self._idle: asyncio.Queue[RenderProcess | None] = asyncio.Queue(num_workers)  # None: to be started
        for _ in range(num_workers):
            self._idle.put_nowait(None)

    async def start(self) -> None:
        """Start the workers.

        Raises ``InvalidArgument`` when the template is not valid, or leaves out what users say.
        """
        for _ in range(self._idle.qsize()):
            worker = self._idle.get_nowait()
            worker = worker or await self._start_worker(self._setup)
            self.tool_format = worker.tool_format
            self._idle.put_nowait(worker)

    async def render(self, job: RenderJob, num_deaths: int = 0) -> Rendered:
        """Return the rendered conversation. The caller limits how many wait. ``num_deaths``: workers that have ended
        while they rendered it.

        Raises ``InvalidArgument`` when the template refuses it, ``ResourceExhausted`` when it grows past its limit,
        ``DeadlineExceeded`` when it takes too much processor time, ``Unavailable`` when
        no worker starts, or the machine is too busy.
        """
        request = pack(job)
        worker = await self._idle.get()  # None: one has to be started
        kept: RenderProcess | None = None
        reply: RenderReply | None = None
        status = 0
        try:
            if worker is None or worker.reader.at_eof():
                worker = await self._successor(worker)
            reply = msgspec.msgpack.decode(await worker.talk(request, _WAIT_SECONDS + _LOOK_SECONDS))
            kept = worker
        except (TimeoutError, asyncio.IncompleteReadError, ConnectionError):
            pass  # its status says why
        finally:
            # After any failure, cancellation included, the worker may be in the middle of a job, so it is given up.
            self._idle.put_nowait(kept)
            if worker is not None and kept is None:
                status = await worker.kill()
        if reply is None:
            return await self._again(job, status, num_deaths + 1)
        if "refused" in reply:
            raise errors.InvalidArgument(reply["refused"], "messages")
        if "too_long" in reply:
            raise errors.ResourceExhausted(reply["too_long"], retry_after=None)
        return Rendered(reply["text"], reply["masks"], reply["reasoning_start"])

    async def _successor(self, ended: RenderProcess | None) -> RenderProcess:
        """Return a new worker in place of one that was idle when it ended. Raises ``Unavailable``."""
        if ended is not None:
            await ended.kill()
        try:
            return await self._start_worker(self._setup)
        except errors.InvalidArgument as error:  # the template was right when the service started: it is no client's
            raise errors.Unavailable("The process that renders chat templates does not start.") from error

    async def _again(self, job: RenderJob, status: int, num_deaths: int) -> Rendered:
        """Render a conversation in another worker after one has ended. Raises, as :meth:`render`, what the conversation
        itself, or the machine, has done to it."""
        if status == -signal.SIGPROF:
            raise errors.DeadlineExceeded(
                f"Rendering the conversation took longer than {self._setup['seconds']:g} s of processor time and was "
                "stopped."
            )
        # Only what the worker says of itself: the OOM killer of a full machine once made 4 of 10 conversations "too
        # large", for ever.
        if status in _TOO_MUCH_MEMORY:
            raise errors.ResourceExhausted("Rendering the conversation took too much memory.", retry_after=None)
        if status == -signal.SIGALRM:
            raise errors.Unavailable("The machine is too busy to render the conversation; retry.")
        if num_deaths == MAX_DEATHS:
            raise errors.Internal(f"{num_deaths} processes ended while they rendered the conversation")
        return await self.render(job, num_deaths)

    async def close(self) -> None:
        """End the workers. Call this when nothing renders any more."""
        while not self._idle.empty():
            if (worker := self._idle.get_nowait()) is not None:
                await worker.kill()


def _spawn(theirs: socket.socket, module: str) -> "subprocess.Popen[bytes]":
    # Not through the event loop: uvloop forks, which gRPC's threads do not take well; subprocess uses vfork.
    command = [sys.executable, "-m", f"{__package__}.{module}"]
    return subprocess.Popen(command, stdin=theirs.fileno(), stdout=theirs.fileno())
