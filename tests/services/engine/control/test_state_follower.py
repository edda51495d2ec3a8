"""An engine on its way to the state that operators want, on a clock that the test moves."""

import asyncio
from collections.abc import AsyncIterator, Collection
from typing import Any

import pytest

from tests.loop_clock import pass_time, settle
from tokenloom.process.fall_backs import FallBacks
from tokenloom.request.errors import FailedPrecondition
from tokenloom.services.engine.control.state_follower import LONGEST_RETRY_SECONDS, StateFollower
from tokenloom.v1.coordinator_pb2 import DesiredState, EngineSetting, StateProgress
from tokenloom.v1.engine_pb2 import (
    PAUSE_MODE_ABORT,
    PAUSE_MODE_KEEP,
    PAUSE_MODE_WAIT,
    WAKE_TAG_WEIGHTS,
    PauseMode,
    WakeTag,
)
from tokenloom.v1.types_pb2 import ENGINE_ROLE_DECODE

PAUSED = DesiredState(revision=2, pause_mode=PAUSE_MODE_WAIT, clear_cache=True)
RUNNING = DesiredState(revision=3)


class Engine:
    """Notes what it was asked to do. A call fails, or waits, as the test says."""

    def __init__(self) -> None:
        self.calls: list[object] = []
        self.is_asleep = False
        self.failures: list[Exception] = []
        self.quiet = asyncio.Event()
        self.quiet.set()

    async def inherit(self, setting: EngineSetting) -> bool:
        if setting.role:
            self.calls.append(("role", setting.role))
        if setting.weights_path:
            await self.load_weights(setting.weights_path)
        return bool(setting.weights_path)

    async def load_weights(self, path: str) -> None:
        self.calls.append(("weights", path))
        if self.failures:
            raise self.failures.pop()

    def starts_with(self, weights: Collection[bytes]) -> bool:
        return b"own" in weights

    def is_paused(self) -> bool:
        return self.is_asleep

    async def idle(self) -> None:
        self.calls.append("idle")
        await self.quiet.wait()

    async def pause(self, mode: PauseMode, *, clear_cache: bool) -> None:
        self.calls.append(("pause", mode, clear_cache))
        await self.quiet.wait()
        if self.failures:
            raise self.failures.pop()

    async def sleep(self, level: int, mode: PauseMode) -> None:
        self.calls.append(("sleep", level))
        self.is_asleep = True

    async def is_sleeping(self) -> bool:
        return self.is_asleep

    async def wake(self, tags: list[WakeTag]) -> None:
        self.calls.append(("wake", tags))

    async def run_requests(self) -> None:
        self.calls.append("run")


class Follower:
    """A follower that runs, and what it reports."""

    def __init__(self) -> None:
        self.engine = Engine()
        self.progress = StateProgress()
        self.num_reached = 0
        self.fall_backs = FallBacks()
        self.follower = StateFollower(self.engine, self._show, self._reached, self.fall_backs)
        self.task = asyncio.create_task(self.follower.run())

    async def take(self, state: DesiredState) -> None:
        self.follower.take(state)
        await settle()

    def _show(self, wanted: DesiredState, progress: StateProgress) -> None:
        self.progress = progress

    def _reached(self) -> None:
        self.num_reached += 1


@pytest.fixture
async def made() -> AsyncIterator[Follower]:
    follower = Follower()
    yield follower
    follower.task.cancel()


async def test_it_is_in_the_state_once_it_has_reached_it(made: Follower) -> None:
    made.engine.quiet.clear()
    await made.take(PAUSED)
    assert (made.progress.reached, made.num_reached) == (0, 0)
    made.engine.quiet.set()
    await settle()
    assert (made.progress, made.num_reached) == (StateProgress(reached=2), 1)
    await made.take(DesiredState(revision=1))
    await made.take(PAUSED)
    assert made.engine.calls == [("pause", PAUSE_MODE_WAIT, True)], "an earlier state, or the same once more"


async def test_a_coordinator_of_an_older_release_wants_no_state(made: Follower) -> None:
    await made.take(DesiredState())
    assert made.num_reached == 1
    assert not made.engine.calls


async def test_where_no_state_was_ever_wanted_a_pause_of_this_engine_alone_stands(made: Follower) -> None:
    await made.take(DesiredState(revision=1))
    assert (made.progress, made.num_reached) == (StateProgress(reached=1), 1)
    assert not made.engine.calls, "it was paused while a coordinator of an older release served the mesh"


async def test_a_pause_that_waits_gives_way_to_the_next_state(made: Follower) -> None:
    made.engine.quiet.clear()
    await made.take(PAUSED)
    await made.take(RUNNING)
    assert made.engine.calls[-1] == "run"
    assert made.progress == StateProgress(reached=3)


async def test_what_fails_is_tried_again_and_said(made: Follower) -> None:
    made.engine.failures = [FailedPrecondition("the engine is paused in mode keep; resume it first")] * 5
    await made.take(PAUSED)
    assert made.progress.failed == 2
    assert "mode keep" in made.progress.cause
    assert [each.kind for each in made.fall_backs.active] == ["not_in_state"]
    assert made.num_reached == 0
    for _ in range(5):
        pass_time(LONGEST_RETRY_SECONDS)
        await settle()
    assert made.progress == StateProgress(reached=2)
    assert not made.fall_backs.active


