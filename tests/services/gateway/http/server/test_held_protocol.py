"""What a connection stores of its requests, and when another gateway may serve it."""

import asyncio
import os
import socket

import pytest

from tests.services.gateway.fakes import SOON
from tests.services.gateway.http.server.held_server import (
    HELD_REQUEST,
    LEFT,
    REQUEST,
    SLOW_REQUEST,
    connection,
    idle_ones,
    port_of,
    received,
    serving,
    table_has_less,
    until,
)
from tokenloom.services.gateway.http.held_table import ARRIVED, FOLLOWED, PastResponse
from tokenloom.services.gateway.http.server import connection_holder, held_protocol
from tokenloom.services.gateway.http.server.held_protocol import HeldProtocol
from tokenloom.services.gateway.http.tcp_counters import num_read, num_taken


async def test_a_request_behind_another_one_is_noted() -> None:
    async with serving() as (server, table):
        with connection() as (ours, client):
            taking = asyncio.create_task(server.take(PastResponse(SLOW_REQUEST), ours))
            assert await taking == "not_begun"
            client.send(REQUEST)
            await until(lambda: any(record.past.state & FOLLOWED for record in table.records()))


async def test_the_body_of_a_request_that_asks_for_another_protocol_is_stored() -> None:
    """As Java's client sends it, in a piece of its own."""
    fields = b"host: here\r\nconnection: upgrade, http2-settings\r\nupgrade: h2c\r\nhttp2-settings: AAEAAEAA\r\n"
    head = b"POST /wait HTTP/1.1\r\n" + fields + b"content-length: 2\r\n\r\n"
    async with serving() as (server, table):
        with connection() as (ours, client):
            assert await server.take(PastResponse(b"", state=ARRIVED), ours) == "idle"
            for piece in (head, b"{", b"}"):
                client.send(piece)
                await asyncio.sleep(0.01)
            (record,) = table.records()
            assert (record.past.request, record.past.state) == (head + b"{}", ARRIVED)
            await received(client, b"POST")


async def test_a_request_that_another_gateway_has_read_is_known_as_such() -> None:
    """The next one on its connection is a new one."""
    request = REQUEST.replace(b"/a", b"/read")
    async with serving() as (server, _):
        for is_known in (False, True):
            with connection() as (ours, client):
                past = PastResponse(request, state=0 if is_known else ARRIVED)
                assert await server.take(past, ours) == "not_begun"
                assert await received(client, b"True")
                client.send(request)
                assert await received(client, b"False")


async def test_a_part_of_a_further_request_is_noted_too() -> None:
    """Also what was read with the request itself, before its response is held."""
    async with serving() as (server, table):
        with socket.create_connection(("127.0.0.1", int(server.address.rpartition(":")[2]))) as client:
            client.send(HELD_REQUEST + b"POST /a HTTP")
            records = await until(lambda: [each for each in table.records() if each.past.is_known])
            assert records[0].past.state & FOLLOWED


async def test_what_has_arrived_of_a_request_goes_on_elsewhere() -> None:
    """Its rest comes on the same connection, also where the head alone was read, or a part of it."""
    for request in (REQUEST.replace(b"/a", b"/wait"), SLOW_REQUEST.replace(b"slow", b"wait")):
        for size in (1, 20, len(request) - 1, len(request)):
            async with serving() as (server, table), serving() as (other, _):
                with socket.create_connection(("127.0.0.1", port_of(server))) as client:
                    client.setblocking(False)
                    client.send(request[:size])
                    async with asyncio.timeout(SOON):
                        while not (records := list(table.records())) or table_has_less(records[0], size):  # noqa: ASYNC110
                            await asyncio.sleep(0)
                        past = records[0].rest(records[0].base)
                        assert past is not None
                        assert (past.request, past.is_known, past.has_begun) == (request[:size], False, False)
                        ours = socket.socket(fileno=os.dup(records[0].descriptor))
                        for each in tuple(server._server.server_state.connections):
                            each.transport.abort()  # type: ignore[attr-defined]
                        assert await other.take(past, ours) == "not_begun"
                        client.send(request[size:])
                        assert (await received(client, b"POST")).startswith(b"HTTP/1.1 200 OK\r\n")


async def num_read_is(descriptor: int, count: int) -> None:
    await until(lambda: num_read(descriptor) == count)


