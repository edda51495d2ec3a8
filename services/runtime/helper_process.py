"""Runs child processes that answer one message with one message, and that can be killed while they do."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Self

from tokenloom.process.helper_pipe import LENGTH, OUT_OF_MEMORY
from tokenloom.process.process_guard import is_stopped
from tokenloom.request import errors

LOOK_SECONDS = 0.5
"""How often a process that owes an answer is looked at: its own limits of time do not end one that is stopped."""
TOO_MUCH_MEMORY = (-signal.SIGABRT, OUT_OF_MEMORY)  # a library that gets no more memory aborts
_MAX_DEATHS = 3


class HelperProcess:
    """Runs one child process."""

    was_stopped = False
    """Whether it was stopped while it owed an answer, and ended for that: its message is no cause of it."""

    def __init__(
        self,
        process: "subprocess.Popen[bytes]",
        pipe: socket.socket,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self.reader = reader
        """It is at its end as soon as the process is."""
        self._process = process
        self._pipe = pipe  # under the streams
        self._writer = writer

    @classmethod
    async def launch(
        cls, module: str, pass_fds: Sequence[int] = (), environment: Mapping[str, str] | None = None
    ) -> Self:
        """Start the process of a module. ``pass_fds``: descriptors that it has under the same numbers. ``environment``:
        variables that it has too, unless this process has them. Raises ``OSError``."""
        ours, theirs = socket.socketpair()
        spawning = asyncio.create_task(asyncio.to_thread(_spawn, theirs, module, pass_fds, environment or {}))
        try:
            process = await asyncio.shield(spawning)
            return cls(process, ours, *await asyncio.open_unix_connection(sock=ours))
        except BaseException:
            ours.close()
            with suppress(OSError):
                process = await spawning  # after a cancellation the thread starts it all the same
                process.kill()
                await asyncio.to_thread(process.wait)
            raise
        finally:
            theirs.close()

    async def talk(self, request: bytes, seconds: float, files: Sequence[int] = ()) -> bytes:
        """Send a message and return the answer. When this is cut short, :meth:`kill` the process. ``files``:
        descriptors that the process gets with it.

        Raises ``TimeoutError`` after ``seconds``, ``IncompleteReadError`` or ``ConnectionError`` if the process ended.
        One that is stopped meanwhile is ended.
        """
        self._looks = asyncio.get_running_loop().call_later(LOOK_SECONDS, self._look)
        try:
            async with asyncio.timeout(seconds):
                if files:
                    self._send_files(LENGTH.pack(len(request)), files)
                    self._writer.write(request)
                else:
                    self._writer.writelines((LENGTH.pack(len(request)), request))
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

    def _send_files(self, header: bytes, files: Sequence[int]) -> None:
        # Past the stream, which has nothing left to write: the process has answered all that came before.
        try:
            socket.send_fds(self._pipe, (header,), files)
        except OSError as error:  # closed, because the process has ended
            raise ConnectionResetError from error

    def _look(self) -> None:
        if is_stopped(self._process.pid):
            self.was_stopped = True
            self._process.kill()
        else:
            self._looks = asyncio.get_running_loop().call_later(LOOK_SECONDS, self._look)


class HelperPool:
    """Shares a few processes of one kind, each of which is started when it is needed. The callers take turns before
    they call."""

    def __init__(
        self, start: Callable[[], Awaitable[HelperProcess]], num_processes: int, what: str, seconds: float
    ) -> None:
        """Args:
        start: Returns a process that is ready. Raises ``OSError``, or what :meth:`HelperProcess.talk` raises.
        what: What a process is to do, for errors: "encode the text".
        seconds: As long as a message may take, on a busy machine, until its process is given up.
        """
        self._start = start
        self._what = what
        self._seconds = seconds
        self._idle: asyncio.LifoQueue[HelperProcess | None] = asyncio.LifoQueue(num_processes)  # None: to be started
        for _ in range(num_processes):
            self._idle.put_nowait(None)

    async def run(self, request: bytes, files: Sequence[int] = ()) -> bytes:
        """Return the answer to a message. ``files``: as :meth:`HelperProcess.talk` has them.

        Raises ``ResourceExhausted`` for one that takes too much memory, ``DeadlineExceeded`` for one that takes too
        much processor time, ``Unavailable`` when no process starts or the last one was stopped, and ``Internal`` after
        the ends of several.
        """
        was_stopped = False
        for _ in range(_MAX_DEATHS):
            process = await self._idle.get()
            kept: HelperProcess | None = None
            data, status = b"", 0
            try:
                if process is None or process.reader.at_eof():
                    process = await self._successor(process)
                data = await process.talk(request, self._seconds, files)
                kept = process
            except TimeoutError as error:
                raise errors.Unavailable(f"The machine is too busy to {self._what}; retry.") from error
            except (asyncio.IncompleteReadError, ConnectionError):
                pass  # its status says why
            finally:
                # After any failure, cancellation included, it may be in the middle of a call, so it is given up.
                self._idle.put_nowait(kept)
                if process is not None and kept is None:
                    was_stopped = process.was_stopped
                    status = await process.kill()
            if kept is not None:
                return data
            if status in TOO_MUCH_MEMORY:
                raise errors.ResourceExhausted(f"It takes too much memory to {self._what}.", retry_after=None)
            if status == -signal.SIGPROF:
                raise errors.DeadlineExceeded(f"It takes too much processor time to {self._what}.")
        if was_stopped:
            raise errors.Unavailable(f"The machine stops the processes that are to {self._what}; retry.")
        raise errors.Internal(f"{_MAX_DEATHS} processes ended that were to {self._what}")

    async def start(self) -> None:
        """Start a process, if none has been started yet. Raises what the process does not take, as the client's fault
        or, as :meth:`run`, as ours."""
        process = self._idle.get_nowait()
        try:
            process = process or await self._successor(None)
        except errors.Unavailable as error:
            raise error.__cause__ if isinstance(error.__cause__, errors.InvalidArgument) else error from None
        finally:
            self._idle.put_nowait(process)

    async def close(self) -> None:
        """End the processes. Call this when nothing runs any more."""
        while not self._idle.empty():
            if (process := self._idle.get_nowait()) is not None:
                await process.kill()

    async def _successor(self, ended: HelperProcess | None) -> HelperProcess:
        if ended is not None:
            await ended.kill()
        try:
            return await self._start()
        except (OSError, TimeoutError, asyncio.IncompleteReadError, errors.InvalidArgument) as error:
            raise errors.Unavailable(f"The process that is to {self._what} does not start.") from error


async def start_helper(
    module: str,
    setup: bytes,
    check: Callable[[bytes], object],
    seconds: float,
    pass_fds: Sequence[int] = (),
    environment: Mapping[str, str] | None = None,
) -> HelperProcess:
    """Return a process that has answered its first message. ``check`` raises for an answer that refuses it; the last
    arguments are those of :meth:`HelperProcess.launch`.

    Raises ``OSError``, or what ``check`` and :meth:`HelperProcess.talk` raise.
    """
    process = await HelperProcess.launch(module, pass_fds, environment)
    try:
        check(await process.talk(setup, seconds))
    except BaseException:
        await process.kill()
        raise
    return process


def _spawn(
    theirs: socket.socket, module: str, pass_fds: Sequence[int], environment: Mapping[str, str]
) -> "subprocess.Popen[bytes]":
    # Not through the event loop: uvloop forks, which gRPC's threads do not take well; subprocess uses vfork.
    command = [sys.executable, "-m", module]
    variables = {**environment, **os.environ}
    return subprocess.Popen(command, stdin=theirs.fileno(), stdout=theirs.fileno(), pass_fds=pass_fds, env=variables)
