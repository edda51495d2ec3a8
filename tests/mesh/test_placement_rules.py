"""The golden case of each rule on a live mesh: one engine has a request that waits, the other one three that run."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.mesh.asking import Answer, ask
from tests.mesh.harness import SOON, Mesh
from tests.ready_channel import ready_channel
from tokenloom.cli.mesh.mesh_sample import PartPlacement, parse
from tokenloom.services.runtime.peers.channels import open_channel
from tokenloom.v1.coordinator_pb2 import EngineEntry, EngineState, PlacementRule, Snapshot, WatchRequest
from tokenloom.v1.coordinator_pb2_grpc import CoordinatorStub
from tokenloom.v1.engine_pb2 import PAUSE_MODE_KEEP, PauseRequest, ResumeRequest
from tokenloom.v1.engine_pb2_grpc import EngineAdminStub

BUSY, STUCK = "engine-0", "engine-1"
STEP_SECONDS = {BUSY: 0.1, STUCK: 60.0}
"""A request counts as waiting until a step with it has ended: at the second engine, for the whole test."""
GOLDEN = {BUSY: (0, 3), STUCK: (1, 0)}
"""Waiting and running requests."""
PROMPT, MAX_TOKENS = [1, 2, 3], 240
PROMPT_TOKENS = len(PROMPT)


@asynccontextmanager
async def golden(directory: Path, **coordinator: Any) -> AsyncIterator[tuple[Mesh, httpx.AsyncClient]]:
    """A mesh whose engines have the loads of :data:`GOLDEN`."""
    mesh = Mesh(
        directory,
        engines=2,
        coordinator=coordinator,
        engine=lambda index: {"hash_step_seconds": STEP_SECONDS[f"engine-{index}"], "max_num_seqs": 16},
    )
    async with mesh.running(), mesh.http() as http, asyncio.timeout(SOON):
        asked = []
        try:
            async with open_channel(mesh.address(STUCK)) as channel:
                admin = EngineAdminStub(channel)
                await admin.Pause(PauseRequest(mode=PAUSE_MODE_KEEP))
                await until(mesh, {BUSY: (0, 0)})  # the coordinator knows
                asked += [asyncio.create_task(ask(http, PROMPT, MAX_TOKENS)) for _ in range(3)]
                await mesh.until_running(3)
                await admin.Resume(ResumeRequest())
            await until(mesh, {BUSY: (0, 3), STUCK: (0, 0)})
            asked.append(asyncio.create_task(ask(http, PROMPT, MAX_TOKENS)))  # to the engine that has nothing to do
            await until(mesh, GOLDEN)
            yield mesh, http
        finally:
            for task in asked:
                task.cancel()
            await asyncio.wait(asked)
            os.kill(mesh.engines[1].core_pid(), signal.SIGKILL)  # its step takes longer than the test
            await mesh.engines[1].kill()


async def until(mesh: Mesh, loads: Mapping[str, tuple[int, int]]) -> Snapshot:
    """Return the first snapshot in which all engines serve and have so many waiting and running requests."""
    async with ready_channel(mesh.address("coordinator-0")) as channel:
        async for snapshot in CoordinatorStub(channel).Watch(WatchRequest()):
            serving = [each for each in snapshot.engines if each.report.state == EngineState.ENGINE_STATE_SERVING]
            if loads == {each.identity.engine_id: (each.waiting, each.report.running) for each in serving}:
                return snapshot
    raise AssertionError("the coordinator ended")


def by_name(snapshot: Snapshot) -> Mapping[str, EngineEntry]:
    return {entry.identity.engine_id: entry for entry in snapshot.engines}


@asynccontextmanager
async def one_more(http: httpx.AsyncClient) -> AsyncIterator[None]:
    task = asyncio.create_task(ask(http, [7, 8, 9], MAX_TOKENS, Answer()))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


async def page_metrics_and_commands_show_rule_and_inputs(http: httpx.AsyncClient, rule: str) -> None:
    page = (await http.get("/mesh")).json()
    while [engine["placement"]["score"] for engine in page["engines"]] != [3, 4]:
        page = (await http.get("/mesh")).json()
    assert page["placement"] == rule
    text = (await http.get("/metrics")).text
    placements = parse(text).placements
    assert placements.of("coordinator", 0, "") == PartPlacement(rule)
    for index, engine in enumerate(page["engines"]):
        shown = placements.of("engine", index, "")
        assert shown is not None
        assert (shown.rule, shown.values) == (rule, pytest.approx(engine["placement"]))
        assert ("expected_seconds" in shown.values) == (rule == "cost")
        assert str(shown).endswith("16 seats" if rule == "cost" else f" = {engine['placement']['score']}")
    names = {family.name for family in text_string_to_metric_families(text)}
    assert {"tokenloom_placement_rule", "tokenloom_placement_score"} <= names


async def test_by_default_three_that_run_weigh_less_than_one_that_waits(socket_dir: Path) -> None:
    async with golden(socket_dir) as (mesh, http):
        await page_metrics_and_commands_show_rule_and_inputs(http, "score")
        seen = await until(mesh, GOLDEN)
        assert seen.placement == PlacementRule.PLACEMENT_RULE_SCORE
        assert {name: entry.score for name, entry in by_name(seen).items()} == {BUSY: 3, STUCK: 4}
        assert not any(entry.expected_seconds for entry in seen.engines)
        async with one_more(http):
            await until(mesh, {BUSY: (0, 4), STUCK: (1, 0)})


async def test_by_cost_it_is_the_other_way_round(socket_dir: Path) -> None:
    async with golden(socket_dir, placement="cost") as (mesh, http):
        await page_metrics_and_commands_show_rule_and_inputs(http, "cost")
        seen = await until(mesh, GOLDEN)
        assert seen.placement == PlacementRule.PLACEMENT_RULE_COST
        entries = by_name(seen)
        assert entries[STUCK].expected_seconds < entries[BUSY].expected_seconds
        assert entries[STUCK].uncached_tokens == PROMPT_TOKENS
        assert entries[STUCK].uncached_tokens_per_second > 0
        async with one_more(http):
            await until(mesh, {BUSY: (0, 3), STUCK: (2, 0)})
