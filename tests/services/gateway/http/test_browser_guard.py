"""What web pages of other sites can send is refused where no key is needed."""

from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.services.gateway.fakes import MODEL, FakeMesh
from tokenloom.request import errors
from tokenloom.services.gateway.http.app import BrowserGuard
from tokenloom.services.runtime.addresses import parse

PAGE = "https://chat.example"


def is_served(guard: BrowserGuard, host: str | None, origin: str | None = None) -> bool:
    headers = {b"host": host, b"origin": origin}
    try:
        guard.check({name: value.encode() for name, value in headers.items() if value is not None})
    except errors.PermissionDenied:
        return False
    return True


LOOPBACK = ("localhost", "LocalHost:8000", "127.0.0.1", "127.0.0.1:8000", "127.8.9.1:1", "[::1]", "[::1]:8000")
FOREIGN = (None, "", "rebound.example", "rebound.example:8000", "localhost.rebound.example", "127.0.0.1.example")
ADDRESSES = ("10.1.2.3:8000", "[fd00::1]:8000")


@pytest.mark.parametrize(
    ("listen", "allowed", "served", "refused"),
    [
        ("127.0.0.1:8000", (), LOOPBACK, (*FOREIGN, *ADDRESSES, "0.0.0.0:8000")),
        ("127.0.0.1:8000", ("Gateway.lan", "[fd00::1]"), (*LOOPBACK, "gateway.lan:8000", "[fd00::1]"), FOREIGN),
        ("10.1.2.3:8000", (), (*LOOPBACK, "10.1.2.3:8000"), (*FOREIGN, "10.1.2.4:8000")),
        ("gateway.lan:8000", (), (*LOOPBACK, "gateway.lan:8000"), FOREIGN),
        ("0.0.0.0:8000", (), (*LOOPBACK, *ADDRESSES, "0.0.0.0:8000"), FOREIGN),
        ("[::]:8000", (), (*LOOPBACK, *ADDRESSES), FOREIGN),
        ("0.0.0.0:8000", ("*",), (*LOOPBACK, *FOREIGN), ()),
        ("unix:/run/gateway", (), (*LOOPBACK, *FOREIGN), ()),
    ],
)
def test_hosts(listen: str, allowed: tuple[str, ...], served: tuple[Any, ...], refused: tuple[Any, ...]) -> None:
    guard = BrowserGuard(parse(listen), allowed, ())
    assert [host for host in served if not is_served(guard, host)] == []
    assert [host for host in refused if is_served(guard, host)] == []


@pytest.mark.parametrize(
    ("origin", "allowed", "served"),
    [
        ("http://localhost:8000", (), True),
        ("http://localhost:3000", (), False),
        (PAGE, (), False),
        (PAGE, (PAGE + "/",), True),
        (PAGE, ("*",), True),
        ("https://other.example", (PAGE,), False),
        ("null", (), False),
        ("", (), False),
    ],
)
def test_origins(origin: str, allowed: tuple[str, ...], served: bool) -> None:
    guard = BrowserGuard(parse("127.0.0.1:8000"), (), allowed)
    assert is_served(guard, "localhost:8000", origin) is served


BODY = {"model": MODEL, "prompt": "a"}


async def test_a_page_cannot_send_requests_blindly(mesh: FakeMesh, http: httpx.AsyncClient) -> None:
    """A browser sends these without asking the gateway first, with whatever Host its DNS was made to resolve."""
    mesh.outputs.auto = ["x"]
    own = mesh.http_address
    for headers, status in (
        ({"host": own}, 200),
        ({"host": own, "origin": f"http://{own}"}, 200),
        ({"host": own, "origin": PAGE}, 403),
        ({"host": "rebound.example"}, 403),
        ({"host": "rebound.example", "origin": "http://rebound.example"}, 403),
        ({"host": own, "content-type": "text/plain"}, 415),
    ):
        response = await http.post("/v1/completions", json=BODY, headers=headers)
        assert response.status_code == status, (headers, response.text)
        error = response.json().get("error", {})
        assert error.get("type") == {403: "permission_error", 415: "invalid_request_error"}.get(status)
    assert (await http.get("/metrics", headers={"host": "rebound.example"})).status_code == 403


@pytest.mark.parametrize("path", ["/health", "/ping", "/docs", "/openapi.json"])
async def test_probes_are_served_under_every_host(http: httpx.AsyncClient, path: str) -> None:
    assert (await http.get(path, headers={"host": "10.1.2.3:8000", "origin": PAGE})).status_code == 200


async def test_with_keys_any_host_is_served(socket_dir: Path) -> None:
    async with FakeMesh(socket_dir).gateway(api_key=("k",)) as mesh, mesh.http() as http:
        mesh.outputs.auto = ["x"]
        headers = {"host": "gateway.example", "origin": PAGE, "authorization": "Bearer k"}
        assert (await http.post("/v1/completions", json=BODY, headers=headers)).status_code == 200


async def test_further_names_and_origins(socket_dir: Path) -> None:
    mesh = FakeMesh(socket_dir)
    async with mesh.gateway(allowed_hosts=("gateway.lan",), cors_origins=(PAGE,)), mesh.http() as http:
        mesh.outputs.auto = ["x"]
        headers = {"host": "gateway.lan:8000", "origin": PAGE}
        response = await http.post("/v1/completions", json=BODY, headers=headers)
        assert response.status_code == 200
        assert response.headers["access-control-allow-origin"] == PAGE
