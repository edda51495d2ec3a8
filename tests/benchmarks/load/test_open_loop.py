"""Requests that are sent at their times, and what is recorded of their answers."""

import asyncio

from tests.benchmarks.fake_server import FakeServer
from tokenloom.bench.load.http_client import Endpoint
from tokenloom.bench.load.open_loop import OpenLoop, Volley

EVENT = b'data: {"choices": [{"text": "x"}]}\n\n'
ANSWER = [EVENT, EVENT, b"data: [DONE]\n\n"]


async def send(server: FakeServer, count: int) -> Volley:
    """Send requests one after the other."""
    bodies = [(b'{"prompt": "a"}', 7), (b'{"prompt": "b"}', 9)]
    client = OpenLoop(Endpoint.of(server.base_url, "/v1/completions"), bodies)
    volley = Volley(asyncio.get_running_loop().time())
    for _ in range(count):
        client.send(asyncio.get_running_loop().time(), volley)
        await client.settle(30.0)
    await client.close()
    return volley


async def test_answers_and_refusals_are_told_apart() -> None:
    scripts = [(200, ANSWER), (503, [b'{"error": {"message": "later"}}']), (200, [EVENT, b'data: {"error": {}}\n\n'])]
    async with FakeServer(scripts).running() as server:
        volley = await send(server, 3)
    answered, refused, broken = volley.shots
    assert (answered.status, answered.complete, answered.refused, answered.failed, answered.tokens) == (
        200,
        True,
        False,
        False,
        7,
    )
    assert answered.sent_at < answered.first_at <= answered.ended_at
    assert (refused.status, refused.complete, refused.refused, refused.failed, refused.tokens) == (
        503,
        False,
        True,
        False,
        9,
    )
    assert (broken.status, broken.complete, broken.failed) == (200, False, True)
    assert [body["prompt"] for body in server.bodies] == ["a", "b", "a"]


async def test_a_server_that_is_not_there_fails_every_request() -> None:
    client = OpenLoop(Endpoint.of("http://127.0.0.1:1", "/v1/completions"), [(b"{}", 1)])
    volley = await client.run(1000.0, 0.02, seed=1)
    await client.close()
    assert volley.shots
    assert all(shot.failed and not shot.status for shot in volley.shots)


async def test_arrivals_follow_the_rate_and_the_seed() -> None:
    async with FakeServer([(200, ANSWER)] * 500).running() as server:
        client = OpenLoop(Endpoint.of(server.base_url, "/v1/completions"), [(b"{}", 1)])
        first = await client.run(1000.0, 0.1, seed=5)
        again = await client.run(1000.0, 0.1, seed=5)
        await client.close()
    assert len(first.shots) == len(again.shots)
    assert 60 < len(first.shots) < 140
    assert first.ended_at - first.begun_at >= 0.09
