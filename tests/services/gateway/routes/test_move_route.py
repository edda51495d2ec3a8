"""An operator lets running requests go on at other engines."""

from pathlib import Path

from tests.services.gateway.fakes import FakeMesh
from tests.services.gateway.mesh.fake_engines import ADMIN, KEYS, with_engines
from tests.services.gateway.test_several_meshes import describe, other_dir, until
from tokenloom.request import errors
from tokenloom.v1.engine_pb2 import MoveRequestsRequest, MoveRequestsResponse

__all__ = ["other_dir"]

ID = "0123456789abcdef" * 2 + "00000001"


async def test_requests_are_moved_where_they_run(socket_dir: Path) -> None:
    mesh = FakeMesh(socket_dir)
    async with with_engines(mesh, "a", "b") as engines, mesh.gateway(**KEYS), mesh.http() as http:
        url = f"/move_requests?request_id=chatcmpl-{ID}&target=b"
        assert (await http.post(url)).status_code == 401
        assert (await http.post(url, headers=ADMIN)).json()["error"]["message"].startswith("no engine runs request")
        engines["a"].moved = MoveRequestsResponse(moved=2, stayed=1, reasons=["it waits to run"])
        outcome = (await http.post(url, headers=ADMIN)).json()
        assert outcome == {"moved": 2, "ended": 0, "stayed": 1, "reasons": ["a: it waits to run"]}
        wanted = MoveRequestsRequest(request_id=ID, target="b")
        assert [engine.moves for engine in engines.values()] == [[wanted, wanted]] * 2

        for name in (f"generate-tokens-{ID}-1", f"resp_{ID}_89abcdef"):
            await http.post(f"/move_requests?request_id={name}", headers=ADMIN)
        assert [each.request_id for each in engines["a"].moves[-2:]] == [f"{ID}-1", ID]

        engines["b"].error = errors.FailedPrecondition("it serves no KV")
        assert (await http.post(url, headers=ADMIN)).json() == outcome, "another one runs the request"
        response = await http.post("/move_requests?source=b", headers=ADMIN)
        assert (response.status_code, response.json()["error"]["message"]) == (400, "b: it serves no KV")
        engines["a"].moved = MoveRequestsResponse()
        response = await http.post("/move_requests?source=a", headers=ADMIN)
        assert response.json() == {"moved": 0, "ended": 0, "stayed": 0, "reasons": []}
        assert engines["a"].moves[-1] == MoveRequestsRequest()


async def test_a_target_is_an_engine_of_its_own_mesh(socket_dir: Path, other_dir: Path) -> None:
    """Each mesh has engines of the same names."""
    mesh, other = FakeMesh(socket_dir), FakeMesh(other_dir)
    settings = {**KEYS, "served_model_name": "a", "meshes": describe(other, "b")}
    async with (
        with_engines(mesh, "x", "y") as of_a,
        with_engines(other, "x", "y") as of_b,
        other.servers(),
        mesh.gateway(**settings),
        mesh.http() as http,
    ):
        await until(http, "ok")
        response = await http.post(f"/move_requests?request_id={ID}&target=b/y", headers=ADMIN)
        assert response.json()["error"]["message"].startswith("no engine runs request")
        assert [len(each.moves) for each in (*of_a.values(), *of_b.values())] == [0, 0, 1, 1]
        response = await http.post("/move_requests?source=a/x&target=b/y", headers=ADMIN)
        assert (response.status_code, response.json()["error"]["param"]) == (400, "target")
        assert (await http.post("/move_requests?source=a/x&target=a/y", headers=ADMIN)).status_code == 200
        assert of_a["x"].moves == [MoveRequestsRequest(target="y")]


async def test_what_names_no_request_or_engine(socket_dir: Path) -> None:
    mesh = FakeMesh(socket_dir)
    async with with_engines(mesh, "a"), mesh.gateway(**KEYS), mesh.http() as http:
        for query, status, param in (
            ("", 400, "request_id"),
            (f"request_id={ID}&source=a", 400, "request_id"),
            ("request_id=x", 400, "request_id"),
            (f"request_id={ID}&target=c", 404, "target"),
            ("source=c", 404, "source"),
            ("source=a&to=b", 400, "to"),
        ):
            response = await http.post(f"/move_requests?{query}", headers=ADMIN)
            assert (response.status_code, response.json()["error"]["param"]) == (status, param), query
