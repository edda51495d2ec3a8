"""Answers the calls of the public gRPC API that continue no prompt: Embed, Classify, Score, Pool and Transcribe."""

import asyncio
from codecs import getincrementaldecoder
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeAlias

import grpc.aio
from google.protobuf.message import Message

from tokenloom.request.errors import InvalidArgument, TokenloomError
from tokenloom.services.runtime.telemetry.tracing import pick_headers
from tokenloom.v1 import inference_pb2, types_pb2
from tokenloom.v1.tokenizer_pb2 import TRANSCRIPT_TASK_TRANSCRIBE, TRANSCRIPT_TASK_TRANSLATE

from ..files.sound_uploads import DiskFile
from ..generation.generator import Generator
from ..generation.running_pooling import RunningPooling
from ..generation.transcription import SoundCalls, Transcription, TranscriptRequest
from ..pooling.scores import plan_scoring
from ..pooling.vector_json import floats
from ..records.generate_request import GenerateRequest
from ..records.media import MediaPart
from ..records.model_names import NamedAdapter
from ..records.pooling_input import TASKS, PoolingInput, check_count
from ..records.transcript import MAX_TEMPERATURE, HeardSegment, HeardToken, read_language
from ..serving.served_mesh import ServedMesh
from ..tenants.tenant import Tenant
from .inference_request import next_request

Context = grpc.aio.ServicerContext[Any, Any]
InputsRequest: TypeAlias = inference_pb2.EmbedRequest | inference_pb2.ClassifyRequest | inference_pb2.PoolRequest

_MESSAGE_BYTES = 1 << 20
"""Numbers in one message: clients accept messages of 4 MiB."""
_DRAIN_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class PoolingCall:
    """Answers one call.

    Attributes:
        generator: Of the model that the request names.
        tenant: Of the client's key.
        adapter: The LoRA adapter that the request names; None: the model itself.
    """

    generator: Generator
    tenant: Tenant
    adapter: NamedAdapter | None

    async def pool(self, request: InputsRequest, params: types_pb2.PoolingParams, context: Context) -> None:
        """Write the results of a request with inputs. Raises ``InvalidArgument`` naming the field."""
        check_count(len(request.inputs), "inputs")
        generate_request = self._generate_request(
            [_input(each) for each in request.inputs], "inputs", request.options, context
        )
        named = "" if isinstance(request, inference_pb2.ClassifyRequest) else request.prompt_name
        await self._answer(PoolingInput(generate_request, params, prompt_name=named), context, _outputs)

    async def score(self, request: inference_pb2.ScoreRequest, context: Context) -> None:
        """Write the scores of a request. Raises ``InvalidArgument`` naming the field."""
        if not request.query:
            raise InvalidArgument("query is empty; at least one token is needed", "query")
        scoring = plan_scoring(
            [request.query],
            list(request.documents),
            self._generate_request((), "documents", request.options, context),
            await self.generator.wait_limits(context.time_remaining()),
            fields=("query", "documents"),
            use_activation=request.use_activation if request.HasField("use_activation") else None,
        )

        def outputs(pooling: RunningPooling) -> Iterator[inference_pb2.PooledOutput]:
            for index, score in enumerate(scoring.scores(pooling)):
                yield inference_pb2.PooledOutput(index=index, data=floats([score]))

        await self._answer(scoring.pooling_input, context, outputs)

    async def _answer(self, pooling_input: PoolingInput, context: Context, outputs: Any) -> None:
        async with self.generator.pool(pooling_input, pick_headers(context.invocation_metadata() or ())) as pooling:
            response, size = inference_pb2.PoolResponse(request_id=pooling.request_id), 0
            for output in outputs(pooling):
                if response.outputs and size + len(output.data) > _MESSAGE_BYTES:
                    await context.write(response)
                    response, size = inference_pb2.PoolResponse(request_id=pooling.request_id), 0
                response.outputs.append(output)
                size += len(output.data)
            response.usage.CopyFrom(pooling.usage)
            response.weights_version = pooling.weights_version
            await context.write(response)

    def _generate_request(
        self, prompts: Sequence[Any], field: str, options: inference_pb2.PoolInputOptions, context: Context
    ) -> GenerateRequest:
        return GenerateRequest(
            prompts,
            field,
            types_pb2.SamplingParams(),
            tenant=self.tenant,
            adapter=self.adapter,
            priority=options.priority,
            truncate_prompt_tokens=optional(options, "truncate_prompt_tokens"),
            add_special_tokens=optional(options, "add_special_tokens") is not False,
            timeout=context.time_remaining(),
        )


