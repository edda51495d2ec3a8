"""The link between the KV pools of two engines is cut within a block, silent in one direction, or slow: the tokens are
those of an engine that computed everything itself, and nothing stays held."""

import asyncio
import contextlib
import random
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from tests.mesh.asking import ask
from tests.mesh.split import SplitMesh
from tests.mesh.test_disaggregation import prompt_of

OUR_HOST, PROXY_HOST = "127.0.0.1", "127.0.0.2"
LENGTH = 600
GREETING_BYTES = 64
"""At least what the owner sends on a new connection before the blocks."""


def free_port() -> int:
    """Return a port that is free on both addresses, and below those that the kernel gives to clients."""
    for port in random.Random().sample(range(20_000, 32_000), 100):
        with contextlib.suppress(OSError):
            for host in (OUR_HOST, PROXY_HOST):
                socket.create_server((host, port)).close()
            return port
    raise AssertionError("no port is free")


class Link:
    """Passes bytes to the owner of KV blocks and back.

    Attributes:
        passed: Bytes that came from the owner.
        cut_after: The owner's bytes after which the connection breaks, counted from the next one; None: none.
        is_silent: Whether what the owner sends is held back: the other direction works.
        piece: Bytes that are passed at a time.
    """

    def __init__(self) -> None:
        self.passed = 0
        self.cut_after: int | None = None
        self.is_silent = False
        self.piece = 64 << 10
        self.port = 0
        self._heard = asyncio.Event()

    @asynccontextmanager
    async def running(self) -> AsyncIterator["Link"]:
        self.port = free_port()
        server = await asyncio.start_server(self._serve, PROXY_HOST, self.port)
        try:
            yield self
        finally:
            self._heard.set()
            server.close()

    def be_heard(self) -> None:
        self.is_silent = False
        self._heard.set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        owner_reader, owner_writer = await asyncio.open_connection(OUR_HOST, self.port)
        try:
            asking = asyncio.create_task(self._pass(reader, owner_writer))
            answering = asyncio.create_task(self._answer(owner_reader, writer))
            _, rest = await asyncio.wait([asking, answering], return_when=asyncio.FIRST_COMPLETED)
            for task in rest:
                task.cancel()
            await asyncio.gather(asking, answering, return_exceptions=True)
        finally:
            for each in (writer, owner_writer):
                each.transport.abort()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(self.piece):
            writer.write(data)
            await writer.drain()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(self.piece):
            if self.is_silent:
                await self._heard.wait()
            if self.cut_after is not None and (left := self.cut_after) <= len(data):
                self.cut_after = None  # the next connection is whole
                writer.write(data[:left])
                with contextlib.suppress(ConnectionError):
                    await writer.drain()
                return
            if self.cut_after is not None:
                self.cut_after -= len(data)
            self.passed += len(data)
            writer.write(data)
            await writer.drain()


@asynccontextmanager
async def linked(directory: Path, **decode: object) -> AsyncIterator[tuple[SplitMesh, httpx.AsyncClient, Link]]:
    """A prefill and a decode engine with a link between their pools."""
    async with Link().running() as link:
        prefill = {"kv_socket_listen": f"{OUR_HOST}:{link.port}", "kv_socket_advertise": PROXY_HOST}
        mesh = SplitMesh(directory, engine={"kv_transports": ("socket",)}, prefill=prefill, decode=decode)
        async with mesh.running(), mesh.http() as http:
            yield mesh, http, link


async def check(mesh: SplitMesh, http: httpx.AsyncClient, seed: int) -> None:
    prompt = prompt_of(LENGTH, seed)
    answer = await ask(http, prompt, 12)
    assert answer.token_ids == mesh.expected(prompt, 12)
    await mesh.check_nothing_is_left()


async def test_a_pull_that_is_cut_within_a_block_is_repeated_or_computed(socket_dir: Path) -> None:
    async with linked(socket_dir) as (mesh, http, link):
        await check(mesh, http, seed=1)
        size = link.passed - GREETING_BYTES
        assert size > 38 * 16, "the blocks went through the link"
        decode = mesh.of_role("decode")
        for number in range(8):
            link.cut_after = 1 + number * (size - 1) // 7  # mostly no border of a block
            await check(mesh, http, seed=2 + number)
            assert link.cut_after is None, "it was cut"
        assert not decode.recomputes(), "a new connection brought the blocks"
        assert set(decode.stats.kv_bytes_received) == {"socket"}


async def test_a_link_that_breaks_each_time_costs_a_recompute(socket_dir: Path) -> None:
    async with linked(socket_dir) as (mesh, http, link):
        prompt = prompt_of(LENGTH, 1)
        answering = asyncio.create_task(ask(http, prompt, 12))
        while not answering.done():
            link.cut_after = 777  # of every connection
            await asyncio.sleep(0)
        assert answering.result().token_ids == mesh.expected(prompt, 12)
        assert mesh.of_role("decode").recomputes() == {"transport": 1}
        link.cut_after = None
        await mesh.check_nothing_is_left()


async def test_a_link_that_is_silent_in_one_direction_costs_a_recompute(socket_dir: Path) -> None:
    async with linked(socket_dir, kv_load_timeout=0.3) as (mesh, http, link):
        link.is_silent = True
        await check(mesh, http, seed=1)
        (reason,) = mesh.of_role("decode").recomputes()
        assert reason in ("timeout", "transport")
        link.be_heard()


@pytest.mark.parametrize("piece", [1, 7, 1000])
async def test_a_slow_link_brings_the_same_blocks(socket_dir: Path, piece: int) -> None:
    async with linked(socket_dir) as (mesh, http, link):
        link.piece = piece
        await check(mesh, http, seed=1)
        assert not mesh.of_role("decode").recomputes()
