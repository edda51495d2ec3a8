"""``tokenloom move``, against a server that answers as a gateway does; ``tests/mesh/test_moving.py`` moves requests."""

import pytest
from typer.testing import CliRunner

from tests.tokenloom.cli.fake_server import FakeServer
from tokenloom.cli.main import app

ID = "chatcmpl-" + "0123456789" * 4


@pytest.mark.parametrize(
    ("arguments", "path"),
    [
        ([ID, "engine-1"], f"/move_requests?request_id={ID}&target=engine-1"),
        ([ID], f"/move_requests?request_id={ID}"),
        (["engine-0", "m/engine-1"], "/move_requests?source=engine-0&target=m%2Fengine-1"),
    ],
)
def test_what_is_asked_and_told(server: FakeServer, arguments: list[str], path: str) -> None:
    server.reply(200, {"moved": 3, "ended": 1, "stayed": 0, "reasons": []})
    result = CliRunner().invoke(app, ["move", *arguments, "--base-url", server.url])
    assert (result.exit_code, result.stdout) == (0, "moved: 3, ended: 1, stayed: 0\n")
    assert [asked[1] for asked in server.requests] == [path]


def test_what_stays_is_a_failure(server: FakeServer) -> None:
    server.reply(200, {"moved": 0, "ended": 0, "stayed": 1, "reasons": ["engine-0: it waits to run"]})
    result = CliRunner().invoke(app, ["move", ID, "--base-url", server.url])
    assert (result.exit_code, result.stderr) == (1, "stayed: engine-0: it waits to run\n")


def test_a_server_that_refuses(server: FakeServer) -> None:
    server.reply(404, {"error": {"message": "no engine runs it"}})
    result = CliRunner().invoke(app, ["move", ID, "--base-url", server.url])
    assert result.exit_code == 1
    assert "HTTP 404: no engine runs it" in result.stderr


def test_a_server_without_admin_routes(server: FakeServer) -> None:
    server.reply(404, {"error": {"message": "Not found; see /docs for the available endpoints."}})
    result = CliRunner().invoke(app, ["move", ID, "--base-url", server.url])
    assert result.exit_code == 1
    assert "start it with --admin-api-key" in result.stderr
