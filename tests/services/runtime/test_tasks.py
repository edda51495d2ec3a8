"""Tasks end with their owner and report their failures."""

import asyncio
import contextlib

import pytest

from tokenloom.services.runtime import tasks as module
from tokenloom.services.runtime.tasks import Failure, Tasks, completed, first_of


async def test_failures_are_reported_and_cancellation_is_none() -> None:
    failures: list[BaseException] = []
    tasks = Tasks(failures.append)

    async def fail() -> None:
        raise ValueError("x")

    failing = tasks.spawn(fail(), name="fails")
    endless = tasks.spawn(asyncio.Event().wait(), name="endless")
    await asyncio.wait([failing])
    await tasks.close()
    assert [type(error) for error in failures] == [ValueError]
    assert endless.cancelled()


async def test_a_task_that_has_not_begun_when_its_owner_closes_cleans_up_too() -> None:
    tasks, log = Tasks(lambda error: None), list[str]()

    async def give_back() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            log.append("given back")

    tasks.spawn(give_back(), name="gives back")
    await tasks.close()
    assert log == ["given back"]


async def test_an_owner_that_is_cancelled_while_it_closes_leaves_no_task_behind() -> None:
    tasks = Tasks(lambda error: None)
    begun = tasks.spawn(asyncio.Event().wait(), name="begun")
    await asyncio.sleep(0)

    async def close() -> None:
        tasks.spawn(asyncio.Event().wait(), name="not begun")
        await tasks.close()

    closing = asyncio.create_task(close())
    asyncio.get_running_loop().call_soon(closing.cancel)
    await asyncio.wait([closing])
    done, _ = await asyncio.wait([begun], timeout=30)
    assert (closing.cancelled(), done) == (True, {begun})


async def test_close_waits_for_clean_up_and_for_what_it_spawns() -> None:
    tasks = Tasks(lambda error: None)
    done = []

    async def parent() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            tasks.spawn(child(), name="child")

    async def child() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            done.append("child")

    tasks.spawn(parent(), name="parent")
    await asyncio.sleep(0)
    await tasks.close()
    assert len(asyncio.all_tasks()) == 1


async def test_a_task_may_close_its_owner() -> None:
    tasks = Tasks(lambda error: None)
    await asyncio.wait_for(tasks.spawn(tasks.close(), name="closes"), 30)


async def test_a_task_that_retries_may_lose_a_cancellation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_CANCEL_SECONDS", 0.01)
    tasks = Tasks(lambda error: None)

    async def fail_when_cancelled_first() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            if task.cancelling() < 2:
                raise ConnectionError("the stream broke in the same moment")

    async def rejoin() -> None:
        while True:
            with contextlib.suppress(ExceptionGroup):
                async with asyncio.TaskGroup() as group:
                    group.create_task(fail_when_cancelled_first())

    task = tasks.spawn(rejoin(), name="rejoins")
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    await asyncio.wait_for(tasks.close(), 30)
    assert task.cancelled()


async def test_the_first_failure_ends_the_others_and_a_cancellation_is_never_lost_to_it() -> None:
    ended: list[str] = []

    async def wait(name: str) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(name)

    async def fail() -> None:
        raise ConnectionError("the stream broke")

    with pytest.raises(ConnectionError):
        await first_of(wait("one"), fail())
    assert ended == ["one"]
    task = asyncio.ensure_future(first_of(wait("two"), wait("three")))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended == ["one", "two", "three"]


async def test_a_failure_is_raised_once() -> None:
    failure = Failure()
    failure.raise_unseen()
    failure.set(ValueError("x"))
    with pytest.raises(ValueError, match="x"):
        failure.raise_unseen()
    assert isinstance(await failure.take(), ValueError)
    failure.raise_unseen()


@pytest.mark.parametrize("error", [None, ValueError("x")])
async def test_what_is_completed_ends_before_the_cancellation_of_its_caller(error: Exception | None) -> None:
    may_end, log = asyncio.Event(), list[str]()

    async def change() -> None:
        await may_end.wait()
        log.append("changed")
        if error is not None:
            raise error

    caller = asyncio.create_task(completed(change()))
    for _ in range(3):
        await asyncio.sleep(0)
        caller.cancel()
    await asyncio.sleep(0)
    assert not caller.done()
    may_end.set()
    await asyncio.wait([caller])
    assert caller.cancelled()
    assert log == ["changed"]


async def test_what_is_completed_returns_its_result_and_raises_its_error() -> None:
    assert await completed(asyncio.sleep(0, 1)) == 1
    with pytest.raises(ValueError, match="x"):
        await completed(_fail())


async def _fail() -> None:
    await asyncio.sleep(0)
    raise ValueError("x")
