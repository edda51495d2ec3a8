"""The HTTP client against a server in the same loop."""

import time
from dataclasses import replace

import pytest

from tests.benchmarks.fake_server import ANSWER, CUT, DONE, FakeServer, text
from tokenloom.bench.load.bodies import CompletionBody
from tokenloom.bench.load.datasets import Prompt
from tokenloom.bench.load.events import Outcome
from tokenloom.bench.load.http_client import Client, Endpoint, Sender

PROMPT = Prompt([1, 2, 3], 5, "chat")


async def stream(server: FakeServer, times: int = 1, api_key: str = "") -> list[Outcome]:
    async with server.running():
        endpoint = Endpoint.of(server.base_url, "/v1/completions", api_key)
        async with Client(endpoint, CompletionBody("m", {"temperature": 0})) as client:
            return [await client.stream(PROMPT, time.perf_counter()) for _ in range(times)]


async def test_the_request_is_openais() -> None:
    server = FakeServer([ANSWER])
    (outcome,) = await stream(server, api_key="secret")
    assert server.bodies == [
        {
            "model": "m",
            "prompt": [1, 2, 3],
            "max_tokens": 5,
            "stream": True,
            "stream_options": {"include_usage": True},
            "temperature": 0,
        }
    ]
    assert "POST /v1/completions HTTP/1.1" in server.heads[0]
    assert "Authorization: Bearer secret" in server.heads[0]
    assert (outcome.error, outcome.output_tokens, outcome.kind, len(outcome.itl)) == ("", 3, "chat", 2)
    assert 0 < outcome.ttft < outcome.latency


async def test_connections_are_used_again() -> None:
    server = FakeServer([ANSWER])
    assert [outcome.error for outcome in await stream(server, 3)] == [""] * 3
    assert server.connections == 1


async def test_a_connection_given_up_between_requests_costs_no_request() -> None:
    server = FakeServer([ANSWER], keep_alive=False)
    assert [outcome.error for outcome in await stream(server, 3)] == [""] * 3
    assert server.connections == 3


async def test_a_refusal_is_told_with_its_reason() -> None:
    server = FakeServer([(429, [b'{"error": {"message": "too many"}}']), ANSWER])
    refused, good = await stream(server, 2)
    assert refused.error.startswith("HTTP 429")
    assert "too many" in refused.error
    assert not good.error


async def test_a_connection_that_breaks_is_told() -> None:
    (outcome,) = await stream(FakeServer([(200, [text("a"), CUT])]))
    assert "ConnectionLost" in outcome.error
    assert outcome.output_tokens == 1


async def test_what_is_no_json_is_told() -> None:
    (outcome,) = await stream(FakeServer([(200, [b"data: {oops\n\n", DONE])]))
    assert "DecodeError" in outcome.error


async def test_nobody_listens() -> None:
    async with Client(Endpoint.of("http://127.0.0.1:1", "/v1/completions"), CompletionBody("m")) as client:
        assert "Error" in (await client.stream(PROMPT, 0.0)).error


@pytest.mark.parametrize(
    ("url", "host", "port", "tls", "path"),
    [
        ("http://localhost:8000", "localhost", 8000, False, "/v1/completions"),
        ("http://localhost:8000/v1/", "localhost", 8000, False, "/v1/completions"),
        ("https://example.org/llm/v1", "example.org", 443, True, "/llm/v1/completions"),
        ("http://[::1]", "::1", 80, False, "/v1/completions"),
    ],
)
def test_base_urls(url: str, host: str, port: int, tls: bool, path: str) -> None:
    endpoint = Endpoint.of(url, "/v1/completions")
    assert (endpoint.host, endpoint.port, endpoint.tls, endpoint.path) == (host, port, tls, path)


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://localhost", "http://"])
def test_other_urls_are_refused(url: str) -> None:
    with pytest.raises(ValueError, match="must be http"):
        Endpoint.of(url, "/")


async def test_bodies_for_several_paths_share_a_connection() -> None:
    server = FakeServer([ANSWER])
    async with server.running(), Sender() as sender:
        for path in ("/v1/messages?beta=true", "/v1/responses"):
            outcome = Outcome(0.0)
            endpoint = replace(Endpoint.of(server.base_url, path), headers={"x-app": "cli"})
            await sender.send(endpoint, {"path": path}, outcome, time.perf_counter())
            assert (outcome.error, outcome.output_tokens) == ("", 3)
    assert [body["path"] for body in server.bodies] == ["/v1/messages?beta=true", "/v1/responses"]
    assert all("\nx-app: cli\r\n" in head for head in server.heads)
    assert server.connections == 1
