"""Operators pause, resume, put to sleep and wake one engine at the same time; its front must know the core's state."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from random import Random
from types import SimpleNamespace
from typing import Any

from tests.engine_core.helpers import VOCAB_SIZE, make_config, make_request
from tests.explorer.world import World
from tests.simulation.core_client import CoreClient
from tokenloom.engine_core.data.messages import EngineCoreOutputs
from tokenloom.request import errors
from tokenloom.services.engine.control.pause import Pause
from tokenloom.services.engine.core.core_link import CoreLink
from tokenloom.services.engine.engine_admin import Sleep
from tokenloom.services.engine.records.load import LoadTracker
from tokenloom.v1 import engine_pb2

STEP_SECONDS = 0.01
_CONFIG = make_config(max_model_len=64)
_MODES = (engine_pb2.PAUSE_MODE_ABORT, engine_pb2.PAUSE_MODE_WAIT, engine_pb2.PAUSE_MODE_KEEP)
_UNPAUSED = engine_pb2.PAUSE_MODE_UNSPECIFIED


class _Engine:
    """Holds a core, and the parts of its front that pause it and put it to sleep."""

    def __init__(self, world: World) -> None:
        self.world = world
        plan: Any = SimpleNamespace(step_seconds=STEP_SECONDS, copy_seconds=STEP_SECONDS, state_chunk=0, state_bytes=1)
        self.client = CoreClient(_CONFIG, VOCAB_SIZE, plan, Random(0), ())
        self.finished: set[str] = set()
        self.can_sleep = True

    async def start(self) -> None:
        """Start the core, whose workers may refuse to sleep."""
        ready = await self.client.start()
        load = LoadTracker(8, 8, self.world.loop.time)
        metrics: Any = SimpleNamespace(observe_step=self._observe)
        self.link = CoreLink(self.client, ready, load, metrics, clock=self.world.loop.time)
        self.pause = Pause(self.link, load)
        running: Any = SimpleNamespace(pause=self.pause, core=self.link, leases_ended=lambda: asyncio.sleep(0))
        self.sleep = Sleep(running)
        self.running = self.world.loop.create_task(self.link.run(), name="core")
        executor = self.client.core.executor
        if self.world.random.random() < 0.3:
            executor.collective_rpc = partial(_refuse_sleep, executor.collective_rpc)

    def _observe(self, outputs: EngineCoreOutputs) -> None:
        ended = (output.request_id for output in outputs.outputs if output.finish_reason is not None)
        self.finished.update(ended)

    def check(self) -> None:
        """Check that the front knows whether the core is paused, unless a call is on its way to the core."""
        if self.client._inputs:
            return
        is_paused = self.client.core.pausing.is_paused
        is_known = (self.pause.mode != _UNPAUSED) == is_paused
        self.world.check(is_known, f"the core is {'' if is_paused else 'not '}paused, and the front says otherwise")


def _refuse_sleep(collective_rpc: Callable[..., list[object]], method: str, *args: object) -> list[object]:
    """Do what the core asks the workers for, but do not sleep."""
    if method == "sleep":
        raise RuntimeError("no worker can sleep")
    return collective_rpc(method, *args)


class PauseScenario:
    """Three operators call what they like, and may go away; in the end one of them wakes and resumes the engine."""

    uses_disk = False

    async def run(self, world: World) -> None:
        engine = _Engine(world)
        await engine.start()
        world.loop.on_idle = engine.check
        await engine.client.add_request(make_request("long", [1, 2, 3], max_tokens=40))
        for number in range(3):
            world.begin(_operate(engine), f"operator {number}")
        await world.all_ended()
        for call in (lambda: engine.sleep.end(()), engine.pause.end):
            await world.begin(call(), "the last operator")
        await world.all_ended()
        await engine.client.add_request(make_request("last", [4, 5], max_tokens=3))
        await asyncio.sleep(200 * STEP_SECONDS)
        world.check(not engine.running.done(), "the core has ended")
        world.check("last" in engine.finished, "a request is not computed after the engine was resumed")
        engine.running.cancel()
        await engine.client.close()

    async def recover(self, world: World) -> None:
        raise AssertionError("nothing of it is on a disk")


async def _operate(engine: _Engine) -> None:
    """Make some calls, one after the other."""
    world, random = engine.world, engine.world.random
    calls: tuple[tuple[str, Callable[[], Awaitable[object]]], ...] = (
        ("pause", lambda: engine.pause.begin(random.choice(_MODES))),
        ("resume", engine.pause.end),
        ("sleep", lambda: engine.sleep.begin(random.randrange(3), random.choice(_MODES))),
        ("wake", lambda: engine.sleep.end(())),
    )
    for number in range(random.randint(1, 3)):
        await world.step(4)
        await asyncio.sleep(random.choice((0.0, 0.0, STEP_SECONDS, 8 * STEP_SECONDS)))
        name, call = random.choice(calls)
        await asyncio.wait([world.actor(_call(call), f"{name} {number}")])


async def _call(call: Callable[[], Awaitable[object]]) -> None:
    with suppress(errors.FailedPrecondition, errors.InvalidArgument):  # another operator was first
        await call()
