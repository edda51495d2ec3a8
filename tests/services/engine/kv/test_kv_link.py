import asyncio
from collections.abc import Coroutine

import pytest

from tests.services.engine.kv.kv_fakes import FakeCore
from tokenloom.engine_core.data.errors import EngineDeadError
from tokenloom.engine_core.data.kv_messages import KVAnswer, KVCall, KVEvent, KVRemoteProgress, KVRenew, KVVerify
from tokenloom.request.errors import Unavailable
from tokenloom.services.engine.kv.kv_loads import KVLink


class MortalCore(FakeCore):
    """Dead once ``dead`` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.dead = asyncio.Event()

    async def kv_send(self, call: KVCall) -> None:
        if self.dead.is_set():
            raise EngineDeadError("dead")
        await super().kv_send(call)

    async def kv_receive(self) -> KVEvent:
        receiving = asyncio.ensure_future(super().kv_receive())
        dying = asyncio.ensure_future(self.dead.wait())
        await asyncio.wait((receiving, dying), return_when=asyncio.FIRST_COMPLETED)
        if dying.done():
            receiving.cancel()
            raise EngineDeadError("dead")
        dying.cancel()
        return receiving.result()


def renew(link: KVLink, acquisition_id: bytes) -> Coroutine[None, None, KVAnswer]:
    return link.call(lambda call_id: KVRenew(call_id, acquisition_id))


async def test_answers_find_their_callers_in_any_order() -> None:
    core, asked = FakeCore(), list[KVVerify]()
    link = KVLink(core)
    async with asyncio.TaskGroup() as group:
        running = group.create_task(link.run(asked.append))
        calls = [group.create_task(renew(link, bytes([number]))) for number in range(3)]
        noted = [await core.noted(KVRenew) for _ in calls]
        core.say(KVVerify("1.1", copied=True))
        core.say(KVAnswer(999))  # nobody's
        for call in reversed(noted):
            core.say(KVAnswer(call.call_id, ttl_seconds=float(call.acquisition_id[0])))
        assert [(await call).ttl_seconds for call in calls] == [0.0, 1.0, 2.0]
        assert asked == [KVVerify("1.1", copied=True)]
        running.cancel()


async def test_a_caller_that_gave_up_is_forgotten() -> None:
    core = FakeCore()
    link = KVLink(core)
    running = asyncio.create_task(link.run(lambda verify: None))
    call = asyncio.create_task(renew(link, b"a"))
    first = await core.noted(KVRenew)
    call.cancel()
    core.say(KVAnswer(first.call_id, ttl_seconds=1.0))
    core.answers[KVRenew] = lambda call: KVAnswer(call.call_id, ttl_seconds=2.0)
    assert (await renew(link, b"b")).ttl_seconds == 2.0
    running.cancel()


async def test_a_dead_core_answers_nobody() -> None:
    core = MortalCore()
    link = KVLink(core)
    running = asyncio.create_task(link.run(lambda verify: None))
    call = asyncio.create_task(renew(link, b"a"))
    await core.noted(KVRenew)
    core.dead.set()
    with pytest.raises(Unavailable):
        await call
    await running  # ended by itself
    with pytest.raises(Unavailable):
        await renew(link, b"b")
    await link.send(KVRemoteProgress("1.1", 4))  # lost, like the load
