"""Encoders join the coordinator, are shown, and are never picked."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from tests.ready_channel import ready_channel
from tokenloom.request.errors import FailedPrecondition
from tokenloom.services.coordinator.coordinator_settings import CoordinatorSettings
from tokenloom.services.coordinator.service import CoordinatorService
from tokenloom.services.encoder.service import EncoderLink
from tokenloom.services.runtime.host.service import running
from tokenloom.services.runtime.peers.hello import make_hello
from tokenloom.services.runtime.registry.registry_view import RegistryView, watch_registry
from tokenloom.v1.coordinator_pb2 import (
    ENGINE_STATE_DRAINING,
    ENGINE_STATE_SERVING,
    EngineEntry,
    EngineIdentity,
    EngineReport,
    PickRequest,
)
from tokenloom.v1.coordinator_pb2_grpc import CoordinatorStub
from tokenloom.v1.types_pb2 import (
    ENGINE_ROLE_BOTH,
    ENGINE_ROLE_DECODE,
    ENGINE_ROLE_ENCODE,
    ENGINE_ROLE_PREFILL,
    MEDIA_KIND_IMAGE,
    Fingerprint,
    ModelLimits,
)

MODEL = Fingerprint(model="m")


def identity(name: str, epoch: int = 1) -> EngineIdentity:
    return EngineIdentity(
        engine_id=name,
        epoch=epoch,
        address=f"unix:/{name}",
        fingerprint=MODEL,
        limits=ModelLimits(media_kinds=[MEDIA_KIND_IMAGE]),
    )


class Watched:
    """What a watcher sees."""

    def __init__(self) -> None:
        self._view = RegistryView()
        self._changed = asyncio.Event()

    def take(self, view: RegistryView) -> None:
        self._view = view
        self._changed.set()

    async def until(self, is_right: Callable[[Sequence[EngineEntry]], bool]) -> Sequence[EngineEntry]:
        async with asyncio.timeout(30):
            while not is_right(self._view.encoders):
                self._changed.clear()
                await self._changed.wait()
        assert not self._view.engines
        return self._view.encoders


async def test_encoders_are_shown_and_never_picked(socket_dir: Path) -> None:
    settings = CoordinatorSettings.of(listen=f"unix:{socket_dir}/c", metrics_listen="", settle_seconds=0)
    service = CoordinatorService(settings)
    drained = asyncio.Event()
    async with running(service, settings) as host, ready_channel(host.address) as channel:
        stub, watched, late = CoordinatorStub(channel), Watched(), Watched()
        watching = [asyncio.create_task(watch_registry(stub, watched.take))]
        links = {name: EncoderLink(channel, identity(name), "one", lambda: (2, 1)) for name in "ab"}
        runs = {name: asyncio.create_task(link.run(drained.set)) for name, link in links.items()}
        await watched.until(lambda entries: {each.identity.engine_id for each in entries} == {"a", "b"})
        watching.append(asyncio.create_task(watch_registry(stub, late.take)))
        (entry, _) = await late.until(lambda entries: len(entries) == 2)
        assert (entry.report.role, entry.report.state) == (ENGINE_ROLE_ENCODE, ENGINE_STATE_SERVING)
        assert (entry.report.waiting, entry.report.running) == (2, 1)
        assert list(entry.identity.limits.media_kinds) == [MEDIA_KIND_IMAGE]
        for role, code in (
            (ENGINE_ROLE_BOTH, grpc.StatusCode.UNAVAILABLE),
            (ENGINE_ROLE_PREFILL, grpc.StatusCode.UNAVAILABLE),
            (ENGINE_ROLE_DECODE, grpc.StatusCode.UNAVAILABLE),
            (ENGINE_ROLE_ENCODE, grpc.StatusCode.INVALID_ARGUMENT),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as failure:
                await stub.Pick(PickRequest(fingerprint=MODEL, role=role, prompt_tokens=3))
            assert failure.value.code() is code

        assert service.servicer is not None
        service.servicer.drain("a", 5)
        await drained.wait()
        links["a"].drain()
        await watched.until(lambda entries: any(each.report.state == ENGINE_STATE_DRAINING for each in entries))
        runs.pop("a").cancel()
        await watched.until(lambda entries: [each.identity.engine_id for each in entries] == ["b"])

        other = EncoderLink(channel, identity("b", 2), "one", lambda: (0, 0))
        replacing = asyncio.create_task(other.run(drained.set))
        with pytest.raises(FailedPrecondition, match="removed from the coordinator's registry"):
            await runs.pop("b")
        await watched.until(lambda entries: [each.identity.epoch for each in entries] == [2])
        for task in (*watching, replacing):
            task.cancel()
        await asyncio.wait([*watching, replacing])


@pytest.mark.parametrize("starts_as", [ENGINE_ROLE_ENCODE, ENGINE_ROLE_BOTH])
async def test_nothing_becomes_an_encoder_or_ceases_to_be_one(socket_dir: Path, starts_as: Any) -> None:
    settings = CoordinatorSettings.of(listen=f"unix:{socket_dir}/c", metrics_listen="", settle_seconds=0)
    async with running(CoordinatorService(settings), settings) as host, ready_channel(host.address) as channel:
        call = CoordinatorStub(channel).Join()
        first = EngineReport(hello=make_hello("a", 1), identity=identity("a"), role=starts_as)
        first.state = ENGINE_STATE_SERVING
        first.identity.num_kv_blocks = first.identity.fingerprint.block_size = 16
        await call.write(first)
        assert (await call.read()).hello.peer_id == "coordinator-0"
        role = ENGINE_ROLE_BOTH if starts_as == ENGINE_ROLE_ENCODE else ENGINE_ROLE_ENCODE
        await call.write(EngineReport(role=role, state=ENGINE_STATE_SERVING))
        with pytest.raises(grpc.aio.AioRpcError, match="encoder"):
            await _until_its_end(call)


async def _until_its_end(call: Any) -> None:
    while await call.read() is not grpc.aio.EOF:
        pass
