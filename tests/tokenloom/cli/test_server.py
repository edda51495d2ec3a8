"""The commands' HTTP client."""

import pytest

from tests.tokenloom.cli.fake_server import FakeServer
from tokenloom.cli.failures import RequestFailed
from tokenloom.cli.server import Server


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
