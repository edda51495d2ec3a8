"""Tests that the prompts of pooling calls take turns by tenant."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tokenloom.request import errors
from tokenloom.services.gateway.generation.admission import AdmittedRequest
from tokenloom.services.gateway.generation.preparation import RequestContext
from tokenloom.services.gateway.generation.running_pooling import PoolingStage, RunningPooling
from tokenloom.services.gateway.mesh.output_pool import OutputPool
from tokenloom.services.gateway.mesh.pooled_outputs import PooledOutputs
from tokenloom.services.gateway.records.generate_request import GenerateRequest
from tokenloom.services.gateway.records.pooling_input import PoolingInput
from tokenloom.services.gateway.tenants.tenant import Tenant
from tokenloom.v1 import output_processor_pb2, tokenizer_pb2, types_pb2


def admitted(*, is_beside_answers: bool = False) -> AdmittedRequest:
    held = SimpleNamespace(num_outputs=8, begin_output=lambda _: None, is_beside_answers=is_beside_answers)
    return cast(AdmittedRequest, held)


class Pool:
    """Keeps what is submitted until it is ended."""

    def __init__(self) -> None:
        self.live: list[tuple[str, PooledOutputs, int]] = []

    def submit(
        self, submit: output_processor_pb2.Submit, outputs: PooledOutputs, index: int, media: None
    ) -> Callable[[], None]:
        self.live.append((submit.tenant, outputs, index))
        return lambda: None

    @property
    def tenants(self) -> str:
        return "".join(tenant for tenant, _, _ in self.live)

    async def end_first(self, error: errors.TokenloomError | None = None) -> None:
        _, outputs, index = self.live.pop(0)
        finished = output_processor_pb2.RequestFinished()
        if error is None:
            outputs.put_pooled(index, types_pb2.Pooled(shape=[1], data=b"\0\0\0\0"))
        else:
            outputs.fail(error)
        outputs.finish(index, finished)
        await settle()


async def settle() -> None:
    for _ in range(6):
        await asyncio.sleep(0)


@asynccontextmanager
async def call(
    pool: Pool, stage: PoolingStage, tenant: str, num_prompts: int, held: AdmittedRequest | None = None
) -> "AsyncIterator[asyncio.Task[Any]]":
    """Run a call of a tenant; it is closed at the end of the block."""
    request = GenerateRequest([], "input", types_pb2.SamplingParams(), tenant=Tenant(name=tenant, cache_salt=b""))
    pooling = PoolingInput(request, types_pb2.PoolingParams(task=types_pb2.POOLING_TASK_EMBED))
    context = RequestContext(default_timeout=1.0, random=Random(1), clock=lambda: 0)
    prompts = [tokenizer_pb2.TokenizedPrompt(token_ids=[1, 2, 3])] * num_prompts
    running = RunningPooling(pooling, prompts, context, 0, stage)
    task = asyncio.create_task(running.run(cast(OutputPool, pool), held or admitted(), lambda: 1.0))
    await settle()
    try:
        yield task
    finally:
        task.cancel()
        running.close()
        await asyncio.wait([task])


def make_stage() -> PoolingStage:
    return PoolingStage(4)


async def test_a_prompt_of_another_tenant_is_next() -> None:
    pool, stage = Pool(), make_stage()
    async with call(pool, stage, "a", 9) as first, call(pool, stage, "b", 2) as second:
        assert pool.tenants == "aaaa"
        await pool.end_first()
        assert pool.tenants == "aaab"
        await pool.end_first()
        assert pool.tenants == "aabb"
        while not (first.done() and second.done()):
            await pool.end_first()
    assert not stage.num_waiting


@pytest.mark.parametrize("error", [None, errors.Unavailable("lost")])
async def test_a_call_that_ends_early_gives_its_turns_back(error: errors.TokenloomError | None) -> None:
    pool, stage = Pool(), make_stage()
    async with call(pool, stage, "a", 9) as first:
        if error is not None:
            await pool.end_first(error)
            with pytest.raises(errors.Unavailable):
                await first
    pool.live.clear()
    async with call(pool, stage, "b", 4):
        assert pool.tenants == "bbbb"


async def test_beside_answers_fewer_prompts_are_in_work() -> None:
    """A token waits for what each process does with the texts of a step."""
    pool, stage = Pool(), make_stage()
    async with call(pool, stage, "a", 4, admitted(is_beside_answers=True)) as first:
        assert pool.tenants == "a"
        await pool.end_first()
        assert pool.tenants == "a"
        while not first.done():
            await pool.end_first()


def test_some_time_after_the_last_answer_all_places_are_used_again() -> None:
    stage = make_stage()
    stage.look(10.0, is_beside=True)
    stage.look(10.9, is_beside=False)
    assert stage.num_kept == 3
    stage.look(11.0, is_beside=False)
    assert stage.num_kept == 0
