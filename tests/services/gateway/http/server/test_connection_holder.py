"""What a gateway does with a connection that it is given, and what a holder gives."""

import asyncio
import contextlib
import json
import os
import socket
import struct
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from tests.services.gateway.fakes import SOON
from tests.services.gateway.http.server.held_server import (
    HELD_REQUEST,
    REQUEST,
    SLOW_REQUEST,
    connection,
    is_ended,
    port_of,
    received,
    serving,
    until,
)
from tokenloom.services.gateway.http.client_flow import TurnShare
from tokenloom.services.gateway.http.held_response import HeldResponse
from tokenloom.services.gateway.http.held_table import (
    ARRIVED,
    BEGUN,
    CHUNKED,
    ENDED,
    FOLLOWED,
    HeldRecord,
    PastResponse,
)
from tokenloom.services.gateway.http.server import connection_holder, http_protocol
from tokenloom.services.gateway.http.server.connection_holder import TakenConnections
from tokenloom.services.gateway.http.tcp_counters import num_read
from tokenloom.services.gateway.metrics.gateway_metrics import count_taken

_LENGTHS = struct.Struct(">III")


async def test_a_response_that_has_begun_goes_on_and_the_connection_stays() -> None:
    async with serving() as (server, table):
        with connection() as (ours, client):
            past = PastResponse(REQUEST, b"5\r\nhello\r\n", BEGUN | CHUNKED)
            assert await server.take(past, ours) == "begun"
            assert await received(client, b"0\r\n\r\n") == b"5\r\nhello\r\n8\r\nthe rest\r\n0\r\n\r\n"
            client.send(b"GET /b HTTP/1.1\r\nhost: here\r\n\r\n")
            assert (await received(client, b"GET")).startswith(b"HTTP/1.1 200 OK\r\n")
        await until(lambda: not table.num_held)


async def test_the_rest_of_a_further_request_ends_no_response_that_is_being_made() -> None:
    """Another gateway has read its beginning: it is no request, and comes while the answer before it is computed."""
    async with serving() as (server, table):
        for state in (0, ARRIVED):
            with connection() as (ours, client):
                request = REQUEST.replace(b"/a", b"/wait")
                assert await server.take(PastResponse(request, state=state | FOLLOWED), ours) == "not_begun"
                client.send(rest := b"HTTP/1.1\r\nhost: here\r\n\r\n")
                (record,) = table.records()
                await until(lambda record=record: num_read(record.descriptor) == len(rest))  # type: ignore[misc]
                assert connection_holder._whole(table, record).past.request == request
                assert (await received(client, b"POST")).startswith(b"HTTP/1.1 200 OK\r\n")


async def test_a_connection_ends_with_its_response_if_a_further_request_was_read() -> None:
    """That request is lost with the gateway that has read it, and its client would wait for the answer."""
    async with serving() as (server, _):
        for state, tail in ((BEGUN | CHUNKED, b""), (BEGUN | CHUNKED | ENDED, b"0\r\n\r\n")):
            with connection() as (ours, client):
                await server.take(PastResponse(REQUEST, tail, state | FOLLOWED), ours)
                await received(client, b"0\r\n\r\n")
                async with asyncio.timeout(SOON):
                    assert await asyncio.get_running_loop().sock_recv(client, 1) == b""


async def test_a_request_for_batches_ends_the_connection_of_another_gateway() -> None:
    """As one that waits for its first request, and is used for a batch of the killed gateway."""
    async with serving() as (server, _):
        with connection() as (ours, client):
            assert await server.take(connection_holder.IDLE.past, ours) == "idle"
            client.send(REQUEST)
            await received(client, b"POST")
            client.send(REQUEST.replace(b"/a", b"/batches"))
            assert await until(lambda: is_ended(client))


async def test_a_request_behind_one_that_is_made_again_ends_its_connection() -> None:
    """The first gateway has read it, so that no other one answers it; also the third gateway knows."""
    async with serving() as (server, table):
        with connection() as (ours, client):
            assert await server.take(PastResponse(SLOW_REQUEST.replace(b"slow", b"wait"), state=ARRIVED), ours)
            client.send(REQUEST)
            await until(lambda: any(record.past.state & FOLLOWED for record in table.records()))
            (record,) = table.records()
            assert record.rest(record.base) == PastResponse(record.past.request, state=ARRIVED | FOLLOWED)
        await until(lambda: not table.num_held)
        with connection() as (ours, client):
            request = REQUEST.replace(b"/a", b"/wait")
            await server.take(PastResponse(request, state=ARRIVED | FOLLOWED), ours)
            (record,) = table.records()
            assert record.past.state == ARRIVED | FOLLOWED
            await received(client, b"POST")
            async with asyncio.timeout(SOON):
                assert await asyncio.get_running_loop().sock_recv(client, 1) == b""