async def test_a_process_takes_role_and_weights_of_the_one_before_first(made: Follower) -> None:
    setting = EngineSetting(engine_id="a", role=ENGINE_ROLE_DECODE, weights_path="/new")
    await made.take(DesiredState(revision=2, pause_mode=PAUSE_MODE_KEEP, engines=[setting]))
    assert made.engine.calls[:2] == [("role", ENGINE_ROLE_DECODE), ("weights", "/new")]
    assert made.engine.calls[2:] == [("pause", PAUSE_MODE_KEEP, False)]


async def test_role_and_weights_that_it_lacks_outlive_the_state_they_came_with(made: Follower) -> None:
    made.engine.failures = [FailedPrecondition("the file server does not answer")]
    settings = [EngineSetting(engine_id="a", weights_path="/new", role=ENGINE_ROLE_DECODE)]
    await made.take(DesiredState(revision=2, engines=settings))
    assert made.progress.failed == 2
    made.engine.calls.clear()
    await made.take(RUNNING)  # after the engine has joined another coordinator
    assert made.progress == StateProgress(reached=3)
    assert made.engine.calls == [("role", ENGINE_ROLE_DECODE), ("weights", "/new"), "run"]
    await made.take(DesiredState(revision=4))
    assert made.engine.calls[3:] == ["run"]


@pytest.mark.parametrize(
    ("is_asleep", "level", "awake", "path", "calls"),
    [
        (False, 1, [], "", [("sleep", 1)]),
        (False, 2, [], "", [("sleep", 2)]),
        (True, 2, [], "", [("sleep", 2)]),
        (True, 2, [WAKE_TAG_WEIGHTS], "", [("wake", [WAKE_TAG_WEIGHTS])]),
        (False, 1, [WAKE_TAG_WEIGHTS], "", [("sleep", 1), ("wake", [WAKE_TAG_WEIGHTS])]),
        # Nothing loads weights again that such a process would release.
        (False, 2, [WAKE_TAG_WEIGHTS], "", [("sleep", 1), ("wake", [WAKE_TAG_WEIGHTS])]),
        (False, 2, [], "/new", [("weights", "/new"), ("sleep", 1)]),
    ],
)
async def test_how_it_falls_asleep(
    made: Follower, is_asleep: bool, level: int, awake: list[WakeTag], path: str, calls: list[object]
) -> None:
    made.engine.is_asleep = is_asleep
    engines = [EngineSetting(weights_path=path)] if path else []
    state = DesiredState(revision=2, pause_mode=PAUSE_MODE_KEEP, sleep_level=level, awake=awake, engines=engines)
    await made.take(state)
    assert made.engine.calls == calls


def with_weights(revision: int, version: int = 2, **fields: Any) -> DesiredState:
    return DesiredState(
        revision=revision, weights_path="/new", weights_version=version, replaced_weights=[b"own"], **fields
    )


async def test_weights_are_loaded_when_no_request_is_there_and_once_for_each_version(made: Follower) -> None:
    made.engine.quiet.clear()
    await made.take(with_weights(2))
    assert (made.engine.calls, made.progress.reached) == (["idle"], 0)
    made.engine.quiet.set()
    await settle()
    load = ["idle", ("pause", PAUSE_MODE_WAIT, False), ("weights", "/new"), "run"]
    assert (made.engine.calls, made.progress.reached) == (load, 2)
    await made.take(with_weights(3, pause_mode=PAUSE_MODE_KEEP))
    await made.take(with_weights(4))
    assert made.engine.calls[4:] == [("pause", PAUSE_MODE_KEEP, False), "run"]
    await made.take(with_weights(5, version=5))
    assert made.engine.calls[6:] == load


@pytest.mark.parametrize("mode", [PAUSE_MODE_ABORT, PAUSE_MODE_KEEP])
async def test_only_the_mode_wait_waits_for_requests(made: Follower, mode: PauseMode) -> None:
    made.engine.failures.append(FailedPrecondition("KV from other engines is being loaded; retry"))
    await made.take(with_weights(2, weights_mode=mode))
    await settle()
    pass_time(LONGEST_RETRY_SECONDS)
    await settle()
    assert [call for call in made.engine.calls if call != ("pause", mode, False)] == [("weights", "/new"), "run"]
    await made.take(with_weights(3, version=3, weights_mode=mode, pause_mode=PAUSE_MODE_KEEP))
    assert made.engine.calls[-3:] == [
        ("pause", PAUSE_MODE_KEEP, False), ("weights", "/new"), ("pause", PAUSE_MODE_KEEP, False)
    ]  # fmt: skip


async def test_an_engine_that_was_started_with_other_weights_since_keeps_them(made: Follower) -> None:
    state = with_weights(2)
    state.replaced_weights[:] = [b"others"]
    await made.take(state)
    assert (made.engine.calls, made.progress.reached) == (["run"], 2)


async def test_weights_in_a_pause_and_in_a_sleep(made: Follower) -> None:
    await made.take(with_weights(2, pause_mode=PAUSE_MODE_KEEP))
    assert made.engine.calls == [
        ("pause", PAUSE_MODE_KEEP, False),
        ("weights", "/new"),
        ("pause", PAUSE_MODE_KEEP, False),
    ]
    made.engine.is_asleep = True
    made.engine.calls.clear()
    awake = {"sleep_level": 2, "awake": [WAKE_TAG_WEIGHTS], "pause_mode": PAUSE_MODE_KEEP}
    await made.take(with_weights(3, version=3, **awake))
    assert made.engine.calls == [("weights", "/new"), ("wake", [WAKE_TAG_WEIGHTS])]
