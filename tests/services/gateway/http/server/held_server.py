"""A server whose connections are stored in a holder's table, and what tests wait for."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, TypeVar

from tests.services.gateway.fakes import SOON
from tokenloom.request.limits import AdmissionLimit
from tokenloom.services.gateway.http.client_flow import ClientDisconnected
from tokenloom.services.gateway.http.held_response import HeldResponse
from tokenloom.services.gateway.http.held_table import HeldTable
from tokenloom.services.gateway.http.http_exchange import HttpExchange, respond_in_pieces, shaping_stage
from tokenloom.services.gateway.http.server import connection_holder
from tokenloom.services.gateway.http.server.connections import Connections
from tokenloom.services.gateway.http.server.held_protocol import HeldProtocol
from tokenloom.services.gateway.http.server.http_server import HttpServer
from tokenloom.services.gateway.records.media import HeldFiles

Found = TypeVar("Found")
SLOW_REQUEST = b"POST /slow HTTP/1.1\r\nhost: here\r\ncontent-length: 0\r\n\r\n"
REQUEST = b"POST /a HTTP/1.1\r\nhost: here\r\ncontent-length: 2\r\n\r\n{}"
HELD_REQUEST = b"POST /held HTTP/1.1\r\nhost: here\r\ncontent-length: 0\r\n\r\n"
LEFT: list[HeldResponse | None] = []
"""What stores the responses to clients that have left."""
TABLES: list[HeldTable] = []
"""Of all servers; the last one is that of the server that runs."""


async def answer(exchange: HttpExchange) -> None:
    """Answer whole, or continue what has begun."""
    if exchange.path == "/slow":
        await exchange.start(200, ())
        while exchange.response.is_open:
            await exchange.write(b"a piece")
            await asyncio.sleep(0)
    elif exchange.path in ("/effects", "/batches"):
        assert exchange.let_go is not None
        exchange.stays = exchange.path == "/batches"
        exchange.let_go()
        await exchange.respond(200, str(TABLES[-1].num_held).encode())
    elif exchange.path == "/large":
        await exchange.respond(200, bytes(12 << 20) + b"end of it")
    elif exchange.path == "/long":
        exchange.shaping = shaping_stage()
        await respond_in_pieces(exchange, iter((bytes(300_000), bytes(600_000), b"end of it")))
    elif exchange.path == "/kept":
        async with asyncio.timeout(SOON):
            with await exchange.read_body(1 << 20) as body:
                size = len(body.data)
        if exchange.headers.get(b"let-go"):
            assert exchange.let_go is not None
            exchange.let_go()
        await asyncio.sleep(0.1)
        await exchange.respond(200, b"%d bytes, %d held" % (size, TABLES[-1].num_held))
    elif exchange.path == "/read":
        await exchange.respond(200, f"was read: {exchange.was_read}".encode())
    elif exchange.path == "/wait":
        await asyncio.sleep(0.1)
        await exchange.respond(200, b"POST")
    elif exchange.path == "/left":
        with contextlib.suppress(ClientDisconnected), exchange.until_disconnected():
            await asyncio.sleep(SOON)
        await asyncio.sleep(0)
        assert exchange.hold is not None
        LEFT.append(exchange.hold(b""))
    elif exchange.path == "/late":
        assert exchange.hold is not None
        exchange.held = exchange.hold(b"")
        await exchange.respond(200, b"late")
        await asyncio.sleep(SOON)
    elif exchange.path in ("/held", "/files"):
        if exchange.path == "/files":  # its body had some, which are held apart
            exchange.body.files = HeldFiles({}, AdmissionLimit(1).empty())
        assert exchange.hold is not None
        exchange.held = exchange.hold(b"")
        await asyncio.sleep(SOON)
    elif exchange.past is not None and exchange.past.has_begun:
        await exchange.finish(b"the rest")
    else:
        await exchange.respond(200, exchange.method.encode())


@asynccontextmanager
async def serving(limit: int = 4) -> AsyncIterator[tuple[HttpServer, HeldTable]]:
    table, budget = HeldTable(4), AdmissionLimit(1 << 20)
    TABLES.append(table)
    server = HttpServer(answer, "127.0.0.1:0", budget=budget, connections=Connections(limit, limit), insecure=False)
    server.hold(partial(HeldProtocol, table=table))
    serve = asyncio.create_task(server.serve())
    try:
        yield server, table
    finally:
        await server.stop()
        await serve


@contextlib.contextmanager
def connection() -> Iterator[tuple[socket.socket, socket.socket]]:
    """The end of a gateway that was killed, and that of its client."""
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as client:
        client.setblocking(False)
        yield listener.accept()[0], client


async def until(find: Callable[[], Found]) -> Found:
    """Return the first true value of a function, which is called after each turn of the event loop."""
    async with asyncio.timeout(SOON):
        while not (found := find()):  # noqa: ASYNC110
            await asyncio.sleep(0)
    return found


async def received(client: socket.socket, end: bytes) -> bytes:
    data = b""
    async with asyncio.timeout(SOON):
        while not data.endswith(end):
            piece = await asyncio.get_running_loop().sock_recv(client, 1 << 16)
            assert piece, data
            data += piece
    return data


def port_of(server: HttpServer) -> int:
    return int(server.address.rpartition(":")[2])


def table_has_less(record: Any, size: int) -> bool:
    return len(record.past.request) < size


def idle_ones(table: HeldTable) -> list[int]:
    return sorted(each for each in connection_holder._descriptors() if table.waiting(each) == b"")


def is_ended(client: socket.socket) -> bool:
    """Whether the connection has ended, without a byte more."""
    try:
        return client.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionResetError:
        return True
