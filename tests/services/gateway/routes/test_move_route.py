"""An operator lets running requests go on at other engines."""

from pathlib import Path

from tests.services.gateway.fakes import FakeMesh
from tests.services.gateway.mesh.fake_engines import ADMIN, KEYS, with_engines
from tokenloom.request import errors
from tokenloom.v1.engine_pb2 import MoveRequestsRequest, MoveRequestsResponse

ID = "0123456789abcdef" * 2 + "00000001"


async def test_requests_are_moved_where_they_run(socket_dir: Path) -> None:
    mesh = FakeMesh(socket_dir)
    async with with_engines(mesh, "a", "b") as engines, mesh.gateway(**KEYS), mesh.http() as http:
        url = f"/move_requests?request_id=chatcmpl-{ID}&target=b"
        assert (await http.post(url)).status_code == 401
        assert (await http.post(url, headers=ADMIN)).json()["error"]["message"].startswith("no engine runs request")
        engines["a"].moved = MoveRequestsResponse(moved=2, stayed=1, reasons=["it waits to run"])
        told = (await http.post(url, headers=ADMIN)).json()
        assert told == {"moved": 2, "ended": 0, "stayed": 1, "reasons": ["a: it waits to run"]}
        wanted = MoveRequestsRequest(request_id=ID, target="b")
        assert [engine.moves for engine in engines.values()] == [[wanted, wanted]] * 2

        for name in (f"generate-tokens-{ID}-1", f"resp_{ID}_89abcdef"):
            await http.post(f"/move_requests?request_id={name}", headers=ADMIN)
        assert [each.request_id for each in engines["a"].moves[-2:]] == [f"{ID}-1", ID]

        engines["b"].error = errors.FailedPrecondition("it serves no KV")
        assert (await http.post(url, headers=ADMIN)).json() == told, "another one runs the request"
        response = await http.post("/move_requests?source=b", headers=ADMIN)
        assert (response.status_code, response.json()["error"]["message"]) == (400, "b: it serves no KV")
        engines["a"].moved = MoveRequestsResponse()
        response = await http.post("/move_requests?source=a", headers=ADMIN)
        assert response.json() == {"moved": 0, "ended": 0, "stayed": 0, "reasons": []}
        assert engines["a"].moves[-1] == MoveRequestsRequest()


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
