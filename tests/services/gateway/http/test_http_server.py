"""Where HTTP is served, and how it ends."""

import asyncio
import json
import socket
import sys
from pathlib import Path

import httpx
import pytest

from tests.loop_clock import pass_time, settle
from tests.services.gateway.fakes import MODEL, SOON, FakeMesh
from tokenloom.request import errors
from tokenloom.services.gateway import http as http_package
from tokenloom.services.gateway.http import http_server, uvicorn_protocol
from tokenloom.services.gateway.http.http_server import HttpServer


async def nothing(*_: object) -> None:
    raise AssertionError


def test_a_port_in_use_is_an_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(errors.Unavailable, match="http_listen"):
            HttpServer(nothing, address, insecure=False)  # type: ignore[arg-type]


def test_open_addresses_need_insecure() -> None:
    with pytest.raises(errors.InvalidArgument, match="http_listen"):
        HttpServer(nothing, "0.0.0.0:0", insecure=False)  # type: ignore[arg-type]


async def test_a_unix_socket(socket_dir: Path) -> None:
    path = socket_dir / "http"
    async with FakeMesh(socket_dir).gateway(http_listen=f"unix:{path}"):
        transport = httpx.AsyncHTTPTransport(uds=str(path))
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as http:
            assert (await http.get("/health")).status_code == 200
    assert not path.exists()


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


@pytest.mark.parametrize(("sent", "answer"), [(b"", b""), (b"GET /ping HTTP/1.1\r\nHost: x\r\n", b"HTTP/1.1 408 ")])
async def test_a_head_that_does_not_come_is_given_up(
    mesh: FakeMesh, monkeypatch: pytest.MonkeyPatch, sent: bytes, answer: bytes
) -> None:
    monkeypatch.setattr(uvicorn_protocol, "HEAD_SECONDS", 20)
    reader, writer = await connect(mesh)
    writer.write(sent)
    await settle()
    pass_time(20)
    assert (await asyncio.wait_for(reader.read(), SOON)).startswith(answer)
    writer.close()


async def test_a_head_behind_a_live_request_may_take_its_time(mesh: FakeMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uvicorn_protocol, "HEAD_SECONDS", 20)
    body = json.dumps({"model": MODEL, "prompt": "a"}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
    reader, writer = await connect(mesh)
    writer.write(head + body + b"GET /ping HTTP/1.1\r\n")
    request = await mesh.outputs.next_request()
    pass_time(50)
    await settle()
    request.answer("done")
    assert b"200 OK" in await asyncio.wait_for(reader.readline(), SOON)
    await asyncio.wait_for(reader.readuntil(b"done"), SOON)
    await settle()
    pass_time(20)
    answers = await asyncio.wait_for(reader.read(), SOON)
    assert b"408" in answers, "then it is given up too"
    writer.close()


async def connect(mesh: FakeMesh) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = mesh.http_address.rpartition(":")
    return await asyncio.open_connection(host, int(port))


async def test_draining_finishes_live_requests_and_refuses_new_ones(socket_dir: Path) -> None:
    mesh = FakeMesh(socket_dir)
    async with mesh.gateway(drain_timeout=SOON), mesh.http() as http:
        assert mesh.service is not None
        live = asyncio.create_task(http.post("/v1/completions", json={"model": MODEL, "prompt": "a"}))
        request = await mesh.outputs.next_request()
        draining = asyncio.create_task(mesh.service.drain())
        await asyncio.sleep(0)
        assert (await http.get("/health")).json()["missing"] == ["gateway"]
        refused = await http.post("/v1/completions", json={"model": MODEL, "prompt": "b"})
        assert refused.status_code == 503
        request.answer("done")
        assert (await live).json()["choices"][0]["text"] == "done"
        await asyncio.wait_for(draining, SOON)
        with pytest.raises(httpx.ConnectError):
            await http.get("/health")


@pytest.mark.parametrize("lacks", ["a name", "a module"])
async def test_an_unexpected_uvicorn_is_served_through_plain_asgi(
    socket_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, lacks: str
) -> None:
    if lacks == "a name":
        monkeypatch.setitem(uvicorn_protocol.EXPECTED_NAMES, uvicorn_protocol.FlowControl.__init__, "renamed")
    else:
        monkeypatch.delattr(http_package, "uvicorn_protocol")
        monkeypatch.setitem(sys.modules, uvicorn_protocol.__name__, None)
    mesh = FakeMesh(socket_dir)
    async with mesh.gateway(), mesh.http() as http:
        (warning,) = [record.getMessage() for record in caplog.records if record.name == http_server.__name__]
        assert ("FlowControl.__init__: renamed" if lacks == "a name" else "uvicorn_protocol") in warning
        submitted = asyncio.create_task(mesh.outputs.next_request())
        submitted.add_done_callback(lambda task: task.result().send("a", [1]))
        body = {"model": MODEL, "prompt": "a", "stream": True}
        async with http.stream("POST", "/v1/completions", json=body) as response:
            lines = (line async for line in response.aiter_lines() if line)
            for piece in ("a", "b", "c"):
                event = json.loads((await anext(lines)).removeprefix("data: "))
                assert event["choices"][0]["text"] == piece
                if piece != "c":
                    submitted.result().send(chr(ord(piece) + 1), [1])
            submitted.result().finish()
            assert [line async for line in lines][-1] == "data: [DONE]"
        leaving = asyncio.create_task(http.post("/v1/completions", json=body))
        request = await mesh.outputs.next_request()
        leaving.cancel()
        await asyncio.wait_for(request.cancelled.wait(), SOON)