async def test_requests_of_one_piece_are_answered_by_the_next_gateway() -> None:
    async with serving() as (server, table):
        with connection() as (ours, client):
            assert await server.take(PastResponse(b"", state=ARRIVED), ours) == "idle"
            client.send(REQUEST.replace(b"/a", b"/wait") + REQUEST)
            records = await until(lambda: list(table.records()))
            past = records[0].rest(records[0].base)
            assert past is not None
            assert (past.request.count(b"POST"), past.state) == (2, ARRIVED)
            with connection() as (again, other):
                await server.take(past, again)
                data = b""
                while data.count(b"200 OK") < 2:
                    data += await received(other, b"POST")


async def test_a_response_that_says_so_ends_the_connection_elsewhere_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that begins before the body of its request has arrived: the rest is no request."""
    monkeypatch.setattr(HeldResponse, "free_if_taken", lambda _: False)
    async with serving() as (server, table):
        for request in (REQUEST[:-1], REQUEST.replace(b"host: here", b"host: here\r\nconnection: close")):
            with socket.create_connection(("127.0.0.1", port_of(server))) as client:
                client.setblocking(False)
                client.send(request)
                assert b"\r\nconnection: close\r\n" in await received(client, b"POST")
        states = [record.past.state for record in table.records()]
        assert states == [ARRIVED | BEGUN | FOLLOWED] * 2


async def test_what_was_read_behind_a_complete_response_ends_the_connection() -> None:
    """Although the kernel has all of the response: the client waits for another one, which no gateway makes."""
    async with serving() as (server, _):
        with connection() as (ours, client):
            holder, gateway = socket.socketpair()
            with holder, gateway:
                past = PastResponse(REQUEST, state=BEGUN | CHUNKED | ENDED | FOLLOWED)
                record = HeldRecord(0, ours.fileno(), 0, 0, 0, b"", past)
                giving = asyncio.create_task(asyncio.to_thread(connection_holder._give, holder, record, ours))
                given = await asyncio.to_thread(connection_holder._read_past, gateway)
                gateway.send(b"t")
                assert await giving
                ours.close()
                assert given is not None
                assert await server.take(*given) == "complete"
                async with asyncio.timeout(SOON):
                    assert await asyncio.get_running_loop().sock_recv(client, 1) == b""


async def test_what_waits_for_a_turn_of_the_event_loop_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving() as (server, table):
        with connection() as (ours, client):
            assert await server.take(PastResponse(SLOW_REQUEST), ours) == "not_begun"
            await until(lambda: list(table.records()))
            monkeypatch.setattr(TurnShare, "take", lambda _: False)
            monkeypatch.setattr(TurnShare, "call", lambda *_: None)
            client.send(REQUEST)
            await until(lambda: any(record.past.state & FOLLOWED for record in table.records()))


async def test_the_end_of_a_response_arrives_although_more_is_sent() -> None:
    """The kernel resets a closed connection at which data arrives, and the client may lose what it has not read."""
    async with serving() as (server, _):
        for state, tail in ((BEGUN | CHUNKED, b"5\r\nhello\r\n"), (BEGUN | CHUNKED | ENDED, b"0\r\n\r\n")):
            with connection() as (ours, client):
                client.send(b"HTTP/1.1\r\nhost: here\r\n")  # the rest of what the killed gateway has read
                await server.take(PastResponse(REQUEST, tail, state | FOLLOWED), ours)
                for _ in range(10):
                    await asyncio.sleep(0.005)
                    client.send(b"and-so: on\r\n")
                assert (await received(client, b"0\r\n\r\n")).startswith(tail)


async def test_the_next_response_is_held_although_the_task_of_the_last_one_runs() -> None:
    async with serving() as (server, table):
        with connection() as (ours, client):
            request = b"POST /late HTTP/1.1\r\nhost: here\r\ncontent-length: 0\r\n\r\n"
            assert await server.take(PastResponse(request), ours) == "not_begun"
            await received(client, b"late")
            client.send(HELD_REQUEST)
            await until(lambda: any(b"/held" in record.past.request for record in table.records()))
            assert table.num_held == 1


async def test_no_words_of_a_refusal_come_within_a_response() -> None:
    """As where a request has as many fields as it may have, before its id and its length are added."""
    fields = b"".join(b"a%d: b\r\n" % number for number in range(120))
    async with serving() as (server, _):
        with connection() as (ours, client):
            request = b"POST /a HTTP/1.1\r\nhost: here\r\n%bcontent-length: 2\r\n\r\n{}" % fields
            assert await server.take(PastResponse(request, b"5\r\nhello\r\n", BEGUN | CHUNKED), ours) == "refused"
            async with asyncio.timeout(SOON):
                with contextlib.suppress(ConnectionResetError):
                    assert await asyncio.get_running_loop().sock_recv(client, 1 << 16) == b""


async def test_nothing_is_given_to_a_gateway_that_does_not_answer(
    socket_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that hangs, or one that drains and has not accepted the connection of the holder."""
    monkeypatch.setattr(connection_holder, "_READY_SECONDS", 0.05)
    path = socket_dir / "gateway-0.held"
    async with serving() as (server, table):
        with connection() as (ours, client), ours, socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))
            listener.listen()
            assert await server.take(PastResponse(SLOW_REQUEST), ours.dup()) == "not_begun"
            records = await until(lambda: list(table.records()))
            held: list[Any] = [(records[0], ours)]
            await asyncio.to_thread(connection_holder._give_all, table, path, held)
            assert len(held) == 1
            assert list(table.records())
            client.close()