@pytest.mark.parametrize("size", [0, 20])
async def test_what_was_read_and_not_stored_goes_on_elsewhere(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A gateway may be killed in between, when it has read the first bytes of a request or further ones."""
    async with serving() as (server, table), serving() as (other, _):
        table.port = port_of(server)
        with socket.create_connection(("127.0.0.1", table.port)) as client:
            client.setblocking(False)
            (descriptor,) = await until(lambda: idle_ones(table))
            client.send(REQUEST[:size])
            await num_read_is(descriptor, size)
            await until(lambda: len(list(table.records())) == bool(size))
            with monkeypatch.context() as killed:
                killed.setattr(HeldProtocol, "data_received", lambda *_: None)
                client.send(REQUEST[size:])
                await num_read_is(descriptor, len(REQUEST))
                held = connection_holder._held_of(table)
                (record,) = [each for each, found in held if found.fileno() == descriptor]
                for _, found in held:
                    found.detach()
                past = record.past if record.slot < 0 else record.rest(record.base)
                assert past is not None
                assert (past.request, past.is_known, past.state & FOLLOWED) == (REQUEST, False, 0)
            ours = socket.socket(fileno=os.dup(descriptor))
            for each in tuple(server._server.server_state.connections):
                each.transport.abort()  # type: ignore[attr-defined]
            assert await other.take(past, ours) == "not_begun"
            assert (await received(client, b"POST")).startswith(b"HTTP/1.1 200 OK\r\n")


async def test_what_was_read_behind_a_request_and_not_noted_ends_the_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise its client would wait for the answer to what the killed gateway had read."""
    async with serving() as (server, table):
        with connection() as (ours, client):
            assert await server.take(PastResponse(SLOW_REQUEST.replace(b"slow", b"held")), ours) == "not_begun"
            (record,) = await until(lambda: list(table.records()))
            assert connection_holder._whole(table, record) == record
            monkeypatch.setattr(HeldProtocol, "data_received", lambda *_: None)
            client.send(REQUEST)
            await num_read_is(record.descriptor, len(REQUEST))
            assert connection_holder._whole(table, record).past.state == FOLLOWED


async def test_a_request_of_which_a_repeat_would_act_twice_ends_with_its_gateway() -> None:
    async with serving() as (server, table):
        with socket.create_connection(("127.0.0.1", port_of(server))) as client:
            client.setblocking(False)
            client.send(REQUEST.replace(b"/a", b"/effects"))
            assert (await received(client, b"0")).endswith(b"\r\n\r\n0")  # nothing is held while it is answered
            client.send(b"POST /a HTTP/1.0\r\nhost: here\r\n\r\n")
            await received(client, b"POST")
            await until(lambda: not table.num_held)


@pytest.mark.parametrize("head", [b"", b"let-go: yes\r\n"])
async def test_a_large_request_is_stored_as_it_arrives(head: bytes) -> None:
    """Unless a repeat of it would act twice."""
    size, where, loop = 100_000, b"content-type: application/json\r\n", asyncio.get_running_loop()
    request = b"POST /kept HTTP/1.1\r\nhost: here\r\n%b%bcontent-length: %d\r\n\r\n" % (head, where, size)
    async with serving() as (server, table):
        with socket.create_connection(("127.0.0.1", port_of(server))) as client:
            client.setblocking(False)
            await loop.sock_sendall(client, half := request + b"x" * (size // 2))
            await until(lambda: any(each.past.request == half for each in table.records()))
            (record,) = table.records()
            past, ours = record.rest(record.base), socket.socket(fileno=os.dup(record.descriptor))
            with ours:
                await loop.sock_sendall(client, b"x" * (size // 2))
                assert (await received(client, b"held")).endswith(b"100000 bytes, %d held" % (not head))
            await until(lambda: not table.num_held)
            assert table.file_bytes == 0
    assert past is not None
    assert not past.is_known
    async with serving() as (server, table):
        with connection() as (ours, client):
            assert await server.take(past, ours) == "not_begun"
            await loop.sock_sendall(client, b"x" * (size // 2))
            assert (await received(client, b"held")).endswith(b"100000 bytes, %d held" % (not head))


async def test_a_request_with_files_is_held_as_it_came() -> None:
    """It cannot be written anew: its body has their digests by then."""
    request = HELD_REQUEST.replace(b"/held", b"/files")
    async with serving() as (server, table):
        with socket.create_connection(("127.0.0.1", port_of(server))) as client:
            client.send(request)
            records = await until(lambda: [each for each in table.records() if each.past.is_known])
            assert records[0].past.request == request
        await until(lambda: not table.num_held)
        table._num_arriving = 4  # as many as may arrive
        with socket.create_connection(("127.0.0.1", port_of(server))) as client:
            client.send(request + b"POST /a")
            await until(lambda: server._server.server_state.tasks)
            await asyncio.sleep(0.01)
            assert not table.num_held


async def test_a_connection_without_a_request_is_idle() -> None:
    """So another gateway may read on; while a request is in work, and where a part of one was read, none may."""
    async with serving() as (server, table):
        table.port = port_of(server)
        with socket.create_connection(("127.0.0.1", table.port)) as client:
            client.setblocking(False)
            (descriptor,) = await until(lambda: idle_ones(table))
            for _ in range(2):
                client.send(REQUEST)
                await received(client, b"POST")
                assert idle_ones(table) == [descriptor]
            client.send(SLOW_REQUEST.replace(b"slow", b"held"))
            await until(lambda: table.num_held)
            assert idle_ones(table) == []
        table.port += 1
        with socket.create_connection(("127.0.0.1", port_of(server))):
            await asyncio.sleep(0.01)
            assert idle_ones(table) == []  # of another listener


async def test_a_connection_of_another_gateway_is_idle_although_its_port_is_another() -> None:
    """The gateway that has taken it may be killed too. Once given away it is nothing for a further one."""
    async with serving() as (server, table):
        table.port = port_of(server)
        with connection() as (ours, client):
            assert await server.take(connection_holder.IDLE.past, ours) == "idle"
            for _ in range(2):
                (descriptor,) = await until(lambda: idle_ones(table))
                client.send(REQUEST)
                await received(client, b"POST")
            table.note_given(descriptor)
            assert idle_ones(table) == []


async def test_an_idle_connection_is_served_by_the_next_gateway() -> None:
    async with serving() as (server, _):
        with connection() as (ours, client):
            assert await server.take(connection_holder.IDLE.past, ours) == "idle"
            for _ in range(2):
                client.send(REQUEST)
                assert (await received(client, b"POST")).startswith(b"HTTP/1.1 200 OK\r\n")


async def test_a_connection_is_idle_again_after_requests_that_end_with_their_gateway() -> None:
    """Also one that was idle when it was taken: its second gateway may be killed too."""
    async with serving() as (server, table):
        table.port = port_of(server)
        with socket.create_connection(("127.0.0.1", table.port)) as client:
            client.setblocking(False)
            client.send(REQUEST.replace(b"/a", b"/effects"))
            await received(client, b"0")
            (descriptor,) = idle_ones(table)
            ours = socket.socket(fileno=os.dup(descriptor))
            for each in tuple(server._server.server_state.connections):
                each.transport.abort()  # type: ignore[attr-defined]
            await asyncio.sleep(0)
            assert await server.take(connection_holder.IDLE.past, ours) == "idle"
            assert len(idle_ones(table)) == 1
            client.send(REQUEST)
            await received(client, b"POST")


async def test_a_connection_stays_with_its_gateway_after_a_request_for_batches() -> None:
    """Another gateway has other batches, and answered 404."""
    async with serving() as (server, table):
        table.port = port_of(server)
        with socket.create_connection(("127.0.0.1", table.port)) as client:
            client.setblocking(False)
            for path, num_idle in ((b"/batches", 0), (b"/effects", 1), (b"/batches", 0)):
                client.send(REQUEST.replace(b"/a", path))
                await received(client, b"0")
                assert len(idle_ones(table)) == num_idle


async def test_a_connection_with_unsent_bytes_is_not_idle() -> None:
    """Another gateway has not the rest of a large answer, and its first words would be taken for that."""
    async with serving() as (server, table):
        table.port = port_of(server)
        with socket.create_connection(("127.0.0.1", table.port)) as client:
            client.setblocking(False)
            client.send(REQUEST.replace(b"/a", b"/large"))
            await until(lambda: server._server.server_state.total_requests)
            assert idle_ones(table) == []
            last = b""
            async with asyncio.timeout(SOON):
                while not last.endswith(b"end of it"):
                    last = last[-9:] + await asyncio.get_running_loop().sock_recv(client, 1 << 20)
            await until(lambda: idle_ones(table))


async def test_a_connection_is_idle_as_soon_as_its_last_response_has_no_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the kernel was late to take all of it: in between, the connection would be closed."""
    monkeypatch.setattr(held_protocol, "_LOOK_SECONDS", SOON)
    async with serving() as (server, table):
        table.port = port_of(server)
        server._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        with socket.create_connection(("127.0.0.1", table.port)) as client:
            client.setblocking(False)
            client.send(REQUEST.replace(b"/a", b"/long"))
            (record,) = await until(lambda: [each for each in table.records() if each.past.is_over])
            assert record.missing(num_taken(record.descriptor))
            await received(client, b"end of it")
            await until(lambda: not table.num_held)
            assert len(idle_ones(table)) == 1


async def test_a_request_is_stored_in_no_slot_of_an_earlier_one() -> None:
    """That slot may be another connection's by now. Both requests came in one piece."""
    async with serving() as (server, table):
        with socket.create_connection(("127.0.0.1", port_of(server))) as client:
            client.setblocking(False)
            client.send(REQUEST + HELD_REQUEST)
            await received(client, b"POST")
            records = await until(lambda: [each for each in table.records() if each.past.is_known])
            assert records[0].past.request.startswith(b"POST /held ")
            assert table.num_held == 1
        await until(lambda: not table.num_held)


async def test_nothing_is_stored_for_a_client_that_has_left() -> None:
    """Its slot is free, and may be another connection's, when the body of its request was read."""
    async with serving() as (server, table):
        with socket.create_connection(("127.0.0.1", port_of(server))) as client:
            client.send(HELD_REQUEST.replace(b"/held", b"/left"))
        await until(lambda: LEFT)
        assert LEFT.pop() is None
        assert (table.num_held, list(table.records())) == (0, [])
