"""Two output processors whose streams are cut while requests run, move, are repeated and are cancelled."""

import asyncio

from tests.explorer.gateway import Gateway
from tests.explorer.scenarios.generations import body_of, check_answer, post
from tests.explorer.world import World

ADDRESSES = ("op 0", "op 1")
_SUSPECT = b"ended while they ran only this request"
"""Says the error of a request that was alone wherever streams were cut, and is not sent again: it may be the cause."""


class OutputScenario:
    """Streams are cut at any time; every request ends, with the right text or an error that its client understands."""

    uses_disk = False

    async def run(self, world: World) -> None:
        gateway = Gateway(world, addresses=ADDRESSES)
        await gateway.start()
        for number in range(4):
            world.begin(_use(gateway, number), f"client {number}")
        world.begin(_cut(gateway), "saboteur")
        await world.all_ended()
        await gateway.check()

    async def recover(self, world: World) -> None:
        raise AssertionError("nothing of it is on a disk")


async def _cut(gateway: Gateway) -> None:
    """Cut the streams of one output processor after the other, or of both."""
    random = gateway.world.random
    for _ in range(random.randint(1, 4)):
        await asyncio.sleep(random.choice((0.0, 0.05, 0.1, 0.12)))
        await gateway.world.step(12)
        for address in random.sample(ADDRESSES, random.randint(1, 2)):
            gateway.processors.cut(address)


async def _use(gateway: Gateway, number: int) -> None:
    random = gateway.world.random
    key = f"key {number}" if number % 2 else None
    body = body_of(max_tokens=random.randint(2, 6), n=random.randint(1, 2))
    gateway.asked["a"][number] = len(body["prompt"]) + body["n"] * body["max_tokens"]
    await gateway.world.step(20)
    calls = [post(gateway, body, key)]
    if key is not None:
        await asyncio.sleep(random.choice((0.0, 0.06, 0.15)))
        calls.append(post(gateway, body, key))
    await asyncio.wait(calls)
    for call in calls:
        if call.cancelled() or call.exception() is not None or _SUSPECT not in call.result().body:
            check_answer(gateway, call, body, "a", key or call)
