"""Browsers get CORS headers for allowed origins only, and what one gateway alone has is answered by no other."""

from pathlib import Path
from typing import Any, cast

import httpx

from tests.services.gateway.fakes import FakeMesh
from tokenloom.services.gateway.http.app import App, ClientAccess
from tokenloom.services.gateway.http.http_exchange import HttpExchange
from tokenloom.services.gateway.openapi.route_table import ROUTES

PAGE = "https://chat.example"
PREFLIGHT = {"origin": PAGE, "access-control-request-method": "POST", "access-control-request-headers": "content-type"}


async def test_off_by_default(http: httpx.AsyncClient) -> None:
    response = await http.get("/health", headers={"origin": PAGE})
    assert "access-control-allow-origin" not in response.headers
    assert (await http.options("/v1/completions", headers=PREFLIGHT)).status_code == 403


async def test_named_origins(socket_dir: Path) -> None:
    async with FakeMesh(socket_dir).gateway(cors_origins=(PAGE,), api_key=("k",)) as mesh, mesh.http() as http:
        told = await http.options("/v1/completions", headers=PREFLIGHT)  # which carries no key
        assert told.status_code == 200
        assert told.headers["access-control-allow-origin"] == PAGE
        assert {"POST", "DELETE"} <= set(told.headers["access-control-allow-methods"].split(", "))
        assert "authorization" in told.headers["access-control-allow-headers"]
        failed = await http.get("/v1/models", headers={"origin": PAGE})
        assert (failed.status_code, failed.headers["access-control-allow-origin"]) == (401, PAGE)
        other = await http.options("/v1/completions", headers=PREFLIGHT | {"origin": "https://evil.example"})
        assert not [name for name in other.headers if name.startswith("access-control")]


async def test_all_origins(socket_dir: Path) -> None:
    async with FakeMesh(socket_dir).gateway(cors_origins=("*",)) as mesh, mesh.http() as http:
        response = await http.get("/health", headers={"origin": PAGE})
        assert response.headers["access-control-allow-origin"] == "*"
        assert "x-request-id" in response.headers["access-control-expose-headers"]
        assert "access-control-allow-origin" not in (await http.get("/health")).headers


def test_no_other_gateway_answers_a_call_of_files_or_batches() -> None:
    async def answer(exchange: HttpExchange) -> None: ...

    nothing = cast("Any", None)
    app = App(dict.fromkeys(ROUTES, answer), ClientAccess(nothing, nothing, nothing, nothing), nothing, nothing)
    given = {(method, pattern) for pattern, path in app._paths.items() for method in path.pure}
    assert {("GET", "/v1/models"), ("GET", "/v1/responses/*"), ("POST", "/v1/chat/completions")} <= given
    of_batches = {(route.method, route.pattern) for route in ROUTES if route.is_of_batches}
    assert ("GET", "/v1/batches/*") in of_batches
    assert not given & of_batches
