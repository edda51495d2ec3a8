"""Runs schedules on a mesh whose engines are new for each: no wrong token, no leaked block, no hang."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from pathlib import Path

import httpx

from tests.mesh.asking import Answer, ask
from tests.mesh.split import SplitMesh
from tests.soak.plan import Ask, Event, Plan

HANG_SECONDS = 20.0


async def soak(directory: Path, seeds: Iterable[int]) -> AsyncIterator[tuple[Plan, Counter[str]]]:
    """Runs the schedules of these seeds; yields each with what happened in it: faults that fired, ends of requests.

    Raises ``AssertionError`` naming the plan that did not go as it must.
    """
    for seed in seeds:
        plan = Plan.draw(seed)
        try:
            async with asyncio.timeout(HANG_SECONDS):
                happened = await _run(directory, plan)
        except TimeoutError:
            raise AssertionError(f"it hangs: {plan}") from None
        except Exception as error:
            raise AssertionError(f"it goes wrong: {plan}") from error
        yield plan, happened


async def _run(directory: Path, plan: Plan) -> Counter[str]:
    mesh = SplitMesh(directory, ())
    for role, settings in zip(plan.roles, plan.settings, strict=True):
        mesh.new_engine(role, **settings)
    seen: Counter[str] = Counter()
    async with mesh.running(), mesh.http() as http:
        async with asyncio.TaskGroup() as group:
            for event in plan.events:
                group.create_task(_happen(mesh, event, seen))
            for request in plan.asks:
                group.create_task(_check(mesh, http, plan, request, seen))
        await mesh.check_nothing_is_left()
        for engine in mesh.engines:
            seen.update(engine.fired())
            seen.update({f"recompute {reason}": count for reason, count in engine.recomputes().items()})
    return seen


async def _check(mesh: SplitMesh, http: httpx.AsyncClient, plan: Plan, request: Ask, seen: Counter[str]) -> None:
    await asyncio.sleep(request.delay)
    answer = Answer()
    work = asyncio.create_task(ask(http, request.prompt, request.max_tokens, answer))
    stayed = await _stay(work, request.leaves_after)
    expected = mesh.expected(request.prompt, request.max_tokens)
    assert answer.token_ids == expected[: len(answer.token_ids)], f"wrong tokens for {request}"
    if answer.error is not None:
        assert plan.may_fail, f"{answer.error} for {request}"
        assert answer.error["code"] == "unavailable", answer.error
        seen["failed"] += 1
    elif not stayed:
        seen["left"] += 1
    else:
        assert answer.token_ids == expected, f"{len(answer.token_ids)} tokens for {request}"
        seen["answered"] += 1


async def _stay(work: "asyncio.Task[Answer]", seconds: float | None) -> bool:
    """Waits for the answer, or for that long; whether it came."""
    try:
        await asyncio.wait([work], timeout=seconds)
        return work.done() and bool(work.result())
    finally:
        work.cancel()
        await asyncio.wait([work])


async def _happen(mesh: SplitMesh, event: Event, seen: Counter[str]) -> None:
    await asyncio.sleep(event.delay)
    engine = mesh.engines[event.engine]
    seen[f"{event.kind} {engine.role}"] += 1
    if event.kind == "cut":
        await engine.cut_kv()
        return
    await engine.kill()
    if event.replaced:
        await mesh.new_engine(engine.role).start()
