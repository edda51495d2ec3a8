"""Every refusal over HTTP moves `tokenloom_http_responses_total` by one, with labels that do not depend on clients.

The first half raises every class of error; the second provokes every refusal that the gateway itself makes, down to the
connection. Both lists are compared with the code, so that a new error is missed here first.
"""

import asyncio
import re
import ssl
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

import tokenloom.services.gateway.service  # noqa: F401  (imports every class of error)
from tests.loop_clock import settle
from tests.services.gateway.fakes import HEADERS, SOON, FakeMesh
from tests.services.gateway.http.test_response_counts import CHAT, counted
from tests.services.gateway.openai.test_chat import post
from tokenloom.request import errors
from tokenloom.services.gateway.http import request_body
from tokenloom.services.gateway.http.response_counts import OTHER
from tokenloom.services.gateway.http.server import connections, http_protocol
from tokenloom.services.gateway.openai.chat import ChatApi
from tokenloom.supervisor.certificates import make_certificates

HTTP = Path(http_protocol.__file__).parent
KEY = {"authorization": "Bearer a key"}
Labels = tuple[str, str, str]
Provoke = Callable[[FakeMesh, httpx.AsyncClient], Awaitable[object]]


def classes(root: type[errors.TokenloomError] = errors.TokenloomError) -> Iterator[type[errors.TokenloomError]]:
    """Every class of error that a client of the gateway may get."""
    for child in root.__subclasses__():
        if child.__module__.startswith(("tokenloom.request", "tokenloom.services.gateway")):
            yield child
            yield from classes(child)


SHARED = {cls for cls in classes() if cls.__module__ == "tokenloom.request.errors"}
"""Those that any part of the mesh may raise."""
OWN = set(classes()) - SHARED
"""Those that only the gateway raises."""


BECOMES: dict[type[errors.TokenloomError], type[errors.TokenloomError]] = {
    errors.TryElsewhere: errors.ResourceExhausted,
    errors.MediaLost: errors.Unavailable,
}
"""What clients get instead, because the gateway tries elsewhere until nothing is left."""


async def moved(http: httpx.AsyncClient, provoke: Awaitable[object]) -> dict[Labels, float]:
    """Return by how much the counts have grown."""
    before = await counted(http)
    await provoke
    after = await counted(http)
    return {labels: count - before.get(labels, 0) for labels, count in after.items() if count != before.get(labels)}


async def test_every_class_of_error_is_counted(mesh: FakeMesh, http: httpx.AsyncClient) -> None:
    for cls in sorted(SHARED, key=lambda each: each.reason):
        failing = asyncio.create_task(fail(mesh, cls))
        seen = BECOMES.get(cls, cls)
        assert await moved(http, post(http)) == {(CHAT, str(seen.http_status), seen.reason): 1}, cls
        failing.cancel()


async def raw(mesh: FakeMesh, *pieces: bytes, leave: bool = False) -> bytes:
    """Send bytes on a connection of their own; return what the gateway sends until it closes the connection."""
    host, _, port = mesh.http_address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
        if leave:
            return b""
        async with asyncio.timeout(SOON):
            return await reader.read()
    finally:
        writer.close()
        await settle()


def head(*fields: bytes, path: bytes = CHAT.encode()) -> bytes:
    return b"POST %b HTTP/1.1\r\n%b%b\r\n" % (path, HEADERS, b"".join(b"%b\r\n" % field for field in fields))


CHUNKED = head(b"Transfer-Encoding: chunked")


async def late_body(mesh: FakeMesh, http: httpx.AsyncClient) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(request_body, "BODY_SECONDS", 0.0)
        await raw(mesh, head(b"Content-Length: 9"))


async def late_head(mesh: FakeMesh, http: httpx.AsyncClient) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(http_protocol, "HEAD_SECONDS", 1.0)
        await raw(mesh, head()[:-2])


async def pipeline(mesh: FakeMesh, http: httpx.AsyncClient) -> None:
    """Too many requests in one piece, behind one that is live: later pieces would wait in the kernel."""
    body = b'{"messages": [{"role": "user", "content": "hi"}]}'
    live = head(b"Content-Length: %d" % len(body)) + body
    await raw(mesh, live * (http_protocol.MAX_PIPELINED + 2))


async def leave(mesh: FakeMesh, http: httpx.AsyncClient) -> None:
    leaving = asyncio.create_task(post(http))
    request = await mesh.outputs.next_request()
    leaving.cancel()
    await request.cancelled.wait()
    await settle()


async def away(mesh: FakeMesh, http: httpx.AsyncClient) -> None:
    """Every output processor says of every attempt that the engines are away."""
    failing = asyncio.create_task(fail(mesh, errors.Unavailable))
    await post(http)
    failing.cancel()


