"""Runs schedules on a mesh whose engines are new for each: no wrong token, no leaked block, no hang."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx

from tests.mesh.asking import Answer, ask
from tests.mesh.split import SplitMesh
from tests.soak.expectation import Expectation, expectation
from tests.soak.plan import TENANTS, Ask, Event, Plan

HANG_SECONDS = 60.0


async def soak(
    directory: Path,
    seeds: Iterable[int],
    worker: str = "hash",
    executor: str = "uni",
    *,
    async_scheduling: bool = False,
) -> AsyncIterator[tuple[Plan, Counter[str]]]:
    """Runs the schedules of these seeds; yields each with what happened in it: faults that fired, ends of requests.

    ``executor``: where the engines' workers run, as in ``distributed_executor_backend``.

    Raises ``AssertionError`` naming the plan that did not go as it must.
    """
    expecting = expectation(worker)
    for seed in seeds:
        plan = Plan.draw(seed, worker, async_scheduling=async_scheduling)
        try:
            async with asyncio.timeout(HANG_SECONDS):
                happened = await _run(directory, plan, expecting, executor)
        except TimeoutError:
            raise AssertionError(f"it hangs: {plan}") from None
        except Exception as error:
            raise AssertionError(f"it goes wrong: {plan}") from error
        yield plan, happened


async def _run(directory: Path, plan: Plan, expecting: Expectation, executor: str) -> Counter[str]:
    expected = expecting.tokens(plan.asks)
    mesh = SplitMesh(directory, (), gateway={"api_key_file": _key_file(directory), "cache_salt_secret": "s" * 16})
    for role, settings in zip(plan.roles, plan.settings, strict=True):
        mesh.new_engine(role, **settings, distributed_executor_backend=executor)
    seen: Counter[str] = Counter()
    async with mesh.running(), AsyncExitStack() as stack:
        https = {tenant: await stack.enter_async_context(mesh.http(headers=_key(tenant))) for tenant in TENANTS}
        async with asyncio.TaskGroup() as group:
            for event in plan.events:
                group.create_task(_happen(mesh, event, plan.settings[event.engine], seen))
            answers = [group.create_task(_ask(https[request.tenant], request)) for request in plan.asks]
        for request, tokens, answer in zip(plan.asks, expected, answers, strict=True):
            seen[_check(plan, request, tokens, *answer.result(), expecting)] += 1
        await mesh.check_nothing_is_left()
        for engine in mesh.engines:
            seen.update(engine.fired())
            seen.update({f"recompute {reason}": count for reason, count in engine.recomputes().items()})
            seen["preempted"] += engine.core.scheduler.stats().num_preemptions
    return seen


def _key_file(directory: Path) -> Path:
    """Write the keys of tenants that use one cache. Returns the path."""
    tables = [
        f'[[tenant]]\nname = "{tenant}"\ncache = "all"\nkey_sha256 = ["{sha256(tenant.encode()).hexdigest()}"]\n'
        for tenant in TENANTS
    ]
    file = directory / "keys.toml"
    file.write_text("\n".join(tables))
    return file


def _key(tenant: str) -> dict[str, str]:
    return {"authorization": f"Bearer {tenant}"}


async def _ask(http: httpx.AsyncClient, request: Ask) -> tuple[Answer, bool]:
    """What came, and whether the client stayed to its end."""
    await asyncio.sleep(request.delay)
    answer = Answer()
    limit = {} if request.budget is None else {"thinking_token_budget": request.budget}
    work = asyncio.create_task(ask(http, request.prompt, request.max_tokens, answer, **limit))
    return answer, await _stay(work, request.leaves_after)


def _check(plan: Plan, request: Ask, expected: list[int], answer: Answer, stayed: bool, expecting: Expectation) -> str:
    """How the request ended, which is a way that it may."""
    for position, (right, token) in enumerate(zip(expected, answer.token_ids, strict=False)):
        if right != token:  # what follows is a matter of taste then
            assert expecting.allows(request.prompt, expected[: position + 1], token), f"wrong token for {request}"
            break
    if answer.error is not None:
        assert plan.may_fail, f"{answer.error} for {request}"
        assert answer.error["code"] == "unavailable", answer.error
        return "failed"
    if not stayed:
        return "left"
    assert len(answer.token_ids) == len(expected), f"{len(answer.token_ids)} tokens for {request}"
    return "answered"


async def _stay(work: "asyncio.Task[Answer]", seconds: float | None) -> bool:
    """Waits for the answer, or for that long; whether it came."""
    try:
        await asyncio.wait([work], timeout=seconds)
        return work.done() and bool(work.result())
    finally:
        work.cancel()
        await asyncio.wait([work])


async def _happen(mesh: SplitMesh, event: Event, settings: dict[str, Any], seen: Counter[str]) -> None:
    """``settings``: of the engine that it happens to, and of the one that takes its place."""
    await asyncio.sleep(event.delay)
    engine = mesh.engines[event.engine]
    seen[f"{event.kind} {engine.role}"] += 1
    if event.kind == "cut":
        await engine.cut_kv()
        return
    await engine.kill()
    if event.replaced:
        await mesh.new_engine(engine.role, **settings).start()