def embed_params(request: inference_pb2.EmbedRequest) -> types_pb2.PoolingParams:
    dimensions, activation = optional(request, "dimensions"), optional(request, "normalize")
    return types_pb2.PoolingParams(task=TASKS["embed"], dimensions=dimensions, use_activation=activation)


def classify_params(request: inference_pb2.ClassifyRequest) -> types_pb2.PoolingParams:
    return types_pb2.PoolingParams(task=TASKS["classify"], use_activation=optional(request, "use_activation"))


def pool_params(request: inference_pb2.PoolRequest) -> types_pb2.PoolingParams:
    """Raises ``InvalidArgument`` for a request without a task."""
    if request.task not in TASKS.values():
        raise InvalidArgument(f"task must be one of {', '.join(TASKS)}", "task")
    dimensions, activation = optional(request, "dimensions"), optional(request, "use_activation")
    return types_pb2.PoolingParams(task=request.task, dimensions=dimensions, use_activation=activation)


def optional(message: Message, name: str) -> Any:
    """Return a field; None when the client did not set it."""
    return getattr(message, name) if message.HasField(name) else None


def _input(each: inference_pb2.PoolInput) -> str | list[int]:
    match each.WhichOneof("input"):
        case "text":
            return each.text
        case "token_ids":
            return list(each.token_ids.ids)
    raise InvalidArgument("inputs: each must be set: text or token_ids", "inputs")


