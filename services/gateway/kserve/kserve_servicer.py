"""Serves the Open Inference Protocol; generates as the HTTP API does."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from importlib.metadata import version
from itertools import chain
from typing import Any

import grpc.aio

from tokenloom.request import errors
from tokenloom.v1 import types_pb2
from tokenloom.v1.kserve import grpc_service_pb2 as pb
from tokenloom.v1.kserve import grpc_service_pb2_grpc

from ..generation.delivered import Delivered
from ..generation.running_generation import RunningGeneration
from ..generation.running_pooling import RunningPooling
from ..grpc.inference_request import next_request
from ..http.http_exchange import IGNORED_HEADER, listed
from ..openai.answer import finish_reason
from ..openai.body_reader import BodyReader
from ..openai.completions import CompletionsApi
from ..openai.event_ids import FINISHED
from ..serving.fronts import Front, FrontParts, GrpcService
from ..serving.served_mesh import ServedMesh
from ..serving.served_meshes import ServedMeshes
from ..tenants.api_keys import call_tenant
from ..tenants.tenant_shares import TenantShares
from .kserve_inference import (
    EMBEDDING,
    EVENT_ID,
    INPUTS,
    OUTPUTS,
    VERSION,
    Inference,
    asks_for_embedding,
    check_version,
    read_embedding,
    read_inference,
    write_embedding,
    write_output,
)

Context = grpc.aio.ServicerContext[Any, Any]


def kserve(gateway: FrontParts) -> Front:
    """Return the protocol as a front."""
    reader = BodyReader(strict=gateway.strict)
    servicer = KServeServicer(reader, gateway.meshes, gateway.shares, gateway.request_timeout)
    infers = dict.fromkeys(("ModelInfer", "ModelStreamInfer"), pb.ModelInferRequest)
    add = grpc_service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server
    return Front(grpc=(GrpcService(add, servicer, infers),))


class KServeServicer(grpc_service_pb2_grpc.GRPCInferenceServiceServicer):
    """Takes text and returns text."""

    def __init__(self, reader: BodyReader, meshes: ServedMeshes, shares: TenantShares, idle_timeout: float) -> None:
        """``shares``: what each tenant has in work. ``idle_timeout``: seconds for which a stream may send nothing."""
        self._idle_timeout = idle_timeout
        self._shares = shares
        self._reader = reader
        self._meshes = meshes

    async def ServerLive(self, request: pb.ServerLiveRequest, context: Context) -> pb.ServerLiveResponse:
        return pb.ServerLiveResponse(live=True)

    async def ServerReady(self, request: pb.ServerReadyRequest, context: Context) -> pb.ServerReadyResponse:
        return pb.ServerReadyResponse(ready=not self._meshes.missing())

    async def ModelReady(self, request: pb.ModelReadyRequest, context: Context) -> pb.ModelReadyResponse:
        try:
            mesh = self._meshes.pick(request.name)
        except (errors.ModelNotFound, errors.Unavailable):
            return pb.ModelReadyResponse(ready=False)
        is_known = request.version in ("", VERSION)
        return pb.ModelReadyResponse(ready=is_known and not mesh.health.missing())

    async def ServerMetadata(self, request: pb.ServerMetadataRequest, context: Context) -> pb.ServerMetadataResponse:
        return pb.ServerMetadataResponse(name="tokenloom", version=version("tokenloom"))

    async def ModelMetadata(self, request: pb.ModelMetadataRequest, context: Context) -> pb.ModelMetadataResponse:
        limits = self._meshes.pick(request.name).health.limits()
        check_version(request.version)
        tensor = pb.ModelMetadataResponse.TensorMetadata
        return pb.ModelMetadataResponse(
            name=request.name,
            versions=[VERSION],
            platform="tokenloom",
            inputs=[
                tensor(name=name, datatype=kind, shape=[-1 if name == "text_input" else 1])
                for name, kind in INPUTS.items()
            ],
            outputs=[
                *(tensor(name=name, datatype="BYTES", shape=[-1]) for name in OUTPUTS),
                *(tensor(name=EMBEDDING, datatype="FP32", shape=[-1, -1]) for _ in range(_embeds(limits))),
            ],
        )

    async def ModelInfer(self, request: pb.ModelInferRequest, context: Context) -> pb.ModelInferResponse:
        with self._shares.of(call_tenant()).take_message(request.ByteSize(), self._shares.messages):
            if (vectors := await self._embedding(request, context)) is not None:
                return vectors
            mesh, inference = self._read(request, context)
            if inference.stream:
                raise errors.InvalidArgument("stream is only supported by ModelStreamInfer", "stream")
            async with _opened(mesh, inference) as generation:
                return await self._whole(request, inference, generation)

    async def ModelStreamInfer(  # type: ignore[override]
        self, requests: AsyncIterator[pb.ModelInferRequest], context: Context
    ) -> None:
        """Writes to the context: a handler that waits in a ``yield`` would not notice a cancellation at once."""
        share = self._shares.of(call_tenant())
        with share.take_session(self._shares.sessions):
            while (request := await next_request(requests, self._idle_timeout, "request")) is not None:
                try:
                    with share.take_message(request.ByteSize(), self._shares.messages):
                        await self._answer(request, context)
                except errors.TokenloomError as error:
                    failed = pb.ModelStreamInferResponse(error_message=error.message)
                    failed.infer_response.MergeFrom(self._response(request))
                    await context.write(failed)

    async def _embedding(self, request: pb.ModelInferRequest, context: Context) -> pb.ModelInferResponse | None:
        """Return the vectors that a request asks for; None if it asks for text."""
        mesh, adapter = self._meshes.find(request.model_name)
        if not asks_for_embedding(request, await mesh.generator.wait_limits(context.time_remaining())):
            return None
        pooling_input = read_embedding(request, call_tenant(), adapter, context.time_remaining())
        async with mesh.generator.pool(pooling_input) as pooling:
            response = self._response(request)
            write_embedding(response, pooling, raw=bool(request.raw_input_contents))
            _close(response, pooling)
            return response

    async def _answer(self, request: pb.ModelInferRequest, context: Context) -> None:
        if (vectors := await self._embedding(request, context)) is not None:
            await context.write(pb.ModelStreamInferResponse(infer_response=vectors))
            return
        mesh, inference = self._read(request, context)
        async with _opened(mesh, inference) as generation:
            if inference.stream:
                async for response in self._parts(request, inference, generation):
                    await context.write(pb.ModelStreamInferResponse(infer_response=response))
            else:
                response = await self._whole(request, inference, generation)
                await context.write(pb.ModelStreamInferResponse(infer_response=response))

    def _read(self, request: pb.ModelInferRequest, context: Context) -> tuple[ServedMesh, Inference]:
        mesh, adapter = self._meshes.find(request.model_name)
        inference = read_inference(request, CompletionsApi(self._reader), call_tenant(), context.time_remaining())
        return mesh, replace(inference, generate_request=replace(inference.generate_request, adapter=adapter))

    async def _whole(
        self, request: pb.ModelInferRequest, inference: Inference, generation: RunningGeneration
    ) -> pb.ModelInferResponse:
        indices = range(generation.num_outputs)
        texts = [_echoed(generation, index) for index in indices]
        while not generation.done:
            for delta in await generation.take():
                texts[delta.index] += delta.text
        reasons = [finish_reason(generation.finished[index]) for index in indices]
        response = self._response(request)
        for name in inference.outputs:
            write_output(response, name, texts if name == "text_output" else reasons, raw=inference.raw)
        _close(response, generation, inference.ignored)
        return response

    async def _parts(
        self, request: pb.ModelInferRequest, inference: Inference, generation: RunningGeneration
    ) -> AsyncIterator[pb.ModelInferResponse]:
        resumed, live = inference.resumed, generation.num_outputs
        begun = set() if resumed is None else set(resumed.entries)
        ids = inference.ids(generation.request_id, live)
        delivered = Delivered({} if resumed is None else resumed.positions)
        while not generation.done:
            for delta, is_new in chain.from_iterable(map(delivered.cut, await generation.take())):
                live -= delta.finished is not None
                text = delta.text if delta.index in begun else _echoed(generation, delta.index) + delta.text
                begun.add(delta.index)
                reason = finish_reason(delta.finished) if delta.finished is not None else ""
                if ids is not None:
                    ids.advance(delta)
                # The usage comes with the last end, which the client may have had before the others.
                if not (text or reason) or not (is_new or not live):
                    continue
                response = self._response(request)
                for name in inference.outputs if is_new else ():
                    values = [text if name == "text_output" else reason]
                    write_output(response, name, values, raw=inference.raw, index=delta.index)
                if ids is not None:
                    event_id = ids.of(delta.index, FINISHED if reason else "")
                    response.parameters[EVENT_ID].string_param = event_id.decode()
                if not live:
                    _close(response, generation, inference.ignored)
                yield response

    def _response(self, request: pb.ModelInferRequest) -> pb.ModelInferResponse:
        name = self._meshes.name_of(request.model_name)
        return pb.ModelInferResponse(model_name=name, model_version=VERSION, id=request.id)


def _echoed(generation: RunningGeneration, index: int) -> str:
    """Return the prompt, if the client asked for it before the output."""
    return generation.prompt_texts[index // generation.num_samples] if generation.prompt_texts else ""


def _embeds(limits: types_pb2.ModelLimits | None) -> bool:
    return limits is not None and types_pb2.POOLING_TASK_EMBED in limits.pooling_tasks


@asynccontextmanager
async def _opened(mesh: ServedMesh, inference: Inference) -> AsyncIterator[RunningGeneration]:
    """Run a generation; name fields in errors as the client does."""
    try:
        async with mesh.generator.open(inference.generate_request, token=inference.token) as generation:
            yield generation
    except errors.InvalidArgument as error:
        raise error.renamed(inference.field_names) from error


def _close(
    response: pb.ModelInferResponse, generation: RunningGeneration | RunningPooling, ignored: Sequence[str] = ()
) -> None:
    """Add the parameters of a last response. ``ignored``: names of what has no effect."""
    if ignored:  # not in the metadata, which one stream has once for many requests
        response.parameters[IGNORED_HEADER.decode()].string_param = listed(ignored).decode()
    usage = generation.usage
    response.parameters["triton_final_response"].bool_param = True
    response.parameters["prompt_tokens"].int64_param = usage.prompt_tokens
    response.parameters["completion_tokens"].int64_param = usage.completion_tokens
    if isinstance(generation, RunningPooling):
        versions = {generation.weights_version}
    else:
        ends = generation.finished.values()
        versions = {finished.weights_version for finished in ends}
        if any(finished.timeline.mixed_numerics for finished in ends):
            response.parameters["mixed_numerics"].bool_param = True
    if version := ",".join(sorted(versions - {""})):
        response.parameters["weights_version"].string_param = version
