"""A socket in the mesh's private directory by which commands of the same user start and stop engines of a mesh that
runs, and the gateway of a demo kills one. A request and its answer are a line of JSON each."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Protocol

import msgspec

from .part_spec import PartFailed
from .state_dir import CONTROL_SOCKET

_MOST_BYTES = 1 << 16
_REQUEST_SECONDS = 5.0


class CrashRequest(msgspec.Struct, forbid_unknown_fields=True, tag_field="kind", tag="crash"):
    """Asks for the sudden end of an engine, which is started again."""


class Crashed(msgspec.Struct):
    """Says which engine was killed.

    Attributes:
        engine: Its name; empty: none.
        error: Why none was killed; empty: one was.
    """

    engine: str = ""
    error: str = ""


class ResizeRequest(msgspec.Struct, forbid_unknown_fields=True, tag_field="kind", tag="resize"):
    """Asks for so many engines of the mesh, of which those with the highest numbers are started or stopped.

    Attributes:
        engines: How many there should be.
        serving: Whether to wait until new ones serve; ranks of a group serve only after the group has taken them.
    """

    engines: int
    serving: bool = True


class Resized(msgspec.Struct):
    """Says what was done.

    Attributes:
        started: The names of the engines that were started.
        stopped: Those that have ended, after their requests.
        error: Why it could not be done; empty: it was.
    """

    started: list[str] = []
    stopped: list[str] = []
    error: str = ""


class ResizeEngines(Protocol):
    """Starts or stops engines (:meth:`.mesh.Mesh.resize_engines`)."""

    async def __call__(self, count: int, *, serving: bool) -> tuple[list[str], list[str]]: ...


@contextlib.asynccontextmanager
async def served(resize: ResizeEngines, crash: Callable[[], str], directory: Path) -> AsyncIterator[None]:
    """Answer requests during the block. ``crash``: kills an engine and returns its name; raises ``ValueError``."""
    lock = asyncio.Lock()

    async def one_at_a_time(count: int, *, serving: bool) -> tuple[list[str], list[str]]:
        async with lock:
            return await resize(count, serving=serving)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer), contextlib.suppress(OSError, EOFError, asyncio.LimitOverrunError):
            async with asyncio.timeout(_REQUEST_SECONDS):
                line = await reader.readuntil()
            writer.write(msgspec.json.encode(await _done(one_at_a_time, crash, line)) + b"\n")
            await writer.drain()

    server = await asyncio.start_unix_server(answer, directory / CONTROL_SOCKET, limit=_MOST_BYTES)
    try:
        yield
    finally:
        server.close()


async def _done(resize: ResizeEngines, crash: Callable[[], str], line: bytes) -> Resized | Crashed:
    try:
        request = msgspec.json.decode(line, type=ResizeRequest | CrashRequest)
    except msgspec.MsgspecError as error:
        return Resized(error=str(error))
    if isinstance(request, ResizeRequest):
        return await _resized(resize, request)
    try:
        return Crashed(crash())
    except ValueError as error:
        return Crashed(error=str(error))


async def _resized(resize: ResizeEngines, request: ResizeRequest) -> Resized:
    try:
        started, stopped = await resize(request.engines, serving=request.serving)
    except (ValueError, OSError, PartFailed) as error:
        return Resized(error=str(error))
    return Resized(started, stopped)


def ask(directory: Path, request: ResizeRequest, timeout: float) -> Resized:
    """Ask the supervisor of the mesh with this directory. Raises ``OSError`` if it does not answer in time."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(timeout)
        connection.connect(str(directory / CONTROL_SOCKET))
        connection.sendall(msgspec.json.encode(request) + b"\n")
        with connection.makefile("rb") as answers:
            line = answers.readline(_MOST_BYTES)
    try:
        return msgspec.json.decode(line, type=Resized)
    except msgspec.MsgspecError as error:
        raise ConnectionError(f"the supervisor ended without an answer: {error}") from None
