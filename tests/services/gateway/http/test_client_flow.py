"""A connection is read when no owner holds reading back, and a client that leaves meanwhile is noticed. Work
that many connections cause at once is spread over turns of the event loop."""

import asyncio
import itertools
import socket
from collections.abc import AsyncIterator

import pytest

from tests.loop_clock import pass_time, settle
from tests.services.gateway.http.server.raw_connection import Connection
from tokenloom.services.gateway.http.client_flow import LOOK_SECONDS, ClientFlow, TurnShare, has_left

REQUEST = b"GET /x HTTP/1.1\r\nhost: a\r\n\r\n"


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


async def test_each_turn_has_its_share_and_the_rest_waits_in_order() -> None:
    share = TurnShare(3)
    done: list[int] = []

    async def piece(number: int) -> None:
        await share.wait()
        done.append(number)

    pieces = [asyncio.ensure_future(piece(number)) for number in range(9)]
    counts = [0]
    for _ in range(20):
        await asyncio.sleep(0)
        counts.append(len(done))
    await asyncio.gather(*pieces)
    assert done == list(range(9))
    assert max(after - before for before, after in itertools.pairwise(counts)) == 3


async def test_a_piece_that_is_cancelled_holds_nothing_up() -> None:
    share = TurnShare(1)
    pieces = [asyncio.ensure_future(share.wait()) for _ in range(3)]
    await asyncio.sleep(0)
    pieces[1].cancel()
    await asyncio.wait_for(pieces[2], 10)
    await settle()
    assert share.take()


async def test_reads_of_many_connections_are_parsed_over_several_turns() -> None:
    share = TurnShare(2)
    connections = [Connection(reads=False, turns=share) for _ in range(5)]
    for connection in connections:
        connection.send(REQUEST)
    assert [connection.parser.num_bytes > 0 for connection in connections] == [True, True, False, False, False]
    assert [connection.protocol.flow.read_paused for connection in connections] == [False, False, True, True, True]
    assert connections[4].protocol.idle_seconds is None, "it is not closed to make room"
    connections[4].protocol._on_framing_timeout()
    assert not connections[4].transport.is_closed, "the client is not late: the gateway is"
    connections[3].transport.close()
    await settle()
    assert [connection.statuses for connection in connections] == [[200], [200], [200], [], [200]]
    assert not any(
        connection.protocol.flow.read_paused for connection in connections if not connection.transport.is_closed
    )
