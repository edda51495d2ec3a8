"""A connection is read when no owner holds reading back, and a client that leaves meanwhile is noticed."""

import asyncio
import socket
from collections.abc import AsyncIterator

import pytest

from tests.loop_clock import pass_time, settle
from tokenloom.services.gateway.http.client_flow import LOOK_SECONDS, ClientFlow, has_left


class Server(asyncio.Protocol):
    """The gateway's side of a connection: keeps what it reads."""

    def __init__(self) -> None:
        self.read = b""
        self.lost = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self.flow = ClientFlow(transport)

    def data_received(self, data: bytes) -> None:
        self.read += data

    def connection_lost(self, exc: Exception | None) -> None:
        self.flow.lose()
        self.lost.set()


@pytest.fixture
async def sides() -> AsyncIterator[tuple[Server, socket.socket]]:
    ours, clients = socket.socketpair()
    _, server = await asyncio.get_running_loop().create_connection(Server, sock=ours)
    yield server, clients
    server.transport.abort()
    clients.close()
    await asyncio.wait_for(server.lost.wait(), 30)


async def test_an_owner_releases_what_it_has_held_only(sides: tuple[Server, socket.socket]) -> None:
    server, client = sides
    server.flow.hold("body")
    server.flow.hold("pipeline")
    server.flow.hold("pipeline")
    client.send(b"x")
    server.flow.release("pipeline")
    server.flow.release("pipeline")
    server.flow.release("another")
    await settle()
    assert (server.read, server.flow.read_paused) == (b"", True)
    server.flow.release("body")
    await settle()
    assert (server.read, server.flow.read_paused) == (b"x", False)


async def test_all_owners_are_released_when_the_connection_ends(sides: tuple[Server, socket.socket]) -> None:
    server, client = sides
    server.flow.hold("body")
    server.flow.hold("turn", is_brief=True)
    server.flow.release_all()
    client.send(b"x")
    await settle()
    assert server.read == b"x"


@pytest.mark.parametrize("unread", [b"", b"another request"])
async def test_a_client_that_leaves_while_it_is_not_read_is_noticed(
    sides: tuple[Server, socket.socket], unread: bytes
) -> None:
    server, client = sides
    server.flow.hold("pipeline")
    client.sendall(unread)
    for _ in range(3):
        pass_time(LOOK_SECONDS)
        await settle()
        assert not server.lost.is_set(), "it waits for its answer"
    client.close()
    pass_time(LOOK_SECONDS)
    await settle()
    assert server.lost.is_set()
    assert server.read == b""


async def test_a_connection_that_is_read_again_is_not_looked_at(sides: tuple[Server, socket.socket]) -> None:
    server, client = sides
    server.flow.hold("turn", is_brief=True)
    server.flow.hold("body")
    server.flow.release("turn")
    server.flow.release("body")
    pass_time(LOOK_SECONDS)
    await settle()
    assert server.flow._timer is None
    assert not has_left(server.transport)
    client.shutdown(socket.SHUT_WR)
    assert has_left(server.transport)
