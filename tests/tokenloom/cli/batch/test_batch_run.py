"""A batch against a small server."""

import json
from typing import Any

import pytest

from tests.tokenloom.cli.fake_server import FakeServer
from tokenloom.cli.batch import batch_run
from tokenloom.cli.batch.batch_run import BadRequest, BatchRequest, BatchSender, read_request
from tokenloom.cli.server import Server

OK = {"choices": []}


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_run, "_LONGEST_WAIT", 0.0)


def lines(*ids: str) -> list[tuple[int, str]]:
    made = [{"custom_id": id, "url": "/v1/completions", "body": {"prompt": id}} for id in ids]
    return [(number, json.dumps(each)) for number, each in enumerate(made, 1)]


def run(url: str, numbered: list[tuple[int, str]], done: tuple[str, ...] = (), retries: int = 2) -> dict[str, Any]:
    return {line["custom_id"]: line for line in BatchSender(Server(url), 3, retries).run(numbered, done)}


def test_every_request_is_answered_once(server: FakeServer) -> None:
    server.reply(200, OK, x_request_id="r")
    answers = run(server.url, lines(*map(str, range(20))))
    assert sorted(answers, key=int) == list(map(str, range(20)))
    assert sorted(asked[3]["prompt"] for asked in server.requests) == sorted(map(str, range(20)))
    assert answers["7"]["response"] == {"status_code": 200, "request_id": "r", "body": OK}
    assert answers["7"]["error"] is None


def test_what_was_answered_before_is_not_asked_again(server: FakeServer) -> None:
    server.reply(200, OK)
    assert set(run(server.url, [*lines("a", "b", "c"), (4, "{")], done=("a", "c", "line-4"))) == {"b"}
    assert len(server.requests) == 1


def test_a_full_server_is_asked_again(server: FakeServer) -> None:
    server.reply(503, {"error": {"message": "full"}}, Retry_After="1")
    server.reply(429, {"error": {"message": "slowly"}})
    server.reply(200, OK)
    assert run(server.url, lines("a"))["a"]["response"]["status_code"] == 200
    assert len(server.requests) == 3


def test_a_refusal_is_the_answer(server: FakeServer) -> None:
    server.reply(400, {"error": {"message": "no"}})
    line = run(server.url, lines("a"))["a"]
    assert (line["response"]["status_code"], line["response"]["body"]) == (400, {"error": {"message": "no"}})
    assert len(server.requests) == 1


def test_a_server_that_stays_full_is_given_up(server: FakeServer) -> None:
    server.reply(503, {"error": {"message": "full"}})
    assert run(server.url, lines("a"))["a"]["response"]["status_code"] == 503
    assert len(server.requests) == 3


def test_wrong_lines_and_a_missing_server_have_errors(server: FakeServer) -> None:
    answers = run("http://127.0.0.1:1", [*lines("a"), (2, "{")])
    assert answers["a"]["error"]["code"] == "no_answer"
    assert answers["a"]["response"] is None
    assert answers["line-2"]["error"]["code"] == "invalid_request"


def test_an_id_that_comes_twice_is_refused(server: FakeServer) -> None:
    server.reply(200, OK)
    answers = list(BatchSender(Server(server.url), 1, 0).run(lines("a", "a"), ()))
    assert sorted(line["error"] is None for line in answers) == [False, True]
    assert len(server.requests) == 1


def test_a_path_that_no_http_client_can_send_is_an_error_of_its_line(server: FakeServer) -> None:
    server.reply(200, OK)
    odd = json.dumps({"custom_id": "odd", "url": "/v1/é", "body": {}})
    answers = run(server.url, [*lines("a"), (2, odd)])
    assert answers["odd"]["error"]["code"] == "invalid_request"
    assert answers["a"]["error"] is None


GOOD = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "Hi"}}


def test_a_request() -> None:
    assert read_request(1, json.dumps(GOOD)) == BatchRequest("a", "/v1/completions", {"prompt": "Hi"})


@pytest.mark.parametrize(
    ("change", "custom_id", "message"),
    [
        ({"custom_id": None}, "line-3", "custom_id must be"),
        ({"method": "GET"}, "a", "method must be POST"),
        ({"url": "http://elsewhere/v1/completions"}, "a", "url must be a path"),
        ({"body": []}, "a", "body must be an object"),
        ({"body": {"stream": True}}, "a", "stream must not be set"),
    ],
)
def test_what_is_wrong_is_said_with_the_line(change: dict[str, object], custom_id: str, message: str) -> None:
    with pytest.raises(BadRequest, match=f"line 3.*{message}|{message}") as caught:
        read_request(3, json.dumps(GOOD | change))
    assert caught.value.custom_id == custom_id


@pytest.mark.parametrize("line", ["{", "[]"])
def test_what_is_no_object(line: str) -> None:
    with pytest.raises(BadRequest):
        read_request(3, line)