async def test_a_descriptor_that_names_another_connection_now_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is closed with all others, so that the other side learns of the gateway's end at once."""
    kept: list[int] = []
    monkeypatch.setattr(connection_holder, "_wait_for_end", os.close)
    monkeypatch.setattr(connection_holder, "_close_all_but", kept.extend)
    async with serving() as (server, table):
        with connection() as (ours, _), socket.socket(socket.AF_UNIX) as other:
            assert await server.take(PastResponse(SLOW_REQUEST), ours) == "not_begun"
            (record,) = table.records()
            os.dup2(other.fileno(), record.descriptor)
            connection_holder._hold(table, tmp_path, os.getpid(), os.getppid())
            assert record.descriptor not in kept
            (above,) = kept
            os.close(above)


async def test_a_holder_that_follows_a_killed_one_has_what_is_stored_in_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise it would fail at the first of them, and all connections end."""
    kept: list[int] = []
    monkeypatch.setattr(connection_holder, "_wait_for_end", os.close)
    monkeypatch.setattr(connection_holder, "_close_all_but", kept.extend)
    monkeypatch.setattr(connection_holder, "GIVE_SECONDS", 0.0)
    large = SLOW_REQUEST.replace(b"host", b"x: %b\r\nhost" % (b"y" * (16 << 10)))
    async with serving() as (server, table):
        with connection() as (ours, client):
            monkeypatch.setattr(connection_holder, "_connection_of", lambda record: client)
            assert await server.take(PastResponse(large), ours) == "not_begun"
            (record,) = table.records()
            connection_holder._hold(table, tmp_path, os.getpid(), os.getppid())
            assert len(record.files) == 1
            assert record.files < set(kept)
            os.close(next(each for each in kept if each not in (client.fileno(), *record.files)))  # of this process


async def test_a_response_of_which_nothing_was_sent_is_made() -> None:
    async with serving() as (server, _):
        with connection() as (ours, client):
            assert await server.take(PastResponse(REQUEST), ours) == "not_begun"
            assert (await received(client, b"POST")).startswith(b"HTTP/1.1 200 OK\r\n")


async def test_a_response_that_was_complete_gets_its_last_bytes() -> None:
    async with serving() as (server, _):
        for state in (BEGUN | CHUNKED | ENDED, BEGUN):
            with connection() as (ours, client):
                assert await server.take(PastResponse(REQUEST, b"of it\r\n0\r\n\r\n", state), ours) == "complete"
                assert await received(client, b"0\r\n\r\n") == b"of it\r\n0\r\n\r\n"
                client.send(b"GET /b HTTP/1.1\r\nhost: here\r\n\r\n")
                assert (await received(client, b"GET")).startswith(b"HTTP/1.1 200 OK\r\n")


async def test_a_connection_behind_a_complete_response_is_an_idle_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends neither when the head of a first request is due, nor stays if its client asked for its end."""
    monkeypatch.setattr(http_protocol, "HEAD_SECONDS", 0.01)
    async with serving() as (server, _):
        for field in (b"x: connection: close", b"connection: keep-alive", b"connection:closed"):
            with connection() as (ours, client):
                request = REQUEST.replace(b"host: here", b"host: here\r\n" + field)
                assert await server.take(PastResponse(request, b"0\r\n\r\n", BEGUN), ours) == "complete"
                await asyncio.sleep(0.1)
                await received(client, b"0\r\n\r\n")
                client.send(b"GET /b HTTP/1.1\r\nhost: here\r\n\r\n")
                assert (await received(client, b"GET")).startswith(b"HTTP/1.1 200 OK\r\n")
        for field in (b"Connection: Close", b"connection:close", b"connection: te, close", b"connection:\tclose ,te"):
            with connection() as (ours, client):
                closing = REQUEST.replace(b"host: here", b"host: here\r\n" + field)
                assert await server.take(PastResponse(closing, b"0\r\n\r\n", BEGUN), ours) == "complete"
                await received(client, b"0\r\n\r\n")
                async with asyncio.timeout(SOON):
                    assert await asyncio.get_running_loop().sock_recv(client, 1) == b""


