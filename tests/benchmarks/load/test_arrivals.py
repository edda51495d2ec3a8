"""When requests begin, and how many run at once."""

import math

import pytest

from tests.benchmarks.fake_server import ANSWER, FakeServer
from tokenloom.bench.load.arrivals import Pace, arrival_times, run_load
from tokenloom.bench.load.bodies import CompletionBody
from tokenloom.bench.load.datasets import Prompt
from tokenloom.bench.load.events import Outcome
from tokenloom.bench.load.http_client import Client, Endpoint


def test_without_a_rate_all_come_at_once() -> None:
    assert arrival_times(3, Pace()) == [0.0, 0.0, 0.0]


def test_a_ramp_spreads_the_first_ones() -> None:
    assert arrival_times(6, Pace(max_concurrency=4, ramp_up=2.0)) == [0.0, 0.5, 1.0, 1.5, 2.0, 2.0]


@pytest.mark.parametrize("burstiness", [0.5, 1.0, 10.0])
def test_a_rate_is_kept_on_average(burstiness: float) -> None:
    times = arrival_times(4000, Pace(request_rate=20.0, burstiness=burstiness))
    assert times == sorted(times)
    assert times[0] == 0.0
    assert times[-1] == pytest.approx(4000 / 20, rel=0.1)


def test_the_seed_decides_the_arrivals() -> None:
    one, other = Pace(request_rate=5.0, seed=1), Pace(request_rate=5.0, seed=2)
    assert arrival_times(10, one) == arrival_times(10, one) != arrival_times(10, other)


def _client(server: FakeServer) -> Client:
    return Client(Endpoint.of(server.base_url, "/v1/completions"), CompletionBody("m"))


async def test_no_more_run_at_once_than_allowed() -> None:
    server, heard = FakeServer([ANSWER]), list[Outcome]()
    prompts = [Prompt([index], 3) for index in range(12)]
    async with server.running(), _client(server) as client:
        result = await run_load(client, prompts, Pace(max_concurrency=3), heard.append)
    assert server.most_in_flight == server.connections == 3
    assert sorted(body["prompt"][0] for body in server.bodies) == list(range(12))
    assert {id(outcome) for outcome in heard} == {id(outcome) for outcome in result.outcomes}
    assert sum(outcome.output_tokens for outcome in result.outcomes) == 36
    assert 0 < max(outcome.latency for outcome in result.outcomes) < result.seconds < math.inf
