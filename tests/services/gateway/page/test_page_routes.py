"""The gateway serves the page at ``/`` and what it shows."""

import asyncio
import posixpath
import re
from pathlib import Path

import httpx

from tests.loop_clock import pass_time
from tests.services.gateway.fakes import MODEL, FakeMesh
from tokenloom.services.gateway.page.page_routes import static_files
from tokenloom.services.gateway.page.traffic import INTERVAL_SECONDS

BROWSER = {"accept": "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"}
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}
MAX_BYTES = 150_000


def test_the_page_is_small_and_names_no_other_host() -> None:
    files = static_files()
    assert sum(len(file.content) for file in files.values()) <= MAX_BYTES
    for name, file in files.items():
        text = file.content.decode()
        assert not re.findall(r"https?://(?!www\.w3\.org/)", text), name
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|localStorage|\beval\(", text), (
            name
        )
        assert not re.search(r"<[^>]+ (on\w+|style)=", text), f"{name}: the policy refuses inline code"
        assert text.count("\n") < 300, name


def test_every_file_is_reached_from_the_index() -> None:
    files = {path: file.content.decode() for path, file in static_files().items()}
    reached, new = set[str](), ["index.html"]
    while new:
        path = new.pop()
        reached.add(path)
        imported = re.findall(r'from "(\.[\w./-]+)"', files[path])
        linked = re.findall(r'(?:href|src)="page/([\w./-]+)"', files[path])
        found = {posixpath.normpath(posixpath.join(posixpath.dirname(path), name)) for name in imported} | set(linked)
        assert found <= files.keys(), path
        new += found - reached
    assert reached == files.keys()


async def test_browsers_get_the_page_and_other_clients_the_text(http: httpx.AsyncClient) -> None:
    page = await http.get("/", headers=BROWSER)
    assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert page.headers["vary"] == "accept"
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    for headers in ({}, {"accept": "application/json"}):
        text = await http.get("/", headers=headers)
        assert text.text == f"Tokenloom serves {MODEL}. /docs describes the API.\n"
        assert (await http.head("/", headers=headers)).status_code == 200


async def test_a_browser_asks_whether_a_file_has_changed(http: httpx.AsyncClient) -> None:
    for name in static_files():
        path = "/" if name == "index.html" else f"/page/{name}"
        first = await http.get(path, headers=BROWSER)
        assert (first.status_code, first.headers["cache-control"]) == (200, "no-cache"), name
        again = await http.get(path, headers=BROWSER | {"if-none-match": first.headers["etag"]})
        assert (again.status_code, again.content) == (304, b""), name
        assert again.headers["etag"] == first.headers["etag"]


async def test_files_need_no_key_and_the_mesh_does(socket_dir: Path) -> None:
    async with FakeMesh(socket_dir).gateway(api_key=("k",)) as mesh, mesh.http() as http:
        for path in ("/", "/page/app.js"):
            assert (await http.get(path, headers=BROWSER)).status_code == 200
        for path in ("/mesh", "/traffic"):
            assert (await http.get(path)).status_code == 401
            assert (await http.get(path, headers={"authorization": "Bearer k"})).status_code == 200
        assert (await http.get("/page/none.js")).status_code == 401, "it could be any path"


async def test_another_sites_page_does_not_read_the_mesh(http: httpx.AsyncClient) -> None:
    for path in ("/mesh", "/traffic"):
        assert (await http.get(path, headers={"origin": "https://evil.example"})).status_code == 403


async def test_without_the_page_only_the_text_is_left(socket_dir: Path) -> None:
    async with FakeMesh(socket_dir).gateway(page=False) as mesh, mesh.http() as http:
        root = await http.get("/", headers=BROWSER)
        assert root.headers["content-type"] == "text/plain; charset=utf-8"
        for path in ("/mesh", "/traffic", "/page/app.js"):
            assert (await http.get(path)).status_code == 404


async def test_traffic_of_the_last_interval(mesh: FakeMesh, http: httpx.AsyncClient) -> None:
    mesh.outputs.auto = ["Hi", "!"]
    assert (await http.post("/v1/chat/completions", json=CHAT)).status_code == 200
    assert (await http.post("/v1/chat/completions", json={"messages": 1})).status_code == 400
    pass_time(INTERVAL_SECONDS)
    traffic = (await http.get("/traffic")).json()
    while not traffic["running"]:  # the task that ends the interval has its turn when the next request is read
        traffic = (await http.get("/traffic")).json()
    assert traffic["refused"] == [{"INVALID_ARGUMENT": 1}]
    assert traffic["ttft_p50_ms"][0] > 0
    assert 0 < traffic["output_tokens_per_second"][0] <= 3 / INTERVAL_SECONDS
    assert 0 < traffic["hit_share"][0] < 1
    assert (traffic["running"], traffic["waiting"], traffic["kv_usage"]) == ([3], [2], [0.25])


async def test_the_button_kills_for_a_page_of_this_machine_with_the_token_only(socket_dir: Path) -> None:
    control, asked = socket_dir / "control.sock", list[bytes]()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await reader.readline())
        writer.write(b'{"engine":"engine-1","error":""}\n' if len(asked) < 2 else b'{"error":"1 of the engines"}\n')
        await writer.drain()
        writer.close()

    server = await asyncio.start_unix_server(answer, control)
    async with FakeMesh(socket_dir).gateway(page_kills=control) as mesh, mesh.http() as http:
        button = (await http.get("/mesh")).json()["kill_engine"]
        own = f"http://{http.base_url.netloc.decode()}"
        right = {"origin": own, button["header"]: button["token"]}
        for wrong in (
            {},
            {"origin": own},
            {button["header"]: button["token"]},
            right | {"origin": "null"},
            right | {"origin": "http://evil.example"},
            right | {"origin": "http://evil.example", "host": "evil.example"},
            right | {button["header"]: button["token"][:-1]},
        ):
            assert (await http.post(button["path"], headers=wrong)).status_code == 403, wrong
        assert asked == []
        assert (await http.get(button["path"], headers=right)).status_code == 405
        killed = await http.post(button["path"], headers=right)
        assert (killed.status_code, killed.json()) == (200, {"engine": "engine-1"})
        refused = await http.post(button["path"], headers=right)
        assert refused.status_code == 503
        assert "1 of the engines" in refused.text
        server.close()
        assert (await http.post(button["path"], headers=right)).status_code == 503, "the supervisor has ended"
    assert asked == [b'{"kind":"crash"}\n'] * 2


async def test_without_a_demo_there_is_no_button(http: httpx.AsyncClient) -> None:
    assert (await http.get("/mesh")).json()["kill_engine"] is None
    assert (await http.post("/mesh/kill_engine")).status_code == 404
