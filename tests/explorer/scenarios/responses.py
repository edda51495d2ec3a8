"""Responses in the background: begun with keys, looked at, cancelled and deleted, by tenants that share one gateway."""

import asyncio
from typing import Any

from tests.explorer.clients import TENANTS, Answer
from tests.explorer.gateway import ENDED_SECONDS, MAX_RUNNING, Gateway
from tests.explorer.scenarios.generations import REFUSED
from tests.explorer.world import World

_PATH = "/v1/responses"
_RUNNING = ("queued", "in_progress")


class ResponseScenario:
    """Clients begin responses in the background and end some of them before they are complete."""

    uses_disk = False

    async def run(self, world: World) -> None:
        gateway = Gateway(world)
        await gateway.start()
        for tenant in TENANTS:
            world.begin(_use(gateway, tenant), f"client {tenant}")
        await world.all_ended()
        await _fill(gateway)
        await gateway.check()

    async def recover(self, world: World) -> None:
        raise AssertionError("nothing of it is on a disk")


async def _use(gateway: Gateway, tenant: str) -> None:
    world, random = gateway.world, gateway.world.random
    body = {"model": "model", "input": "abc", "background": True, "max_output_tokens": random.randint(16, 24)}
    headers = [(b"idempotency-key", b"key")] if random.random() < 0.7 else []
    begun = await _ask(gateway, "POST", _PATH, body, headers=headers, tenant=tenant)
    if not begun.is_ok:
        return
    path = f"{_PATH}/{begun.json()['id']}"
    await asyncio.sleep(random.choice((0.0, 0.0, 0.11, 0.3)))
    await world.step(6)
    is_deleted = random.random() < 0.5
    method, where = ("DELETE", path) if is_deleted else ("POST", f"{path}/cancel")
    ended = await _ask(gateway, method, where, tenant=tenant)
    if not ended.is_ok:
        return
    if not is_deleted:
        status = ended.json()["status"]
        world.check(status not in _RUNNING, f"a response is {status} after it was cancelled")
    await world.loop.idle()
    world.check(not gateway.processors.live_outputs()[tenant], "a response is computed that was cancelled or deleted")
    shown = await _ask(gateway, "GET", path, tenant=tenant)
    if shown.is_ok:
        status = shown.json()["status"]
        world.check(not is_deleted, "a deleted response is still there")
        world.check(status not in _RUNNING, f"a response is {status} after it was cancelled")


async def _fill(gateway: Gateway) -> None:
    """Let one tenant begin as much as it can, and check that another one is served all the same."""
    body = {"model": "model", "input": "abc", "background": True, "max_output_tokens": 20}
    await asyncio.sleep(ENDED_SECONDS)
    for _ in range(MAX_RUNNING + 1):
        await _ask(gateway, "POST", _PATH, body, tenant="a", may_leave=False)
    begun = await _ask(gateway, "POST", _PATH, body, tenant="b", may_leave=False)
    gateway.world.check(b"in the background" not in begun.body, "one tenant has all places of responses")


async def _ask(gateway: Gateway, method: str, path: str, body: Any = None, **options: Any) -> Answer:
    """Send a request and check that no fault of ours ends it."""
    answer: Answer = await gateway.send(method, path, body, **options)
    is_right = answer.status in (0, 200, 404, *REFUSED)
    gateway.world.check(is_right, f"{method} answers {answer.status} {answer.body[:160]!r}")
    return answer
