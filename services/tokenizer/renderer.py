"""Renders chat templates in processes that can be killed, so that no template blocks or brings down the service. Each
process runs ``render_worker.py``, which calls :meth:`.chat_template.ChatTemplate.render`."""

import asyncio
import signal
from collections.abc import Awaitable, Callable, Sequence
from typing import Self

import msgspec

from tokenloom.request import errors
from tokenloom.services.runtime.helper_process import LOOK_SECONDS, TOO_MUCH_MEMORY, HelperProcess

from .output_format import PARSED_MARKS
from .render_worker import RenderJob, RenderReply, RenderSetup
from .spelled_tokens import Rendered

_MEMORY_BYTES = 1 << 30
_START_SECONDS = 20.0
MAX_DEATHS = 3
"""Workers that may end, by no limit of theirs, while they render one conversation. Each is replaced at once."""
_WAIT_SECONDS = 30.0
"""As long as a rendering may take, on a busy machine, until it is given up and not judged."""


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
            worker = await cls.launch(f"{__package__}.render_worker")
        except OSError as error:  # no process or descriptor is left
            raise errors.Unavailable("The process that renders chat templates does not start.") from error
        try:
            reply: RenderReply = msgspec.msgpack.decode(
                await worker.talk(msgspec.msgpack.encode(setup), _START_SECONDS)
            )
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
        request = msgspec.msgpack.encode(job)
        worker = await self._idle.get()  # None: one has to be started
        kept: RenderProcess | None = None
        reply: RenderReply | None = None
        status = 0
        try:
            if worker is None or worker.reader.at_eof():
                worker = await self._successor(worker)
            reply = msgspec.msgpack.decode(await worker.talk(request, _WAIT_SECONDS + LOOK_SECONDS))
            kept = worker
        except (TimeoutError, asyncio.IncompleteReadError, ConnectionError):
            pass  # its status says why
        finally:
            # After any failure, cancellation included, the worker may be in the middle of a job, so it is given up.
            self._idle.put_nowait(kept)
            if worker is not None and kept is None:
                status = await worker.kill()
        if reply is None:
            was_stopped = worker is not None and worker.was_stopped
            return await self._again(job, status, num_deaths + 1, was_stopped)
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

    async def _again(self, job: RenderJob, status: int, num_deaths: int, was_stopped: bool) -> Rendered:
        """Render a conversation in another worker after one has ended. Raises, as :meth:`render`, what the conversation
        itself, or the machine, has done to it."""
        if status == -signal.SIGPROF:
            raise errors.DeadlineExceeded(
                f"Rendering the conversation took longer than {self._setup['seconds']:g} s of processor time and was "
                "stopped."
            )
        # Only what the worker says of itself: the OOM killer of a full machine once made 4 of 10 conversations "too
        # large", for ever.
        if status in TOO_MUCH_MEMORY:
            raise errors.ResourceExhausted("Rendering the conversation took too much memory.", retry_after=None)
        if status == -signal.SIGALRM:
            raise errors.Unavailable("The machine is too busy to render the conversation; retry.")
        if num_deaths == MAX_DEATHS and was_stopped:
            raise errors.Unavailable("The machine stops the processes that are to render the conversation; retry.")
        if num_deaths == MAX_DEATHS:
            raise errors.Internal(f"{num_deaths} processes ended while they rendered the conversation")
        return await self.render(job, num_deaths)

    async def close(self) -> None:
        """End the workers. Call this when nothing renders any more."""
        while not self._idle.empty():
            if (worker := self._idle.get_nowait()) is not None:
                await worker.kill()
