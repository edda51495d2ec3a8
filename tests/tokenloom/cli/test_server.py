"""The commands' HTTP client."""

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from tests.tokenloom.cli.fake_server import FakeServer
from tokenloom.cli.failures import RequestFailed
from tokenloom.cli.server import ApiKey, Server, connect
from tokenloom.supervisor import state_dir
from tokenloom.supervisor.certificates import make_certificates
from tokenloom.supervisor.state_dir import MeshRecord, PartRecord


def test_a_key_and_a_path_before_the_api_are_kept(server: FakeServer) -> None:
    server.reply(200, {"data": [{"id": "demo"}]})
    assert Server(f"{server.url}/proxy/v1/", "secret").model() == "demo"
    method, path, headers, body = server.requests[0]
    assert (method, path, body) == ("GET", "/proxy/v1/models", None)
    assert headers["Authorization"] == "Bearer secret"


def test_a_refusal_says_why_and_when_to_come_again(server: FakeServer) -> None:
    server.reply(503, {"error": {"message": "full"}}, Retry_After="2", x_request_id="r1")
    reply = Server(server.url).post("/v1/completions", {"prompt": "Hi"})
    assert (reply.status, reply.retry_after, reply.request_id) == (503, 2.0, "r1")
    with pytest.raises(RequestFailed, match="HTTP 503: full"):
        reply.value()
    with pytest.raises(RequestFailed, match="HTTP 503: full"):
        list(Server(server.url).stream("/v1/completions", {"prompt": "Hi"}))


@pytest.mark.parametrize(
    ("body", "message"),
    [(b"<html>bad gateway", "<html>bad gateway"), ({"message": "flat"}, "flat"), ([], "the server gave no reason")],
)
def test_an_error_of_another_form_is_shown_as_it_is(server: FakeServer, body: object, message: str) -> None:
    server.reply(502, body)
    with pytest.raises(RequestFailed, match=f"HTTP 502: {message}"):
        Server(server.url).get("/v1/models").value()


def test_what_is_no_json_is_a_failure(server: FakeServer) -> None:
    server.reply(200, b"hello")
    with pytest.raises(RequestFailed, match="not a JSON object"):
        Server(server.url).get("/v1/models")


def test_a_server_without_models_is_a_failure(server: FakeServer) -> None:
    server.reply(200, {"data": []})
    with pytest.raises(RequestFailed, match="lists no model"):
        Server(server.url).model()


def test_no_server_is_a_failure() -> None:
    with pytest.raises(RequestFailed, match=r"no answer from http://127.0.0.1:1 \(connection refused\)"):
        Server("http://127.0.0.1:1").get("/health")


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://host", "http://", "http://host:port"])
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match=r"must be http|no valid port"):
        Server(url)


def test_the_newest_local_mesh_is_the_default(tmp_path: Path) -> None:
    assert connect(None).url == "http://127.0.0.1:8000"
    state = {"pid": 1, "address": "127.0.0.1:9000", "http": "127.0.0.1:4711"}
    (tmp_path / "gateway-0.json").write_text(json.dumps(state))
    parts = [
        PartRecord("engine", 0, "both", str(tmp_path / "engine-0.json")),
        PartRecord("gateway", 0, None, str(tmp_path / "gateway-0.json")),
    ]
    with state_dir.mesh_directory() as directory:
        state_dir.write_record(directory, MeshRecord(7, 4711, parts))
        assert connect(None).url == "http://127.0.0.1:4711"
        assert connect("http://elsewhere:1/v1").url == "http://elsewhere:1"


def test_a_local_mesh_with_a_certificate_is_asked_by_it(tmp_path: Path) -> None:
    """Its own files name the certificate, so no authority and no name needs to vouch for it; another one is refused."""
    make_certificates(tmp_path, days=30)
    gateway, engine = ((tmp_path / f"{part}.crt", tmp_path / f"{part}.key") for part in ("gateway", "engine"))
    server = FakeServer(gateway)
    server.reply(200, {"data": [{"id": "demo"}]})
    try:
        for certificate, _ in (gateway, engine):
            state = {"pid": 1, "address": "127.0.0.1:9000", "http": server.address, "certificate": str(certificate)}
            (tmp_path / "gateway-0.json").write_text(json.dumps(state))
            with state_dir.mesh_directory() as directory:
                part = PartRecord("gateway", 0, None, str(tmp_path / "gateway-0.json"))
                state_dir.write_record(directory, MeshRecord(7, 4711, [part]))
                found = connect(None)
            assert found.url == server.url
            if certificate == gateway[0]:
                assert found.model() == "demo"
            else:
                with pytest.raises(RequestFailed, match="no answer from https"):
                    found.model()
        with pytest.raises(RequestFailed, match="no answer from https"):
            connect(server.url).model()
    finally:
        server.close()


@pytest.mark.parametrize("key", ["\u4e2d", "a\nb", "\ud83d"])
def test_a_key_that_http_cannot_carry_is_a_usage_error(key: str) -> None:
    with pytest.raises(typer.BadParameter, match="cannot carry") as refused:
        connect("http://127.0.0.1:1", key)
    assert key not in str(refused.value)


def test_what_is_no_url_is_a_usage_error() -> None:
    with pytest.raises(typer.BadParameter, match="must be http"):
        connect("nowhere")


def test_a_key_among_the_flags_is_warned_of() -> None:
    commands, keys = typer.Typer(), list[str]()

    @commands.command()
    def ask(api_key: ApiKey = "") -> None:
        keys.append(api_key)

    output = CliRunner().invoke(commands, ["--api-key", "abc123"]).output
    assert "--api-key: every user of this machine can read" in output
    assert "TOKENLOOM_API_KEY or OPENAI_API_KEY" in output
    assert "abc123" not in output
    assert CliRunner().invoke(commands, [], env={"TOKENLOOM_API_KEY": "abc123"}).output == ""
    assert keys == ["abc123", "abc123"]