async def fail(mesh: FakeMesh, cls: type[errors.TokenloomError]) -> None:
    while True:  # some errors make the gateway try again
        (await mesh.outputs.next_request()).fail(cls("broken"))


async def bug(mesh: FakeMesh, http: httpx.AsyncClient) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ChatApi, "read", lambda *_: 1 // 0)
        await post(http)


async def crowd(mesh: FakeMesh, http: httpx.AsyncClient) -> None:
    """More outputs than the gateway may have in work."""
    await asyncio.gather(post(http, n=3), post(http, n=3), answer(mesh))


async def answer(mesh: FakeMesh) -> None:
    request = await mesh.outputs.next_request()
    for index in range(3):
        request.finish(sample_index=index)


async def scan(mesh: FakeMesh, http: httpx.AsyncClient) -> None:
    for number in range(20):
        await http.get(f"/v1/responses{number}/x{number}")


PROVOKED: dict[str, tuple[Provoke, dict[Labels, int]]] = {
    "JSON": (
        lambda mesh, http: raw(mesh, head(b"Content-Length: 1", b"Connection: close") + b"{"),
        {(CHAT, "400", "INVALID_ARGUMENT"): 1},
    ),
    "value": (lambda mesh, http: post(http, temperature=-1), {(CHAT, "400", "INVALID_ARGUMENT"): 1}),
    "host": (
        lambda mesh, http: http.get("/v1/models", headers={"host": "evil.example"}),
        {("/v1/models", "403", "PERMISSION_DENIED"): 1},
    ),
    "origin": (
        lambda mesh, http: post_as(http, origin="https://evil.example"),
        {(CHAT, "403", "PERMISSION_DENIED"): 1},
    ),
    "path": (scan, {(OTHER, "404", "NOT_FOUND"): 20}),
    "model": (lambda mesh, http: post(http, model="other"), {(CHAT, "404", "MODEL_NOT_FOUND"): 1}),
    "model's path": (lambda mesh, http: http.get("/v1/models/other"), {("/v1/models/*", "404", "MODEL_NOT_FOUND"): 1}),
    "object": (lambda mesh, http: http.get("/v1/responses/resp_1"), {("/v1/responses/*", "404", "NOT_FOUND"): 1}),
    "method": (lambda mesh, http: http.request("PATCH", CHAT), {(CHAT, "405", "METHOD_NOT_ALLOWED"): 1}),
    "late body": (late_body, {(CHAT, "408", "BODY_TIMEOUT"): 1}),
    "late head": (late_head, {(OTHER, "408", "HEAD_TIMEOUT"): 1}),
    "large": (lambda mesh, http: post(http, user="u" * 5000), {(CHAT, "413", "PAYLOAD_TOO_LARGE"): 1}),
    "large chunks": (
        lambda mesh, http: raw(mesh, CHUNKED + b"1388\r\n%b\r\n" % (b"x" * 5000)),
        {(CHAT, "413", "PAYLOAD_TOO_LARGE"): 1},
    ),
    "media type": (lambda mesh, http: http.post(CHAT, content=b"{}"), {(CHAT, "415", "UNSUPPORTED_MEDIA_TYPE"): 1}),
    "encoding": (
        lambda mesh, http: post_as(http, **{"content-encoding": "gzip"}),
        {(CHAT, "415", "UNSUPPORTED_ENCODING"): 1},
    ),
    "client left": (leave, {(CHAT, "499", "CANCELLED"): 1}),
    "client left its body": (
        lambda mesh, http: raw(mesh, head(b"Content-Length: 9"), leave=True),
        {(CHAT, "499", "CANCELLED"): 1},
    ),
    "bug": (bug, {(CHAT, "500", "INTERNAL"): 1}),
    "part away": (away, {(CHAT, "503", "UNAVAILABLE"): 1}),
    "crowd": (crowd, {(CHAT, "200", ""): 1, (CHAT, "503", "RESOURCE_EXHAUSTED"): 1}),
    "nonsense": (lambda mesh, http: raw(mesh, b"NONSENSE\r\n\r\n"), {(OTHER, "400", "MALFORMED"): 1}),
    "broken chunk": (lambda mesh, http: raw(mesh, CHUNKED, b"zz\r\n"), {(CHAT, "400", "MALFORMED"): 1}),
    "small chunks": (
        lambda mesh, http: raw(mesh, CHUNKED, b"1;%b\r\n \r\n" % (b"e" * 60) * 1500),
        {(CHAT, "400", "SMALL_CHUNKS"): 1},
    ),
    "head": (lambda mesh, http: raw(mesh, head(*[b"a: b"] * 200)), {(OTHER, "431", "FIELDS_TOO_LARGE"): 1}),
    "trailers": (
        lambda mesh, http: raw(mesh, CHUNKED, b"0\r\n" + b"a: b\r\n" * 200),
        {(CHAT, "431", "FIELDS_TOO_LARGE"): 1},
    ),
    "pipeline": (pipeline, {(CHAT, "499", "CANCELLED"): 1, (OTHER, "0", "PIPELINE_LIMIT"): 1}),
}
"""What provokes a refusal of a gateway without keys, and how it is counted."""
ELSEWHERE = {"UNAUTHENTICATED", "RATE_LIMIT_EXCEEDED", "DEADLINE_EXCEEDED", "CONNECTION_LIMIT", "TLS_HANDSHAKE"}
"""Reasons of refusals that need a gateway of their own, in the tests below."""


