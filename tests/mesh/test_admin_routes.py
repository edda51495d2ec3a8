"""Who runs the mesh asks all engines over HTTP, with a key of his own."""

from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest

from tests.mesh.harness import MODEL, Mesh
from tokenloom.supervisor.certificates import make_certificates

pytestmark = pytest.mark.asyncio(loop_scope="module")

ADMIN = {"authorization": "Bearer root"}
KEYS = {"api_key": ("user",), "admin_api_key": ("root",)}
NAMES = ["engine-0", "engine-1"]
BODY = {"model": MODEL, "prompt": [1, 2, 3], "max_tokens": 2}


@pytest.fixture(scope="module")
def mesh_options() -> dict[str, Any]:
    return {"engines": 2, "gateway": KEYS}


def done(status: str) -> dict[str, object]:
    return {"status": status, "state": "done", "engines": NAMES}


async def test_every_engine_is_asked(mesh: Mesh, http: httpx.AsyncClient) -> None:
    async def ask(method: str, path: str) -> dict[str, object]:
        response = await http.request(method, path, headers=ADMIN)
        assert response.status_code == 200, response.text
        told: dict[str, object] = response.json()
        return told

    for no in (False, True, False):
        if no:
            assert await ask("POST", "/pause?mode=keep&clear_cache=false") == done("paused")
        told = await ask("GET", "/is_paused")
        assert told == {"is_paused": no, "engines": dict.fromkeys(NAMES, no)}
        if no:
            assert await ask("POST", "/resume") == done("resumed")
    assert await ask("POST", "/reset_prefix_cache") == {"status": "reset", "engines": NAMES}
    assert await ask("POST", "/reset_encoder_cache") == {"status": "reset", "engines": NAMES, "encoders": []}
    assert await ask("POST", "/sleep?level=1&mode=wait") == done("asleep")
    assert (await ask("GET", "/is_sleeping"))["is_sleeping"] is True
    await ask("POST", "/wake_up?tags=weights")
    assert (await ask("GET", "/is_sleeping"))["is_sleeping"] is True
    await ask("POST", "/wake_up?tags=kv_cache")
    assert await ask("GET", "/is_sleeping") == {"is_sleeping": False, "engines": dict.fromkeys(NAMES, False)}
    await mesh.until_missing()
    response = await http.post("/v1/completions", json=BODY, headers={"authorization": "Bearer user"})
    assert response.status_code == 200


async def test_a_failure_names_the_engine(http: httpx.AsyncClient) -> None:
    response = await http.post("/start_profile", headers=ADMIN)
    assert response.status_code == 400
    assert response.json()["error"]["message"].startswith("engine-0: ")
    assert response.json()["error"]["code"] == "failed_precondition"


async def test_scheduling_is_woken_from_level_0(http: httpx.AsyncClient) -> None:
    assert (await http.post("/sleep?level=0", headers=ADMIN)).status_code == 200
    assert (await http.post("/wake_up?tags=scheduling", headers=ADMIN)).status_code == 200
    assert (await http.get("/is_sleeping", headers=ADMIN)).json()["is_sleeping"] is False


async def test_only_the_admin_key_opens(http: httpx.AsyncClient) -> None:
    for headers in ({}, {"authorization": "Bearer user"}):
        assert (await http.post("/pause", headers=headers)).status_code == 401
    assert (await http.get("/v1/models", headers=ADMIN)).status_code == 401, "it is no user's key"


@pytest.mark.parametrize(
    ("path", "param"),
    [
        ("/pause?mode=never", "mode"),
        ("/pause?clear_cache=perhaps", "clear_cache"),
        ("/pause?force=1", "force"),
        ("/sleep?level=3", "level"),
        ("/wake_up?tags=all", "tags"),
        ("/reset_prefix_cache?reset_running_requests=2", "reset_running_requests"),
    ],
)
async def test_what_is_refused(http: httpx.AsyncClient, path: str, param: str) -> None:
    response = await http.post(path, headers=ADMIN)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


async def test_engines_know_the_operators_certificate(socket_dir: Path, tmp_path: Path) -> None:
    make_certificates(tmp_path, days=30)
    operator = {"operator_tls_cert": tmp_path / "operator.crt", "operator_tls_key": tmp_path / "operator.key"}
    async with (
        Mesh(socket_dir, gateway=KEYS | operator, certificates=tmp_path).running() as mesh,
        mesh.http() as http,
    ):
        assert (await http.post("/pause", headers=ADMIN)).status_code == 200
        assert (await http.post("/resume", headers=ADMIN)).status_code == 200


async def test_admin_routes_are_described_where_there_are_any(http: httpx.AsyncClient) -> None:
    api = (await http.get("/openapi.json")).json()
    for path, method in (("/pause", "post"), ("/is_sleeping", "get"), ("/wake_up", "post")):
        about = api["paths"][path][method]
        assert about["security"] == [{"adminKey": []}]
    response = await http.get("/is_paused", headers=ADMIN)
    answer = api["paths"]["/is_paused"]["get"]["responses"]["200"]["content"]["application/json"]["schema"]
    jsonschema.validate(response.json(), {**answer, "components": api["components"]})
