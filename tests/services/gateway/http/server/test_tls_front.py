"""Connections count during their handshake too, and a handshake that does not come ends them; on both event loops."""

import asyncio
import contextlib
import logging
import ssl
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.loop_clock import settle
from tests.services.gateway.fakes import MODEL, SOON, FakeMesh
from tokenloom.services.gateway.http.server import http_server
from tokenloom.supervisor.certificates import make_certificates


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certificates")
    make_certificates(folder, days=30)
    return folder


@pytest.fixture
def context(certificates: Path) -> ssl.SSLContext:
    """What a client trusts."""
    context = ssl.create_default_context(cafile=str(certificates / "ca.crt"))
    context.check_hostname = False
    return context


@pytest.fixture
def settings(certificates: Path) -> dict[str, Any]:
    return {"public_tls_cert": certificates / "gateway.crt", "public_tls_key": certificates / "gateway.key"}


async def hold(address: str, sent: bytes = b"") -> bytes:
    """Return what the gateway sends on a new connection, without TLS, until it closes it."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(sent)
        with contextlib.suppress(ConnectionResetError):
            return await reader.read()
        return b""
    finally:
        writer.close()


async def test_silent_connections_do_not_keep_clients_out(
    socket_dir: Path, settings: dict[str, Any], context: ssl.SSLContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tokenloom.services.gateway.http.server.connections.MIN_IDLE_SECONDS", 0.0)
    mesh = FakeMesh(socket_dir)
    async with asyncio.timeout(SOON), mesh.gateway(max_connections=4, **settings):
        url = f"https://{mesh.http_address}"
        async with httpx.AsyncClient(base_url=url, timeout=SOON, verify=context) as https:
            live = asyncio.create_task(https.post("/v1/completions", json={"model": MODEL, "prompt": "a"}))
            request = await mesh.outputs.next_request()
            silent = [asyncio.create_task(hold(mesh.http_address)) for _ in range(20)]
            done: set[asyncio.Task[bytes]] = set()
            while len(done) < 17:
                done, _ = await asyncio.wait(silent, timeout=0.01)
            assert (await https.get("/ping")).status_code == 200
            request.answer("done")
            assert (await live).json()["choices"][0]["text"] == "done"
        for each in silent:
            each.cancel()
        await asyncio.gather(*silent, return_exceptions=True)


async def test_a_handshake_has_limited_time(
    socket_dir: Path, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "HANDSHAKE_SECONDS", 0.05)
    mesh = FakeMesh(socket_dir)
    async with asyncio.timeout(SOON), mesh.gateway(**settings):
        assert await hold(mesh.http_address) == b""
        assert await hold(mesh.http_address, b"\x16\x03\x01") == b""


async def test_plain_text_is_refused_without_a_traceback(
    socket_dir: Path, settings: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    mesh = FakeMesh(socket_dir)
    async with asyncio.timeout(SOON), mesh.gateway(**settings):
        answer = await hold(mesh.http_address, b"GET /ping HTTP/1.1\r\nHost: a\r\n\r\n")
        assert b"HTTP" not in answer
    # On a loaded machine the gateway warns of links to the mesh, which have nothing to do with this connection.
    written = [record for record in caplog.records if not record.name.startswith("tokenloom.services.gateway.mesh")]
    assert not [record for record in written if record.levelno >= logging.WARNING]


async def test_a_stop_ends_handshakes(socket_dir: Path, settings: dict[str, Any]) -> None:
    mesh = FakeMesh(socket_dir)
    async with mesh.gateway(**settings):
        pending = asyncio.create_task(hold(mesh.http_address))
        await asyncio.sleep(0.05)
        await settle()
        assert not pending.done()
    async with asyncio.timeout(SOON):
        assert await pending == b""
