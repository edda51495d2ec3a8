"""Requests that generate: clients leave, repeat with a key, change their body, and resume."""

import asyncio
from typing import Any

from tests.explorer.clients import Answer
from tests.explorer.gateway import Gateway
from tests.explorer.processors import text_of
from tests.explorer.world import World
from tokenloom.services.gateway.tenants.tenant import TenantLimits

MAX_OUTPUTS = 3
"""Of one tenant."""
REFUSED = (400, 408, 409, 422, 429, 499, 503)
"""Status codes that say that something is wrong with a request, or that it shall come again."""


class GenerationScenario:
    """Two tenants send requests with few places; some repeat a key, with the same body or with another one."""

    uses_disk = False

    async def run(self, world: World) -> None:
        gateway = Gateway(world, TenantLimits(live_outputs=MAX_OUTPUTS))
        await gateway.start()
        for number in range(2):
            world.begin(_repeat(gateway, f"key {number}"), f"client {number}")
        world.begin(_once(gateway), "client without a key")
        await asyncio.sleep(world.random.choice((0.0, 0.06, 0.15)))
        world.begin(gateway.generator.end_of_present(), "a gateway that waits for its successor")
        await world.all_ended()
        if world.random.random() < 0.5:
            await gateway.resumable.close()  # as a gateway that ends
        world.begin(gateway.generator.drain(), "a gateway that drains")
        await world.all_ended()
        await gateway.check()

    async def recover(self, world: World) -> None:
        raise AssertionError("nothing of it is on a disk")


async def _repeat(gateway: Gateway, key: str) -> None:
    """Send a request with a key, and more with the same key while it runs."""
    random = gateway.world.random
    body = body_of(max_tokens=random.randint(2, 6), n=random.randint(1, 2))
    calls = [post(gateway, body, key)]
    for _ in range(random.randint(1, 3)):
        await asyncio.sleep(random.choice((0.0, 0.03, 0.12)))
        other = body | {"max_tokens": body["max_tokens"] + 1} if random.random() < 0.4 else body
        calls.append(post(gateway, other, key))
    await asyncio.wait(calls)
    for call in calls:
        check_answer(gateway, call, body, "a", key)


async def _once(gateway: Gateway) -> None:
    random = gateway.world.random
    for _ in range(2):
        await gateway.world.step(8)
        body = body_of(max_tokens=random.randint(1, 4), n=random.randint(1, 2))
        call = post(gateway, body, None, tenant="b")
        await asyncio.wait([call])
        check_answer(gateway, call, body, "b", call)


def body_of(max_tokens: int, n: int) -> dict[str, Any]:
    """Return the body of a completion."""
    return {"model": "model", "prompt": "abc", "max_tokens": max_tokens, "n": n}


def post(gateway: Gateway, body: Any, key: str | None, tenant: str = "a") -> "asyncio.Task[Answer]":
    """Begin a completion whose client may leave."""
    headers = [] if key is None else [(b"idempotency-key", key.encode())]
    return gateway.send("POST", "/v1/completions", body, headers=headers, tenant=tenant)


def check_answer(gateway: Gateway, call: "asyncio.Task[Answer]", body: Any, tenant: str, request: object) -> None:
    """Check that an answer is whole and right, or a refusal that a client can understand.

    ``request``: what the tenant distinguishes it by.
    """
    if call.cancelled() or call.exception() is not None:
        return  # reported elsewhere
    answer, world = call.result(), gateway.world
    if answer.is_ok:
        whole = answer.json()
        texts = {choice["text"] for choice in whole["choices"]}
        right = {text_of(body["max_tokens"]), text_of(body["max_tokens"] + 1)}
        world.check(texts <= right, f"an answer says {texts}")
        gateway.answered[tenant].setdefault(request, whole["usage"]["total_tokens"])
    elif answer.status not in (0, 200):  # a client that left has the beginning only
        world.check(answer.status in REFUSED, f"an answer is {answer.status} {answer.body[:160]!r}")