async def post_as(http: httpx.AsyncClient, **headers: str) -> httpx.Response:
    return await http.post(CHAT, content=b"{}", headers={"content-type": "application/json", **headers})


async def test_every_refusal_of_the_gateway_is_counted(socket_dir: Path) -> None:
    async with FakeMesh(socket_dir).gateway(max_body_bytes=4096, max_live_requests=4) as mesh, mesh.http() as http:
        for name, (provoke, expected) in PROVOKED.items():
            assert await moved(http, provoke(mesh, http)) == expected, name


async def test_refusals_by_key_and_tenant(socket_dir: Path) -> None:
    settings = {"api_key": ("a key",), "tenant_live_outputs": 2}
    async with FakeMesh(socket_dir).gateway(**settings) as mesh, mesh.http() as http:
        assert await moved(http, post(http)) == {(CHAT, "401", "UNAUTHENTICATED"): 1}
        assert await moved(http, http.get("/nowhere")) == {(OTHER, "401", "UNAUTHENTICATED"): 1}
        http.headers.update(KEY)
        live = asyncio.create_task(post(http, n=2))
        request = await mesh.outputs.next_request()
        assert await moved(http, post(http)) == {(CHAT, "429", "RATE_LIMIT_EXCEEDED"): 1}
        for index in range(2):
            request.finish(sample_index=index)
        await live


async def test_a_deadline_is_counted(socket_dir: Path) -> None:
    async with FakeMesh(socket_dir).gateway(request_timeout=0.05) as mesh, mesh.http() as http:
        assert await moved(http, post(http)) == {(CHAT, "504", "DEADLINE_EXCEEDED"): 1}


@contextmanager
def nothing_idle() -> Iterator[None]:
    """Let no connection make room for another one, however slow the machine is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(connections, "MIN_IDLE_SECONDS", 1e9)
        yield


async def test_connections_beyond_the_limit_are_counted(socket_dir: Path) -> None:
    async with FakeMesh(socket_dir).gateway(max_connections_per_peer=1) as mesh, mesh.http() as http:
        with nothing_idle():
            assert await moved(http, raw(mesh)) == {(OTHER, "503", "CONNECTION_LIMIT"): 1}


async def test_refusals_before_tls_are_counted(socket_dir: Path, tmp_path: Path) -> None:
    make_certificates(tmp_path, days=30)
    context = ssl.create_default_context(cafile=str(tmp_path / "ca.crt"))
    context.check_hostname = False
    settings = {"public_tls_cert": tmp_path / "gateway.crt", "public_tls_key": tmp_path / "gateway.key"}
    async with (
        FakeMesh(socket_dir).gateway(**settings, max_connections_per_peer=2) as mesh,
        httpx.AsyncClient(base_url=f"https://{mesh.http_address}", timeout=SOON, verify=context) as https,
    ):
        assert await moved(https, raw(mesh, b"GET / HTTP/1.1\r\n\r\n")) == {(OTHER, "0", "TLS_HANDSHAKE"): 1}
        with nothing_idle():
            held = asyncio.create_task(raw(mesh))
            await settle()
            assert (await moved(https, raw(mesh)))[OTHER, "0", "CONNECTION_LIMIT"] == 1
        held.cancel()


def test_no_refusal_is_missing_here() -> None:
    provoked = Counter(reason for _, expected in PROVOKED.values() for _, _, reason in expected)
    tested = provoked.keys() | ELSEWHERE
    assert {cls.reason for cls in OWN} <= tested
    below = {
        reason
        for file in HTTP.glob("*.py")
        for reason in re.findall(r'(?:_refuse|on_refused)\(.*"([A-Z_]+)"\)', file.read_text())
    }
    assert below | {"CONNECTION_LIMIT"} <= tested
    assert len(below) >= 5, below
