"""The output processor as a service: joins its parts and follows the lifecycle of all services."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import grpc.aio

from tokenloom.checkpoint import CheckpointInfo, load_tokenizer, resolve, served_name, tokenizer_fingerprint
from tokenloom.services.runtime.host.host import Host
from tokenloom.services.runtime.peers.hello import make_hello
from tokenloom.v1.coordinator_pb2 import EngineIdentity
from tokenloom.v1.output_processor_pb2 import ProcessInput
from tokenloom.v1.output_processor_pb2_grpc import OutputProcessorServicer, add_OutputProcessorServicer_to_server
from tokenloom.v1.types_pb2 import Fingerprint, Hello

from .metrics import Metrics
from .output_processor_settings import OutputProcessorSettings
from .placement.engine_link import INITIAL_CREDIT, EngineLinks
from .placement.placement import Placer
from .request_slots import Admission
from .stream.gateway_session import Parts, Session
from .text.detokenizer import Vocabulary


class OutputProcessorService:
    """Serves ``OutputProcessor.Process``."""

    def __init__(self, settings: OutputProcessorSettings) -> None:
        self._settings = settings
        self._admission = Admission(settings.max_requests)
        self._links: EngineLinks | None = None
        self._placer: Placer | None = None

    async def start(self, host: Host) -> None:
        settings = self._settings
        path = await asyncio.to_thread(resolve, settings.model)
        info, vocabulary, fingerprint = await asyncio.to_thread(_load, path, settings)

        def greet(engine: EngineIdentity) -> Hello:
            return make_hello(
                settings.instance_id,
                host.epoch,
                fingerprint=fingerprint,
                expected_peer_id=engine.engine_id,
                expected_epoch=engine.epoch,
                initial_credit=INITIAL_CREDIT,
            )

        links = self._links = EngineLinks(greet, host.failed, host.channels, hang_seconds=settings.engine_hang_timeout)
        placer = self._placer = Placer(host.channels.open(settings.coordinator, "coordinator"), fingerprint, links)
        metrics = Metrics(host.metrics, self._admission, links)
        parts = Parts(
            hello=make_hello(settings.instance_id, host.epoch, fingerprint=fingerprint),
            vocabulary=vocabulary,
            eos_token_ids=frozenset(info.eos_token_ids),
            placer=placer,
            admission=self._admission,
            metrics=metrics,
            tracer=host.tracer,
        )
        host.spawn(placer.run(), name="coordinator")
        host.add_servicer(add_OutputProcessorServicer_to_server, _Servicer(parts))

    async def drain(self) -> None:
        await self._admission.drain()

    async def stop(self) -> None:
        if self._links is not None:
            await self._links.close()
        if self._placer is not None:
            await self._placer.close()


class _Servicer(OutputProcessorServicer):
    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    async def Process(  # type: ignore[override]  # it writes to the context: a frame passes one generator, not three
        self, request_iterator: AsyncIterator[ProcessInput], context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        async with aclosing(Session(self._parts).frames(request_iterator)) as frames:
            async for frame in frames:
                await context.write(frame)


def _load(path: Path, settings: OutputProcessorSettings) -> tuple[CheckpointInfo, Vocabulary, Fingerprint]:
    name = settings.served_model_name or served_name(path, settings.model)
    fingerprint = Fingerprint(model=name, tokenizer=tokenizer_fingerprint(path))
    return CheckpointInfo.load(path), Vocabulary(load_tokenizer(path)), fingerprint
