"""Engines and output processors that send whatever they like: the coordinator goes on, and serves the honest ones."""

import asyncio
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from tests.mutations import mutated
from tests.ready_channel import ready_channel
from tests.services.coordinator.test_coordinator_servicer import Coordinator, first_report, load
from tokenloom.services.coordinator.coordinator_settings import CoordinatorSettings
from tokenloom.services.coordinator.service import CoordinatorService
from tokenloom.services.runtime.host.service import running
from tokenloom.v1.coordinator_pb2 import EngineReport, PickBatch, PickRequest, PickResults
from tokenloom.v1.coordinator_pb2_grpc import CoordinatorStub
from tokenloom.v1.types_pb2 import EngineRole, Fingerprint

PICK = PickRequest(fingerprint=Fingerprint(model="m"), role=EngineRole.ENGINE_ROLE_BOTH, prompt_tokens=3)


@pytest.fixture
async def coordinator(socket_dir: Path) -> AsyncIterator[Coordinator]:
    settings = CoordinatorSettings.of(listen=f"unix:{socket_dir}/c", metrics_listen="", settle_seconds=0.2)
    service = CoordinatorService(settings)
    async with running(service, settings) as host, ready_channel(host.address) as channel:
        client = Coordinator(service, CoordinatorStub(channel), host)
        yield client
        for call in client.calls:
            call.cancel()


async def _picked(coordinator: Coordinator, name: str) -> None:
    """Wait until the honest engine is picked over the liars, which are excluded as they are met."""
    exclude: list[Any] = []
    async with asyncio.timeout(30):
        while True:
            request = PickRequest(exclude=exclude)
            request.MergeFrom(PICK)
            engine = (await coordinator.stub.Pick(request)).engine
            if engine.engine_id == name:
                return
            exclude.append({"engine_id": engine.engine_id, "epoch": engine.epoch})


@pytest.mark.parametrize("seed", range(10))
async def test_an_engine(coordinator: Coordinator, seed: int) -> None:
    rng = random.Random(seed)
    watch = coordinator.watch()
    for number in range(10):
        call: Any = coordinator.stub.Join()
        coordinator.calls.append(call)
        try:
            await call.write(mutated(first_report(f"liar-{number}"), rng, rng.randint(0, 2)))
            for _ in range(3):
                await call.write(mutated(EngineReport(**load(running=3, waiting=2)), rng, 2))
        except (asyncio.InvalidStateError, grpc.aio.AioRpcError):
            continue  # its stream has ended
    await coordinator.join("honest")
    await _picked(coordinator, "honest")
    async with asyncio.timeout(30):
        while "honest" not in {entry.identity.engine_id for entry in (await watch.read()).engines}:
            pass


@pytest.mark.parametrize("seed", range(10))
async def test_an_output_processor(coordinator: Coordinator, seed: int) -> None:
    rng = random.Random(seed)
    await coordinator.join("honest")
    await _picked(coordinator, "honest")
    for _ in range(10):
        call: Any = coordinator.stub.PickStream()
        coordinator.calls.append(call)
        try:
            for _ in range(3):
                await call.write(mutated(PickBatch(pick=[PICK, PICK]), rng, rng.randint(1, 3)))
        except (asyncio.InvalidStateError, grpc.aio.AioRpcError):
            continue
    honest: Any = coordinator.stub.PickStream()
    coordinator.calls.append(honest)
    await honest.write(PickBatch(pick=[PICK]))
    async with asyncio.timeout(30):
        while not (results := await honest.read()).result:
            assert isinstance(results, PickResults)
    assert results.result[0].response.engine.engine_id == "honest"
