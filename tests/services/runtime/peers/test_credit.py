"""Credit for frames."""

import asyncio

from tokenloom.services.runtime.peers.credit import Credit


def test_takes_what_was_granted() -> None:
    credit = Credit(1)
    assert [credit.take(), credit.take()] == [True, False]
    credit.grant(2)
    assert credit.left == 2
    assert [credit.take() for _ in range(3)] == [True, True, False]


async def test_waits_for_a_grant() -> None:
    credit = Credit()
    waiter = asyncio.create_task(credit.wait())
    await asyncio.sleep(0)
    assert not waiter.done()
    credit.grant(0)
    await asyncio.sleep(0)
    assert not waiter.done()
    credit.grant(1)
    await waiter
    assert credit.take()


async def test_a_cancelled_wait_takes_nothing() -> None:
    credit = Credit()
    waiter = asyncio.create_task(credit.wait())
    await asyncio.sleep(0)
    waiter.cancel()
    credit.grant(1)
    assert credit.take()