def _outputs(pooling: RunningPooling) -> Iterator[inference_pb2.PooledOutput]:
    for index, result in enumerate(pooling.results):
        for start in range(0, max(len(result.data), 1), _MESSAGE_BYTES):
            data = result.data[start : start + _MESSAGE_BYTES]
            yield inference_pb2.PooledOutput(index=index, shape=result.shape, offset=start // 4, data=data)


async def read_options(
    requests: AsyncIterator[inference_pb2.TranscribeRequest], idle_seconds: float
) -> inference_pb2.TranscribeOptions:
    """Return what a client asks of the sound that follows. Raises ``InvalidArgument`` if anything else comes first."""
    first = await next_request(requests, idle_seconds, "options")
    if first is None or first.WhichOneof("part") != "options":
        raise InvalidArgument("the first message must hold the options", "options")
    return first.options


async def read_sound(
    requests: AsyncIterator[inference_pb2.TranscribeRequest], idle_seconds: float
) -> AsyncIterator[bytes]:
    """Yield the bytes of a sound. Raises ``InvalidArgument`` for a message without any."""
    while (request := await next_request(requests, idle_seconds, "part of the sound")) is not None:
        if request.WhichOneof("part") != "data":
            raise InvalidArgument("each message after the first one must hold data", "data")
        yield request.data


@asynccontextmanager
async def refusing(requests: AsyncIterator[inference_pb2.TranscribeRequest], most_bytes: int) -> AsyncIterator[None]:
    """Before an error ends a call, read what its client still sends: at most so many bytes, for a few seconds."""
    # A client of grpc.aio that sends to a call that has ended tells its caller INTERNAL, whatever the call ended with.
    try:
        yield
    except TokenloomError:
        with suppress(TimeoutError):
            async with asyncio.timeout(_DRAIN_SECONDS):
                async for request in requests:
                    if (most_bytes := most_bytes - len(request.data)) < 0:
                        break
        raise


@dataclass(frozen=True, slots=True)
class TranscribeCall:
    """Answers one call.

    Attributes:
        adapter: The LoRA adapter that the request names; None: the model itself.
    """

    mesh: ServedMesh
    tenant: Tenant
    adapter: NamedAdapter | None
    options: inference_pb2.TranscribeOptions
    request: TranscriptRequest

    @classmethod
    def of(
        cls,
        mesh: ServedMesh,
        tenant: Tenant,
        adapter: NamedAdapter | None,
        options: inference_pb2.TranscribeOptions,
        timeout: float | None,
    ) -> "TranscribeCall":
        """Read options. Raises ``InvalidArgument`` naming the field."""
        task = TRANSCRIPT_TASK_TRANSLATE if options.translate else TRANSCRIPT_TASK_TRANSCRIBE
        traits = mesh.transcript_traits()
        if not 0 <= options.temperature <= MAX_TEMPERATURE:  # nor NaN
            raise InvalidArgument(f"temperature must be a number from 0 to {MAX_TEMPERATURE:g}", "temperature")
        if options.seed >= 1 << 63:
            raise InvalidArgument("seed must be below 2^63", "seed")
        common = GenerateRequest(
            (), "data", types_pb2.SamplingParams(), tenant=tenant, adapter=adapter, timeout=timeout, is_continued=True
        )
        request = TranscriptRequest(
            common,
            task,
            read_language(options.language, task, traits),
            options.prompt,
            options.temperature,
            options.seed if options.HasField("seed") else None,
            has_timestamps=options.return_segments or options.return_words,
            has_words=options.return_words,
            has_figures=options.return_segments,
            streams=True,
        )
        return cls(mesh, tenant, adapter, options, request)

    async def answer(self, file: DiskFile, context: Context) -> None:
        """Write what is heard in a file. Raises any of :mod:`errors`."""
        mesh, traits = self.mesh, self.mesh.transcript_traits()
        await mesh.generator.wait_limits(context.time_remaining())
        part = MediaPart("data", file, kind=types_pb2.MEDIA_KIND_AUDIO)
        with mesh.generator.hear(part, self.request.common) as sound:
            headers = pick_headers(context.invocation_metadata() or ())
            calls = SoundCalls(mesh.generator, mesh.tokenizers, traits, self.request, sound, headers)
            transcription = Transcription(calls)
            decoder, has_begun = getincrementaldecoder("utf-8")("replace"), False
            async with aclosing(transcription.run()) as heard:
                async for some in heard:
                    new = [each for each in some if each.id < traits.first_special_id]
                    text = decoder.decode(b"".join(each.text for each in new))
                    if (response := self._response(text if has_begun else text.lstrip(), new)) is not None:
                        has_begun = has_begun or bool(response.text)
                        await context.write(response)
        mesh.metrics.sound_seconds.inc(transcription.seconds)
        await context.write(self._last(decoder.decode(b"", final=True), transcription))

    def _response(self, text: str, tokens: Sequence[HeardToken]) -> inference_pb2.TranscribeResponse | None:
        """Return a message; None: it would have nothing."""
        named = tokens if self.options.return_logprobs else ()
        if not text and not named:
            return None
        parts = [inference_pb2.TranscriptToken(id=each.id, text=each.text, logprob=each.logprob) for each in named]
        return inference_pb2.TranscribeResponse(text=text, tokens=parts)

    def _last(self, text: str, transcription: Transcription) -> inference_pb2.TranscribeResponse:
        segments = transcription.segments if self.options.return_segments else ()
        return inference_pb2.TranscribeResponse(
            text=text,
            seconds=transcription.seconds,
            language=transcription.language,
            weights_version=transcription.weights_version,
            mixed_numerics=transcription.has_mixed_numerics,
            segments=map(_segment, segments),
            words=[
                inference_pb2.TranscriptWord(text=each.text, start=each.start, end=each.end)
                for each in transcription.words
            ],
        )


def _segment(segment: HeardSegment) -> inference_pb2.TranscriptSegment:
    figures = segment.figures
    return inference_pb2.TranscriptSegment(
        start=segment.start,
        end=segment.end,
        text=segment.text,
        avg_logprob=figures.avg_logprob,
        compression_ratio=figures.compression_ratio,
        no_speech_prob=figures.no_speech_prob,
    )
