"""Priorities from a client's request down to the engine's queue."""

import asyncio
from pathlib import Path

import pytest

from tests.mesh.asking import Answer, ask
from tests.mesh.harness import SOON, Mesh


@pytest.mark.parametrize(
    ("most_urgent", "order"), [(-10, ["urgent", "plain", "late"]), (0, ["plain", "urgent", "late"])]
)
async def test_the_lowest_priority_goes_first_as_far_as_the_gateway_allows(
    socket_dir: Path, most_urgent: int, order: list[str]
) -> None:
    engine = {"hash_step_seconds": 0.02, "max_num_seqs": 1, "scheduling_policy": "priority"}
    async with (
        Mesh(socket_dir, engine=engine, gateway={"most_urgent_priority": most_urgent}).running() as mesh,
        mesh.http() as http,
        asyncio.timeout(SOON),
        asyncio.TaskGroup() as group,
    ):
        first = Answer()
        running = group.create_task(ask(http, [1], 240, first))
        await first.begun.wait()
        ended: list[str] = []

        async def ask_for(name: str, priority: int) -> None:
            answer = await ask(http, [2], 3, priority=priority)
            assert answer.token_ids == mesh.expected([2], 3)
            ended.append(name)

        for count, (name, priority) in enumerate((("late", 5), ("plain", 0), ("urgent", -5)), 1):
            group.create_task(ask_for(name, priority))
            while await mesh.gauge("requests_waiting") < count:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        running.cancel()
    assert ended == order


async def test_an_engine_without_priorities_says_so(socket_dir: Path) -> None:
    async with Mesh(socket_dir).running() as mesh, mesh.http() as http:
        answer = await ask(http, [1], 1, priority=-1)
        assert answer.error is not None
        assert (answer.error["param"], answer.error["code"]) == ("priority", "invalid_argument")
        assert "--scheduling-policy priority" in answer.error["message"]
