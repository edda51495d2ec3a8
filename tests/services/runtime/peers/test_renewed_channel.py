"""Channels that survive a change of certificates: gRPC servers and clients whose files are replaced."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from cryptography import x509

from tests.services.runtime.peers.issuing import Issued, authority, issue, write
from tests.services.runtime.peers.test_certificate import Clock
from tokenloom.services.runtime.peers.certificate import CHECK_SECONDS
from tokenloom.services.runtime.peers.certificate_files import dns_name
from tokenloom.services.runtime.peers.channels import Channels, RenewedChannel
from tokenloom.services.runtime.peers.tls import MeshTLS

SOON = 20.0


def name(service: str) -> x509.DNSName:
    return x509.DNSName(dns_name(service))


class Peers:
    """An engine that answers with its caller's names, and the files of both sides."""

    def __init__(self, folder: Path) -> None:
        self.clock = Clock()
        self._num_written = 0
        self.authority = authority("first")
        self.folder = folder
        self.engine = MeshTLS(self._write("engine", self.authority), self.clock)
        self.gateway = MeshTLS(self._write("gateway", self.authority), self.clock)
        self.address = ""

    def _write(self, service: str, signer: Issued, days: float = 30) -> Any:
        files = write(self.folder / service, signer, issue(signer, name(service), days=days))
        self._num_written += 1
        for path in files.paths:  # two writes within a tick of the file system's clock, as none come in earnest
            os.utime(path, ns=(0, self._num_written))
        return files

    def replace(self, *services: str, signer: Issued | None = None, days: float = 30) -> None:
        """Write new certificates, valid for so many days, and let every side see them."""
        for service in services:
            self._write(service, signer or self.authority, days)
        self.clock.now += CHECK_SECONDS

    @asynccontextmanager
    async def serving(self) -> AsyncIterator["Peers"]:
        server = grpc.aio.server()
        handlers = {
            "Who": grpc.unary_unary_rpc_method_handler(_who),
            "Echo": grpc.stream_stream_rpc_method_handler(_echo),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Peer", handlers),))
        self.address = f"127.0.0.1:{server.add_secure_port('127.0.0.1:0', self.engine.server_credentials())}"
        await server.start()
        try:
            yield self
        finally:
            await server.stop(0)

    def open(self) -> RenewedChannel:
        channel = Channels(self.gateway).open(self.address, "engine")
        assert isinstance(channel, RenewedChannel)
        return channel


async def _who(_: bytes, context: Any) -> bytes:
    return b",".join(context.auth_context()["peer_dns"])


async def _echo(requests: Any, _: Any) -> AsyncIterator[bytes]:
    async for request in requests:
        yield request


async def test_both_sides_move_to_a_new_authority_without_a_restart(tmp_path: Path) -> None:
    async with Peers(tmp_path).serving() as peers, peers.open() as channel:
        who = channel.unary_unary("/test.Peer/Who")
        assert await who(b"", timeout=SOON) == b"gateway.tokenloom.internal"
        stream = channel.stream_stream("/test.Peer/Echo")()
        await stream.write(b"before")
        assert await stream.read() == b"before"
        second = authority("second")
        peers.replace("engine", "gateway", signer=second)
        assert await who(b"", timeout=SOON) == b"gateway.tokenloom.internal"
        await stream.write(b"after")  # a stream in progress stays on its connection
        assert await stream.read() == b"after"
        outdated = MeshTLS(write(tmp_path / "outdated", peers.authority, issue(peers.authority, name("gateway"))))
        async with Channels(outdated).open(peers.address, "engine") as refused:
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await refused.unary_unary("/test.Peer/Who")(b"", timeout=SOON)
        assert error.value.code() is grpc.StatusCode.UNAVAILABLE
        stream.cancel()


async def test_certificates_that_change_under_load_cost_no_call(tmp_path: Path) -> None:
    async with Peers(tmp_path).serving() as peers, peers.open() as channel:
        who, stop = channel.unary_unary("/test.Peer/Who"), asyncio.Event()
        stream = channel.stream_stream("/test.Peer/Echo")()

        async def call() -> int:
            count = 0
            while not stop.is_set():
                assert await who(b"", timeout=SOON) == b"gateway.tokenloom.internal"
                count += 1
            return count

        async with asyncio.timeout(3 * SOON), asyncio.TaskGroup() as group:
            callers = [group.create_task(call()) for _ in range(8)]
            for number in range(20):
                peers.replace("engine", "gateway")
                await stream.write(b"%d" % number)
                assert await stream.read() == b"%d" % number
                assert await who(b"", timeout=SOON) == b"gateway.tokenloom.internal"
            stop.set()
        assert min(caller.result() for caller in callers) > 0
        stream.cancel()


@pytest.mark.parametrize("service", ["engine", "gateway"])
async def test_a_certificate_that_has_expired_ends_calls_until_it_is_replaced(tmp_path: Path, service: str) -> None:
    async with Peers(tmp_path).serving() as peers, peers.open() as channel:
        who = channel.unary_unary("/test.Peer/Who")
        assert await who(b"", timeout=SOON) == b"gateway.tokenloom.internal"
        peers.replace(service, days=-0.01)
        async with Channels(peers.gateway).open(peers.address, "engine") as late:
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await late.unary_unary("/test.Peer/Who")(b"", timeout=SOON)
        assert error.value.code() is grpc.StatusCode.UNAVAILABLE
        peers.replace(service)
        for each in (channel, late := peers.open()):
            assert await each.unary_unary("/test.Peer/Who")(b"", timeout=SOON) == b"gateway.tokenloom.internal"
        await late.close()


async def test_a_replaced_channel_is_closed_when_its_last_call_has_ended() -> None:
    opened: list[FakeChannel] = []
    generation = 0

    def connect() -> Any:
        opened.append(FakeChannel())
        return opened[-1]

    channel = RenewedChannel(connect, lambda: generation)
    begin = channel.stream_stream("/test.Peer/Echo")
    first, second = begin(), begin()
    generation = 1
    third = begin()
    assert len(opened) == 2
    assert third.of is opened[1]
    first.end()
    assert not opened[0].closed.is_set()
    second.end()
    async with asyncio.timeout(SOON):
        await opened[0].closed.wait()
    generation = 2
    third.end()
    assert not opened[1].closed.is_set()  # it is not known yet to be replaced
    begin()
    async with asyncio.timeout(SOON):
        await opened[1].closed.wait()
    generation = 3
    begin()
    await channel.close()
    assert len(opened) == 4
    assert all(each.closed.is_set() for each in opened)


class FakeCall:
    def __init__(self, of: "FakeChannel") -> None:
        self.of = of
        self._callbacks: list[Any] = []

    def add_done_callback(self, callback: Any) -> None:
        self._callbacks.append(callback)

    def end(self) -> None:
        for callback in self._callbacks:
            callback(self)


class FakeChannel:
    def __init__(self) -> None:
        self.closed = asyncio.Event()

    def stream_stream(self, *_: Any) -> Any:
        return lambda: FakeCall(self)

    async def close(self, _: float | None = None) -> None:
        self.closed.set()
