"""Runs the output processor as a service: connects its parts, and starts, drains and stops them."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import grpc.aio

from tokenloom.model_files.checkpoint import CheckpointInfo, load_tokenizer, tokenizer_fingerprint
from tokenloom.model_files.model_path import resolve, served_name
from tokenloom.process.control_groups import memory_limit
from tokenloom.request import errors
from tokenloom.services.runtime.host.host import Host
from tokenloom.services.runtime.peers.hello import JOURNAL_COPIES, make_hello
from tokenloom.services.runtime.streams.slotted_stream import INITIAL_CREDIT
from tokenloom.v1.coordinator_pb2 import EngineIdentity
from tokenloom.v1.output_processor_pb2 import (
    DetokenizeRequest,
    DetokenizeResponse,
    ProcessInput,
    RecallRequest,
    RecallResponse,
)
from tokenloom.v1.output_processor_pb2_grpc import OutputProcessorServicer, add_OutputProcessorServicer_to_server
from tokenloom.v1.types_pb2 import Fingerprint, Hello

from .gateway_stream import GatewayStream, GatewayStreams
from .output_processor_settings import Drain, OutputProcessorSettings
from .placement.engine_link import EngineLinks
from .placement.placement import Placer
from .request.kept_requests import KeptRequests
from .request.requests import LiveRequestLimit, Requests, SampleGroup, default_prompt_bytes, recalled
from .request.telemetry import OutputProcessorMetrics
from .text.continued_text import detokenize
from .text.vocabulary import Vocabulary

if TYPE_CHECKING:
    from .request.request_recorder import RequestRecorder

_SALT_BYTES = 16
Load: TypeAlias = Callable[[Path, OutputProcessorSettings], tuple[CheckpointInfo, Vocabulary, Fingerprint]]
"""Reads what an output processor needs of a checkpoint."""


class OutputProcessorService:
    """Serves ``OutputProcessor``.

    Attributes:
        requests: The requests in work, once started.
    """

    requests: Requests

    def __init__(self, settings: OutputProcessorSettings, load: Load | None = None) -> None:
        """``load`` reads what is needed of the checkpoint; None for :func:`load_checkpoint`."""
        self._settings = settings
        self._load = load or load_checkpoint
        self._draining = AsyncExitStack()
        self._closing = AsyncExitStack()

    async def start(self, host: Host) -> None:
        settings = self._settings
        path = await asyncio.to_thread(resolve, settings.model, weights=False)
        info, vocabulary, fingerprint = await asyncio.to_thread(self._load, path, settings)

        def greet(engine: EngineIdentity) -> Hello:
            return make_hello(
                settings.instance_id,
                host.epoch,
                fingerprint=fingerprint,
                expected_peer_id=engine.engine_id,
                expected_epoch=engine.epoch,
                initial_credit=INITIAL_CREDIT,
            )

        streams = GatewayStreams()
        links = EngineLinks(
            greet,
            host.failed,
            host.channels,
            hang_seconds=settings.engine_hang_timeout,
            num_kept=settings.engine_subset,
            fall_backs=host.fall_backs,
        )
        metrics = OutputProcessorMetrics(host.metrics, lambda: requests.num_live, lambda: links.num_open)
        recorder: RequestRecorder | None = None
        if settings.request_record_dir is not None or settings.verify:
            recorder = await self._record(host, fingerprint, vocabulary, metrics)
            self._closing.push_async_callback(recorder.close)  # after the requests have ended
        placer = Placer(
            host.channels.open(settings.coordinator, "coordinator"),
            fingerprint,
            links,
            instance_id=settings.instance_id,
            subset_size=settings.engine_subset,
            seed=host.epoch,
            fall_backs=host.fall_backs,
        )
        self._closing.push_async_callback(placer.close)
        self._closing.push_async_callback(_cancelled, host.spawn(placer.run(), name="coordinator"))
        if recorder is not None and settings.verify:
            self._verify(recorder, placer, host, metrics)
        kept = KeptRequests[SampleGroup](
            host.failed, settings.keep_lost_requests, settings.max_kept_bytes, settings.max_copied_bytes
        )
        metrics.show_copies(kept.copies)
        self._closing.push_async_callback(kept.close)
        self._closing.push_async_callback(streams.close)  # before the placer
        requests = self.requests = Requests(
            placer,
            vocabulary,
            frozenset(info.eos_token_ids),
            metrics,
            limit=LiveRequestLimit(
                settings.max_requests, settings.max_prompt_bytes or default_prompt_bytes(memory_limit())
            ),
            kept=kept,
            tracer=host.tracer,
            clock=host.clock.nanoseconds,
        )
        requests.recorder = recorder
        requests.bill = host.bill
        self._draining.push_async_callback(_drain, streams, requests, settings.drain)
        features = (JOURNAL_COPIES,) if settings.max_copied_bytes else ()
        hello = make_hello(settings.instance_id, host.epoch, fingerprint=fingerprint, features=features)
        host.add_servicer(add_OutputProcessorServicer_to_server, _Servicer(hello, requests, streams, vocabulary))

    async def _record(
        self, host: Host, fingerprint: Fingerprint, vocabulary: Vocabulary, metrics: OutputProcessorMetrics
    ) -> "RequestRecorder":
        """Return what records the requests that end. Raises ``InvalidArgument`` if the folder cannot be used."""
        # Imported here, because most meshes record nothing.
        from tokenloom.request.request_records import RecordFiles

        from .request.request_recorder import RecordOrigin, RequestRecorder, place_of

        settings, now = self._settings, host.clock.wall_milliseconds
        limits = {"max_bytes": settings.request_record_bytes, "days": settings.request_record_days}
        folder = settings.request_record_dir
        recorder = RequestRecorder(
            None if folder is None else RecordFiles(folder, now=now, epoch=host.epoch, **limits),
            RecordOrigin(fingerprint.model, place_of(settings.model), fingerprint.tokenizer, version("tokenloom")),
            vocabulary if settings.request_record_text else None,
            count=metrics.recorded,
            fall_backs=host.fall_backs,
            now=now,
        )
        if folder is not None:
            await recorder.open(folder)
        return recorder

    def _verify(self, recorder: "RequestRecorder", placer: Placer, host: Host, metrics: OutputProcessorMetrics) -> None:
        """Compute a share of the recorded requests again until the service stops."""
        from .request.verification import Verifier  # here, as above

        # Drawn here: tenants' prompts hit nothing of what is computed again, and no one finds out what that was.
        salt = host.random.randbytes(_SALT_BYTES)
        recorder.samples = verifier = Verifier(
            placer, self._settings.verify, salt, count=metrics.verified, fall_backs=host.fall_backs
        )
        self._closing.push_async_callback(_cancelled, host.spawn(verifier.run(), name="verification"))

    async def drain(self) -> None:
        await self._draining.aclose()

    async def stop(self) -> None:
        await self._closing.aclose()


async def _cancelled(task: "asyncio.Task[Any]") -> None:
    task.cancel()
    await asyncio.wait([task])


class _Servicer(OutputProcessorServicer):
    def __init__(self, hello: Hello, requests: Requests, streams: GatewayStreams, vocabulary: Vocabulary) -> None:
        self._hello = hello
        self._requests = requests
        self._streams = streams
        self._vocabulary = vocabulary

    async def Process(  # type: ignore[override]  # it writes to the context, because a generator costs more per frame
        self, request_iterator: AsyncIterator[ProcessInput], context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        stream = GatewayStream(self._hello, self._requests)
        with self._streams.joined(stream):
            await stream.run(request_iterator, context.write)

    async def Detokenize(self, request: DetokenizeRequest, context: Any) -> DetokenizeResponse:
        return await detokenize(self._vocabulary, request)

    async def Recall(self, request: RecallRequest, context: Any) -> RecallResponse:
        kept = self._requests.kept
        if (group := kept.any_of(request.request_id, request.tenant)) is not None:
            return group.recall(with_prompt=request.wants_prompt)
        copy = kept.copies.any_of(request.request_id, request.tenant) if request.from_copy else None
        if copy is None:
            raise errors.RequestLost("The request is not known, or not any more; send it again as a new request.")
        response = recalled(copy.submit, with_prompt=request.wants_prompt)
        response.is_attended = copy.lost_by is None
        return response


async def _drain(streams: GatewayStreams, requests: Requests, mode: Drain) -> None:
    """Announce that this process leaves, then let live requests finish, or move them to other output processors: at
    once or, in mode ``finish``, when the drain timeout has passed."""
    # First, so that gateways know it before the first refusal: 10 of 47 requests were lost while refusals came sooner.
    streams.leave()
    if mode == "migrate":
        streams.move()
    try:
        await requests.drain()
    finally:
        streams.move()


def load_checkpoint(path: Path, settings: OutputProcessorSettings) -> tuple[CheckpointInfo, Vocabulary, Fingerprint]:
    """Return what the checkpoint of this directory says, its vocabulary, and what identifies both to peers."""
    name = settings.served_model_name or served_name(path, settings.model)
    fingerprint = Fingerprint(model=name, tokenizer=tokenizer_fingerprint(path))
    return CheckpointInfo.load(path), Vocabulary(load_tokenizer(path)), fingerprint
