"""Where HTTP is served, and how it ends."""

import asyncio
import logging
import os
import socket
from pathlib import Path

import httpx
import pytest

from tests.plain_text import PLAIN_TEXT
from tests.services.gateway.fakes import MODEL, SOON, FakeMesh
from tokenloom.request import errors
from tokenloom.request.limits import AdmissionLimit
from tokenloom.services.gateway.http.server.connections import Connections
from tokenloom.services.gateway.http.server.http_server import HttpServer


async def nothing(*_: object) -> None:
    raise AssertionError


def test_a_port_in_use_is_an_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(errors.Unavailable, match="http_listen"):
            HttpServer(nothing, address, budget=AdmissionLimit(1), connections=Connections(1, 1), insecure=False)  # type: ignore[arg-type]


def test_open_addresses_need_insecure() -> None:
    with pytest.raises(errors.InvalidArgument, match="http_listen"):
        HttpServer(nothing, "0.0.0.0:0", budget=AdmissionLimit(1), connections=Connections(1, 1), insecure=False)  # type: ignore[arg-type]


async def test_a_unix_socket(socket_dir: Path) -> None:
    path = socket_dir / "http"
    async with FakeMesh(socket_dir).gateway(http_listen=f"unix:{path}"):
        transport = httpx.AsyncHTTPTransport(uds=str(path))
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as http:
            assert (await http.get("/health")).status_code == 200
    assert not path.exists()


def serving(path: Path) -> HttpServer:
    return HttpServer(nothing, f"unix:{path}", budget=AdmissionLimit(1), connections=Connections(1, 1), insecure=False)  # type: ignore[arg-type]


async def test_the_unix_socket_of_a_killed_gateway_is_replaced(socket_dir: Path) -> None:
    path = socket_dir / "http"
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(path))
    server = serving(path)
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
    await server.stop()
    assert not path.exists()


async def test_the_unix_socket_of_a_gateway_that_serves_is_not_replaced(socket_dir: Path) -> None:
    path = socket_dir / "http"
    server = serving(path)
    with pytest.raises(errors.Unavailable, match="a process listens there"):
        serving(path)
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
    await server.stop()


async def test_a_gateway_that_ends_leaves_the_unix_socket_of_its_successor(socket_dir: Path) -> None:
    path = socket_dir / "http"
    server = serving(path)
    path.rename(socket_dir / "old")
    successor = serving(path)
    await server.stop()
    assert path.exists()
    await successor.stop()


async def test_small_writes_do_not_wait(mesh: FakeMesh, http: httpx.AsyncClient) -> None:
    """Nagle's algorithm would hold back the second write of each answer for 40 ms: of so many, one comes sooner."""
    await http.get("/ping")
    loop = asyncio.get_running_loop()
    seconds = []
    for _ in range(50):
        started = loop.time()
        await http.get("/ping")
        seconds.append(loop.time() - started)
    assert min(seconds) < 0.04


async def test_draining_answers_what_arrives_and_ends_each_connection(socket_dir: Path) -> None:
    mesh = FakeMesh(socket_dir)
    async with mesh.gateway(drain_timeout=SOON), mesh.http() as http:
        assert mesh.service is not None
        live = asyncio.create_task(http.post("/v1/completions", json={"model": MODEL, "prompt": "a"}))
        request = await mesh.outputs.next_request()
        draining = asyncio.create_task(mesh.service.drain())
        await asyncio.sleep(0)
        health = await http.get("/health")
        assert health.json()["missing"] == ["gateway"]
        assert health.headers["connection"] == "close"
        late = asyncio.create_task(http.post("/v1/completions", json={"model": MODEL, "prompt": "b"}))
        late_request = await mesh.outputs.next_request()
        for each in (request, late_request):
            each.answer("done")
        for answer in (await live, await late):
            assert answer.json()["choices"][0]["text"] == "done"
            assert answer.headers["connection"] == "close"
        await asyncio.wait_for(draining, SOON)
        with pytest.raises(httpx.ConnectError):
            await http.get("/health")


