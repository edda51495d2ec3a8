"""Calls that overlap: what the front reports is what the core does."""

import asyncio
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any, cast

from hypothesis import given, settings
from hypothesis import strategies as st

from tokenloom.engine_core.client.async_core_client import PendingCalls
from tokenloom.engine_core.data.messages import EngineCoreOutputs, UtilityCall, UtilityOutput
from tokenloom.engine_core.wire.frames import to_raw
from tokenloom.request.errors import FailedPrecondition
from tokenloom.services.engine.control.pause import Pause
from tokenloom.services.engine.core.core_link import CoreLink
from tokenloom.services.engine.records.load import LoadTracker
from tokenloom.v1.engine_pb2 import PAUSE_MODE_KEEP, PAUSE_MODE_UNSPECIFIED


class Core:
    """Makes calls when it is asked to, in the order in which they were sent, as the core does between steps."""

    def __init__(self) -> None:
        self.is_paused = self.is_asleep = False
        self.calls: list[tuple[str, asyncio.Future[object]]] = []

    async def call(self, method: str, *args: object) -> object:
        made: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        self.calls.append((method, made))
        return await made

    def make(self) -> None:
        """Make the oldest call."""
        method, made = self.calls.pop(0)
        if made.cancelled():  # its caller has gone, but it was sent
            made = asyncio.get_running_loop().create_future()
        result: object = None
        match method:
            case "pause":
                self.is_paused = True
            case "sleep":
                self.is_paused = self.is_asleep = True
            case "wake_up":
                result = self.is_asleep
                if self.is_asleep:  # otherwise it does nothing, and a pause goes on
                    self.is_paused = self.is_asleep = False
            case "resume" if self.is_asleep:
                made.set_exception(FailedPrecondition("the engine is asleep; call wake_up first"))
                return
            case "resume":
                self.is_paused = False
            case "is_sleeping":
                result = self.is_asleep
        made.set_result(result)


def make_pause() -> tuple[Pause, Core, LoadTracker]:
    core, load = Core(), LoadTracker(8, 8)
    return Pause(cast(CoreLink, core), load), core, load


async def settle() -> None:
    """Let the tasks run until all of them wait for the core."""
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_pause_that_begins_while_another_ends_is_seen_by_the_mesh() -> None:
    pause, core, load = make_pause()
    tasks = []
    for call in (pause.begin(PAUSE_MODE_KEEP), pause.end(), pause.begin(PAUSE_MODE_KEEP)):
        tasks.append(asyncio.ensure_future(call))
        await settle()
    while core.calls:
        core.make()
        await settle()
    await asyncio.gather(*tasks)
    assert core.is_paused
    assert load.is_paused
    assert pause.mode == PAUSE_MODE_KEEP


async def test_waking_an_engine_that_is_awake_ends_no_pause() -> None:
    pause, core, load = make_pause()
    core.is_paused = core.is_asleep = True
    pause.note_begin(PAUSE_MODE_KEEP)
    tasks = []
    for call in (pause.wake(None), pause.begin(PAUSE_MODE_KEEP), pause.wake(None)):
        tasks.append(asyncio.ensure_future(call))
        await settle()
    while core.calls:
        core.make()
        await settle()
    await asyncio.gather(*tasks)
    assert core.is_paused
    assert load.is_paused


async def test_only_the_pause_that_was_begun_is_ended() -> None:
    pause, core, load = make_pause()

    async def make(call: Coroutine[Any, Any, Any]) -> Any:
        task = asyncio.ensure_future(call)
        await settle()
        while core.calls:
            core.make()
            await settle()
        return await task

    ours = await make(pause.begin(PAUSE_MODE_KEEP))
    await make(pause.end(ours))
    assert not core.is_paused
    ours = await make(pause.begin(PAUSE_MODE_KEEP))
    await make(pause.begin(PAUSE_MODE_KEEP))  # an operator's
    await make(pause.end(ours))
    assert core.is_paused
    assert load.is_paused


async def test_a_resume_does_not_overtake_the_pause_of_an_operator_who_left() -> None:
    """With the client's own sending, of which the pause's message is held up."""
    core, calls, pause_may_go = Core(), PendingCalls(), asyncio.Event()

    async def send(call: UtilityCall) -> None:
        if call.method == "pause":
            await pause_may_go.wait()
        core.is_paused = call.method == "pause"
        calls.take(EngineCoreOutputs(utility_output=UtilityOutput(call.call_id, result=to_raw(None))))

    link: Any = SimpleNamespace(call=lambda method, *args: calls.make(method, args, send))
    load = LoadTracker(8, 8)
    pause = Pause(link, load)
    beginning = asyncio.create_task(pause.begin(PAUSE_MODE_KEEP))
    await settle()
    ending = asyncio.create_task(pause.end())
    await settle()
    beginning.cancel()
    await settle()
    pause_may_go.set()
    await settle()
    await ending
    assert core.is_paused == load.is_paused == (pause.mode != PAUSE_MODE_UNSPECIFIED)
    assert not core.is_paused


@settings(max_examples=300, deadline=None)
@given(
    st.lists(
        st.sampled_from(["begin", "end", "sleep", "wake", "leave", "make", "make", "make"]),
        min_size=1,
        max_size=40,
    )
)
def test_whatever_calls_overlap_the_mesh_knows_the_state_in_the_end(course: list[str]) -> None:
    asyncio.run(_run(course))


async def _run(course: list[str]) -> None:
    pause, core, load = make_pause()
    tasks = []

    async def sleep() -> None:  # as :class:`Sleep` does
        pause.note_begin(PAUSE_MODE_KEEP)
        await core.call("sleep")

    calls: dict[str, Callable[[], Coroutine[Any, Any, Any]]] = {
        "begin": lambda: pause.begin(PAUSE_MODE_KEEP),
        "end": pause.end,
        "sleep": sleep,
        "wake": lambda: pause.wake(None),
    }
    for action in [*course, *["make"] * (2 * len(course))]:
        if action == "leave":  # the operator whose call is the latest one
            if tasks:
                tasks[-1].cancel()
        elif action != "make":
            tasks.append(asyncio.ensure_future(calls[action]()))
        elif core.calls:
            core.make()
        await settle()
    assert not core.calls
    for error in await asyncio.gather(*tasks, return_exceptions=True):
        assert error is None or isinstance(error, (int, FailedPrecondition, asyncio.CancelledError))
    assert load.is_paused == core.is_paused == (pause.mode != PAUSE_MODE_UNSPECIFIED)
