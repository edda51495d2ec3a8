"""Every response moves a metric, refusals of all kinds too."""

import asyncio
from pathlib import Path

import httpx
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from tests.services.gateway.fakes import FakeMesh
from tests.services.gateway.openai.test_chat import post
from tokenloom.request import errors
from tokenloom.services.gateway.http.response_counts import MAX_SERIES, OTHER, ResponseCounts

CHAT = "/v1/chat/completions"


async def counted(http: httpx.AsyncClient) -> dict[tuple[str, str, str], float]:
    """The counts by route, status and reason; without those of the status pages."""
    page = (await http.get("/metrics", headers={"authorization": "Bearer a key"})).text
    (family,) = (each for each in text_string_to_metric_families(page) if each.name == "tokenloom_http_responses")
    counts = {(s.labels["route"], s.labels["status"], s.labels["reason"]): s.value for s in family.samples}
    return {labels: count for labels, count in counts.items() if labels[0] != "/metrics"}


async def test_refusals_of_every_kind_are_counted(socket_dir: Path) -> None:
    async with FakeMesh(socket_dir).gateway(api_key=("a key",)) as mesh, mesh.http() as http:
        mesh.outputs.auto = ["x"]
        await post(http)  # without a key
        http.headers["authorization"] = "Bearer a key"
        await post(http)
        await post(http, temperature=-1)
        await post(http, model="other")
        await http.post(CHAT, content=b"{}", headers={"content-type": "text/plain"})
        await http.get(CHAT)
        await http.get("/nowhere/at/all")
        await http.get("/v1/models/other")
        await http.get("/v1/responses/resp_1")
        assert await counted(http) == {
            (CHAT, "401", "UNAUTHENTICATED"): 1,
            (CHAT, "200", ""): 1,
            (CHAT, "400", "INVALID_ARGUMENT"): 1,
            (CHAT, "404", "MODEL_NOT_FOUND"): 1,
            (CHAT, "415", "UNSUPPORTED_MEDIA_TYPE"): 1,
            (CHAT, "405", "METHOD_NOT_ALLOWED"): 1,
            (OTHER, "404", "NOT_FOUND"): 1,
            ("/v1/models/*", "404", "MODEL_NOT_FOUND"): 1,
            ("/v1/responses/*", "404", "NOT_FOUND"): 1,
        }


async def test_a_stream_that_fails_counts_with_its_reason(mesh: FakeMesh, http: httpx.AsyncClient) -> None:
    async def send_and_fail() -> None:
        request = await mesh.outputs.next_request()
        request.send("Hel", [1, 2, 3])
        await is_read.wait()
        request.fail(errors.Internal("the engine is broken"))

    is_read = asyncio.Event()
    failing = asyncio.create_task(send_and_fail())
    body = {"messages": [{"role": "user", "content": "hi"}], "stream": True}
    async with http.stream("POST", CHAT, json=body) as response:
        async for line in response.aiter_lines():
            if "Hel" in line:
                is_read.set()
    await failing
    assert await counted(http) == {(CHAT, "200", "INTERNAL"): 1}


async def test_what_is_no_request_is_counted(mesh: FakeMesh, http: httpx.AsyncClient) -> None:
    host, _, port = mesh.http_address.rpartition(":")
    for data in (b"NONSENSE\r\n\r\n", b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 200 + b"\r\n"):
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(data)
        await reader.read()
        writer.close()
    assert await counted(http) == {(OTHER, "400", "MALFORMED"): 1, (OTHER, "431", "FIELDS_TOO_LARGE"): 1}


def test_the_number_of_series_is_bounded() -> None:
    registry = CollectorRegistry()
    counts = ResponseCounts(registry)
    for number in range(MAX_SERIES + 50):
        counts.count("/", 500, f"REASON_{number}")
    page = generate_latest(registry).decode()
    assert page.count("tokenloom_http_responses_total{") == MAX_SERIES + 1
    assert 'tokenloom_http_responses_total{reason="other",route="other",status="500"} 50.0' in page


def test_refusals_of_the_api_by_reason() -> None:
    counts = ResponseCounts(CollectorRegistry())
    for route, status, reason in (
        (CHAT, 200, ""),
        (CHAT, 400, "INVALID_ARGUMENT"),
        ("/v1/completions", 400, "INVALID_ARGUMENT"),
        (CHAT, 200, "UNAVAILABLE"),  # a stream that has begun
        (CHAT, 200, "CANCELLED"),
        (CHAT, 499, "CANCELLED"),
        ("/mesh", 401, "UNAUTHENTICATED"),
    ):
        counts.count(route, status, reason)
    assert counts.refused() == {"INVALID_ARGUMENT": 2, "UNAVAILABLE": 1}