@pytest.mark.parametrize("streams", [False, True])
async def test_a_request_that_outlasts_the_drain_ends_with_an_error(
    socket_dir: Path, streams: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """A request that was only cancelled would end without a word to its client."""
    mesh = FakeMesh(socket_dir)
    body = {"model": MODEL, "prompt": "a", "stream": streams}
    async with httpx.AsyncClient(timeout=SOON, verify=PLAIN_TEXT) as http:
        async with mesh.gateway(drain_timeout=0.05):
            live = asyncio.create_task(http.post(f"http://{mesh.http_address}/v1/completions", json=body))
            request = await mesh.outputs.next_request()
            if streams:
                request.send("x", [120])
        answer = await live
    assert answer.status_code == (200 if streams else 503)
    assert "the gateway stopped before the answer was complete" in answer.text
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


async def test_draining_waits_a_moment_for_the_next_request_of_a_kept_connection(socket_dir: Path) -> None:
    mesh = FakeMesh(socket_dir)
    async with mesh.gateway(drain_timeout=SOON), mesh.http() as http:
        assert mesh.service is not None
        assert "connection" not in (await http.get("/ping")).headers
        draining = asyncio.create_task(mesh.service.drain())
        await asyncio.sleep(0)
        assert (await http.get("/ping")).headers["connection"] == "close"
        await asyncio.wait_for(draining, SOON)


async def test_draining_closes_a_connection_that_stays_idle(socket_dir: Path) -> None:
    mesh = FakeMesh(socket_dir)
    async with mesh.gateway(drain_timeout=SOON):
        assert mesh.service is not None
        silent = asyncio.create_task(read_all(mesh.http_address))
        answered = asyncio.create_task(read_all(mesh.http_address, b"GET /ping HTTP/1.1\r\nHost: localhost\r\n\r\n"))
        async with mesh.http() as http:
            await http.get("/ping")
        await asyncio.wait_for(mesh.service.drain(), SOON)
        assert await silent == b""
        assert (await answered).startswith(b"HTTP/1.1 200 ")


async def test_a_held_socket_keeps_connections_for_the_next_gateway(socket_dir: Path) -> None:
    mesh = FakeMesh(socket_dir)
    with socket.create_server(("127.0.0.1", 0)) as held:
        address = f"127.0.0.1:{held.getsockname()[1]}"
        ping = b"GET /ping HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
        for _ in range(2):
            waiting = asyncio.create_task(read_all(address, ping))
            await asyncio.sleep(0)
            async with mesh.gateway(http_listen=address, http_listen_fd=os.dup(held.fileno())):
                assert (await waiting).startswith(b"HTTP/1.1 200 ")
                assert (await read_all(address, ping)).startswith(b"HTTP/1.1 200 ")
        with socket.create_connection(("127.0.0.1", held.getsockname()[1])):
            pass  # it is not refused


async def read_all(address: str, sent: bytes = b"") -> bytes:
    """Return what the gateway sends on a new connection until it closes it."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(sent)
        async with asyncio.timeout(SOON):
            return await reader.read()
    finally:
        writer.close()


@pytest.mark.parametrize("bound", ["max_connections", "max_connections_per_peer"])
async def test_with_no_idle_connection_a_new_one_is_refused(socket_dir: Path, bound: str) -> None:
    mesh = FakeMesh(socket_dir)
    async with mesh.gateway(**{bound: 2}), mesh.http() as http:
        live = [asyncio.create_task(http.post("/v1/completions", json={"model": MODEL, "prompt": "a"})) for _ in "ab"]
        requests = [await mesh.outputs.next_request() for _ in live]
        address = mesh.http_address
        refused = await read_all(address)
        assert refused.startswith(b"HTTP/1.1 503 ")
        assert b"\r\nretry-after: 1\r\n" in refused
        head, _, body = refused.partition(b"\r\n\r\n")
        assert f"content-length: {len(body)}".encode() in head
        for request in requests:
            request.answer("done")
        assert [(await each).status_code for each in live] == [200, 200]


async def test_silent_connections_make_room(socket_dir: Path) -> None:
    mesh = FakeMesh(socket_dir)
    async with mesh.gateway(max_connections=4), mesh.http() as http:
        live = asyncio.create_task(http.post("/v1/completions", json={"model": MODEL, "prompt": "a"}))
        request = await mesh.outputs.next_request()
        address = mesh.http_address
        silent = [asyncio.create_task(read_all(address)) for _ in range(20)]
        async with asyncio.timeout(SOON):
            done, _ = await asyncio.wait(silent, return_when=asyncio.FIRST_COMPLETED)
            while len(done) < 17:
                done, _ = await asyncio.wait(silent, timeout=0.01)
        assert {each.result() for each in done} == {b""}
        served = await read_all(address, b"GET /ping HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        assert served.startswith(b"HTTP/1.1 200 ")
        request.answer("done")
        assert (await live).status_code == 200
        for each in silent:
            each.cancel()
        await asyncio.gather(*silent, return_exceptions=True)