async def test_a_gateway_with_too_many_connections_writes_nothing_into_a_response() -> None:
    async with serving(limit=1) as (server, _):
        with connection() as (first, _), connection() as (second, client):
            assert await server.take(PastResponse(REQUEST), first) == "not_begun"
            past = PastResponse(REQUEST, b"5\r\nhello\r\n", BEGUN | CHUNKED)
            assert await server.take(past, second) == "refused"
            async with asyncio.timeout(SOON):
                assert await asyncio.get_running_loop().sock_recv(client, 1 << 16) == b""


async def test_a_request_that_cannot_be_read_again_ends_its_connection() -> None:
    async with serving() as (server, _):
        with connection() as (ours, client):
            past = PastResponse(b"POST /a HTTP/1.1\r\n", b"5\r\nhello\r\n", BEGUN | CHUNKED)
            assert await server.take(past, ours) == "refused"
            async with asyncio.timeout(SOON):
                with contextlib.suppress(ConnectionResetError):
                    assert await asyncio.get_running_loop().sock_recv(client, 1 << 16) == b""


async def test_a_message_that_no_holder_sends_harms_no_other(socket_dir: Path) -> None:
    async with serving() as (server, _):
        taken = TakenConnections(socket_dir, "gateway-0", server.take, count_taken(CollectorRegistry()))
        task = asyncio.create_task(taken.serve())
        path, loop = socket_dir / "gateway-0.held", asyncio.get_running_loop()
        await until(path.exists)
        async with asyncio.timeout(SOON):
            with socket.socket(socket.AF_UNIX) as wrong:
                wrong.setblocking(False)
                await loop.sock_connect(wrong, str(path))
                assert await loop.sock_recv(wrong, 1) == b"r"
                await loop.sock_sendall(wrong, b"no connection comes with it")
                with contextlib.suppress(ConnectionResetError):
                    assert await loop.sock_recv(wrong, 1) == b""
            with connection() as (ours, client), socket.socket(socket.AF_UNIX) as peer:
                peer.setblocking(False)
                await loop.sock_connect(peer, str(path))
                assert await loop.sock_recv(peer, 1) == b"r"
                about = json.dumps([0, "", 0, [], 0]).encode()
                socket.send_fds(peer, [_LENGTHS.pack(len(about), len(REQUEST), 0)], [ours.fileno()])
                await loop.sock_sendall(peer, about + REQUEST)
                assert await loop.sock_recv(peer, 1) == b"t"
                ours.close()
                assert (await received(client, b"POST")).startswith(b"HTTP/1.1 200 OK\r\n")
        task.cancel()
        await asyncio.wait([task])
        assert not path.exists()
