"""Renders chat templates in processes that can be killed, so that no template holds up or brings down the service."""

import asyncio

from tokenloom.request import errors

from .render_process import RenderProcess
from .render_worker import Job, Reply, Setup, pack

MAX_WAITING = 256
"""Conversations that wait for a worker; more are refused, to be tried again."""
_MEMORY_BYTES = 1 << 30


class Renderer:
    """A few worker processes; one that runs out of time or memory is killed and replaced when next needed."""

    def __init__(self, source: str, special_tokens: dict[str, str], *, num_workers: int, seconds: float) -> None:
        """``source``: the template, ``special_tokens``: by name, as it uses them, ``seconds``: of each rendering."""
        self._setup = Setup(
            source=source,
            special_tokens=special_tokens,
            memory_bytes=_MEMORY_BYTES,
            seconds=2 * seconds,  # only for when this process is no longer there to kill it
        )
        self._seconds = seconds
        self._waiting = 0
        self._idle: asyncio.Queue[RenderProcess | None] = asyncio.Queue(num_workers)  # None: to be started
        for _ in range(num_workers):
            self._idle.put_nowait(None)

    async def start(self) -> None:
        """Starts the workers; raises ``InvalidArgument`` when the template is not valid."""
        for _ in range(self._idle.qsize()):
            worker = self._idle.get_nowait()
            self._idle.put_nowait(worker or await RenderProcess.start(self._setup))

    async def render(self, job: Job) -> str:
        """The rendered conversation.

        Raises ``InvalidArgument`` when the template refuses it, ``ResourceExhausted`` when it grows past its cap or too
        many wait, ``DeadlineExceeded`` when it takes too long.
        """
        request = pack(job)
        if self._waiting >= MAX_WAITING:
            raise errors.ResourceExhausted(f"{MAX_WAITING} conversations wait to be rendered; try again")
        self._waiting += 1
        try:
            worker = await self._idle.get()
        finally:
            self._waiting -= 1
        kept: RenderProcess | None = None
        try:
            worker = worker or await RenderProcess.start(self._setup)
            reply = await self._exchange(worker, request)
            kept = worker
        finally:
            # Whatever went wrong, cancellation included: the worker may be amid a job, so it is given up.
            self._idle.put_nowait(kept)
            if worker is not None and kept is None:
                await worker.kill()
        return _text(reply)

    async def close(self) -> None:
        """Ends the workers. Call when nothing renders any more."""
        while not self._idle.empty():
            if (worker := self._idle.get_nowait()) is not None:
                await worker.kill()

    async def _exchange(self, worker: RenderProcess, request: bytes) -> Reply:
        try:
            async with asyncio.timeout(self._seconds):
                return await worker.exchange(request)
        except TimeoutError:
            raise errors.DeadlineExceeded(
                f"rendering the conversation took longer than {self._seconds:g} s and was cut off"
            ) from None
        except (asyncio.IncompleteReadError, ConnectionError):
            raise errors.ResourceExhausted(
                "rendering the conversation took too much memory", retry_after=None
            ) from None


def _text(reply: Reply) -> str:
    if "refused" in reply:
        raise errors.InvalidArgument(reply["refused"], "messages")
    if "too_long" in reply:
        raise errors.ResourceExhausted(reply["too_long"], retry_after=None)
    return reply["text"]
