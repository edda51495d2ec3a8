"""Peers that are killed, stopped, silent, or only busy are distinguished."""

import asyncio
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from tests.services.runtime.local_streams.conftest import METHOD, OPEN, SOON, calling, stream, write_for
from tests.services.runtime.local_streams.test_handlers import Watched
from tokenloom.services.runtime.local_streams import socket_end
from tokenloom.services.runtime.local_streams.channel import LocalChannel
from tokenloom.services.runtime.local_streams.socket_end import Kind, encode_frame, split_frames

ROOT = Path(__file__).parents[4]


@asynccontextmanager
async def process(path: Path, tick_seconds: float) -> AsyncIterator["subprocess.Popen[bytes]"]:
    """Run a peer in a process of its own.

    Not started by the event loop: uvloop forks, and a garbage collection in the child can wait forever for gRPC's
    thread, which the child does not have.
    """
    command = (sys.executable, "-m", "tests.services.runtime.local_streams.silent_part", str(path), str(tick_seconds))
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT) as part:  # noqa: ASYNC220
        try:
            assert part.stdout is not None
            assert await asyncio.to_thread(part.stdout.readline) == b"serving\n"
            yield part
        finally:
            part.kill()


async def test_a_killed_process_is_noticed_at_once(socket_dir: Path) -> None:
    async with asyncio.timeout(SOON), process(socket_dir / "s", 60.0) as part, calling(socket_dir / "s") as channel:
        call = channel.stream_stream(METHOD)()
        await call.write(b"a")
        assert await call.read() == b"a"
        part.kill()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_new_call_to_a_stopped_process_does_not_wait_for_its_silence(socket_dir: Path) -> None:
    async with asyncio.timeout(SOON), process(socket_dir / "s", 60.0) as part, calling(socket_dir / "s") as channel:
        assert await opened(channel)
        part.send_signal(signal.SIGSTOP)
        while await opened(channel):  # noqa: ASYNC110
            await asyncio.sleep(0.01)  # the signal takes a moment
        part.send_signal(signal.SIGCONT)
        while not await opened(channel):  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def opened(channel: LocalChannel) -> bool:
    """Return whether the peer took a call, which is cancelled when it has its connection."""
    call = channel.open_call(OPEN, None, None)
    if call is None:
        return False
    while call.transport is None and not call.done():  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    call.cancel()
    return True


async def test_a_stopped_process_is_noticed_by_its_silence(socket_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket_end, "TICK_SECONDS", 0.1)
    async with asyncio.timeout(SOON), process(socket_dir / "s", 0.1) as part, calling(socket_dir / "s") as channel:
        call = channel.stream_stream(METHOD)()
        await call.write(b"a")
        assert await call.read() == b"a"
        part.send_signal(signal.SIGSTOP)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_busy_process_is_not_dead(socket_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket_end, "TICK_SECONDS", 0.1)
    seconds = socket_end.TICK_SECONDS * (socket_end.SILENT_TICKS + 2)
    async with asyncio.timeout(SOON), process(socket_dir / "s", 0.1) as part, calling(socket_dir / "s") as channel:
        call = channel.stream_stream(METHOD)()
        for message in (b"busy %f" % seconds, b"a"):
            await call.write(message)
            assert await call.read() == message
        assert part.poll() is None


def test_within_the_time_of_grpcs_pings() -> None:
    assert socket_end.TICK_SECONDS * (socket_end.SILENT_TICKS - 1) >= 2.0
    assert socket_end.TICK_SECONDS * socket_end.SILENT_TICKS <= 2.6


def test_a_busy_loop_has_more_than_5_seconds() -> None:
    assert socket_end.TICK_SECONDS * (socket_end.HUNG_TICKS - 1) > 5.0
    assert socket_end.TICK_SECONDS * socket_end.HUNG_TICKS <= 10.0


async def test_a_caller_that_says_nothing_is_cut_off(socket_dir: Path, short_ticks: float) -> None:
    watched = Watched()
    async with stream(watched.wait, socket_dir):
        reader, writer = await asyncio.open_unix_connection(socket_dir / "s")
        assert await reader.read() == encode_frame(Kind.BEAT) * (socket_end.HUNG_TICKS - 1)
        writer.close()
        reader, writer = await asyncio.open_unix_connection(socket_dir / "s")
        writer.write(OPEN)
        await reader.read()
        writer.close()


async def test_an_idle_call_lives_by_beats(socket_dir: Path, short_ticks: float) -> None:
    watched = Watched()
    beats = 0

    def count(rest: bytearray, data: bytes, limit: int) -> Any:
        nonlocal beats
        frames, error = split_frames(rest, data, limit)
        beats += sum(kind is Kind.BEAT for kind, _ in frames)
        return frames, error

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket_end, "split_frames", count)
        async with stream(watched.wait, socket_dir) as call:
            while beats < 4 * socket_end.HUNG_TICKS:  # noqa: ASYNC110 - of both ends
                await asyncio.sleep(short_ticks)
            assert not call.done()


async def test_a_pause_of_this_process_is_one_tick(socket_dir: Path, short_ticks: float) -> None:
    async with stream(Watched().wait, socket_dir) as call:
        await call.write(b"a")
        time.sleep(10 * short_ticks)  # noqa: ASYNC251 - that is the pause
        await asyncio.sleep(0)
        assert not call.done()


async def test_a_peer_that_is_behind_is_not_dead(socket_dir: Path, short_ticks: float) -> None:
    """It receives nothing while it does not read, and still sends beats."""
    may_read = asyncio.Event()

    async def slow(requests: Any, context: Any) -> None:
        await may_read.wait()
        await context.write(b"%d" % len([each async for each in requests]))

    async with stream(slow, socket_dir) as call:
        written = await write_for(20 * short_ticks, call)
        may_read.set()
        await call.done_writing()
        assert await call.read() == b"%d" % written
