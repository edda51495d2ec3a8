"""Owned tasks."""

import asyncio

from tokenloom.services.runtime.tasks import Tasks


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
    await asyncio.wait_for(tasks.spawn(tasks.close(), name="closes"), 5)
