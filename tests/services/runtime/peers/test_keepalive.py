"""Tests that pings become rarer with many links, and that a starved process waits longer for their answers."""

import asyncio

import pytest

from tests.loop_clock import pass_time
from tokenloom.services.runtime.host.limits import GrpcLimits
from tokenloom.services.runtime.peers.channels import KEEPALIVE_OPTIONS, Channels
from tokenloom.services.runtime.peers.keepalive import LONGEST_SECONDS, Keepalive

INTERVAL, ANSWER = "grpc.keepalive_time_ms", "grpc.http2.ping_timeout_ms"


@pytest.mark.parametrize(
    ("num_links", "interval_ms"), [(0, 1000), (64, 1000), (128, 2000), (640, 10_000), (10_000, 10_000)]
)
def test_the_interval_grows_with_the_links(num_links: int, interval_ms: int) -> None:
    assert dict(Keepalive().options(num_links))[INTERVAL] == interval_ms


def test_a_thousand_links_send_few_pings() -> None:
    keepalive = Keepalive()
    pings = sum(1000 / dict(keepalive.options(number))[INTERVAL] for number in range(1000))
    assert pings < 260


def test_patience_grows_with_lateness_and_shrinks_again() -> None:
    keepalive = Keepalive()
    keepalive.was_late(0.1)
    assert dict(keepalive.options(1)) == dict(KEEPALIVE_OPTIONS), "as any busy loop is"
    keepalive.was_late(2.0)
    widened = dict(keepalive.options(1))[ANSWER]
    assert widened == 5500
    for _ in range(120):  # 30 s
        keepalive.was_late(0.0)
    assert dict(keepalive.options(1))[ANSWER] == pytest.approx(3500, abs=5)
    for _ in range(4000):
        keepalive.was_late(0.0)
    assert dict(keepalive.options(1)) == dict(KEEPALIVE_OPTIONS)
    keepalive.was_late(1000.0)
    assert dict(keepalive.options(1))[ANSWER] == 1500 + 1000 * LONGEST_SECONDS


async def test_a_starved_loop_is_noticed() -> None:
    channels = Channels()
    task = asyncio.create_task(channels.keepalive.run())
    await asyncio.sleep(0)
    pass_time(3.0)
    async with asyncio.timeout(30):
        while dict(channels.keepalive.options(1))[ANSWER] < 6000:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    task.cancel()


async def test_channels_count_those_that_are_open() -> None:
    channels = Channels()
    opened = [channels.open("127.0.0.1:1", "engine") for _ in range(3)]
    assert len(channels._open) == 3
    while opened:
        await opened.pop().close()
    assert len(channels._open) == 0


def test_a_server_of_thousands_waits_for_starved_clients_and_asks_them_seldom() -> None:
    options, usual = dict(GrpcLimits(is_patient=True).options()), dict(KEEPALIVE_OPTIONS)
    assert options.keys() >= usual.keys()
    assert options[ANSWER] >= usual[ANSWER] + 1000 * LONGEST_SECONDS
    assert options[INTERVAL] == 1000 * LONGEST_SECONDS
    assert dict(GrpcLimits().options()).keys().isdisjoint(usual), "other servers ask as all processes do"
