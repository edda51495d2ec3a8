"""Serves the public gRPC API."""

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain, repeat
from typing import Any

import grpc.aio

from tokenloom.request import errors, logprob_columns, packed_ids
from tokenloom.services.runtime.telemetry.tracing import pick_headers
from tokenloom.v1 import inference_pb2, inference_pb2_grpc, types_pb2

from ..assistant.message_plans import MessagePlan, ParsedMessage, calls_of, reasoning_of, text_of
from ..files.sound_uploads import SoundUploads
from ..generation.delivered import Delivered
from ..generation.running_generation import RunningGeneration
from ..http.http_exchange import IGNORED_HEADER, listed
from ..mesh.collector import Delta
from ..records.generate_request import GenerateRequest
from ..records.model_names import NamedAdapter
from ..records.request_ids import NEW, ResumeToken
from ..request_log.finished_request import CURRENT_RECORD
from ..serving.served_mesh import ServedMesh
from ..serving.served_meshes import ServedMeshes
from ..tenants.api_keys import call_tenant
from ..tenants.tenant_shares import TenantShare, TenantShares
from .inference_request import (
    InputSession,
    field_names,
    next_request,
    read_cancellation,
    read_request,
    read_resume_token,
    read_resumption,
    read_turn_token,
)
from .other_calls import (
    InputsRequest,
    PoolingCall,
    TranscribeCall,
    classify_params,
    embed_params,
    pool_params,
    read_options,
    read_sound,
    refusing,
)

Context = grpc.aio.ServicerContext[Any, Any]


class InferenceServicer(inference_pb2_grpc.InferenceServicer):
    """Generates as the HTTP API does."""

    def __init__(
        self,
        meshes: ServedMeshes,
        shares: TenantShares,
        idle_timeout: float,
        uploads: SoundUploads,
    ) -> None:
        """Args:
        shares: What each tenant has in work.
        idle_timeout: Seconds that a session may wait for its next turn.
        uploads: Takes the sounds that are to be transcribed.
        """
        self._idle_timeout = idle_timeout
        self._uploads = uploads
        self._shares = shares
        self._meshes = meshes

    async def Generate(self, request: inference_pb2.GenerateRequest, context: Context) -> None:  # type: ignore[override]
        """Writes to the context: a handler that waits in a ``yield`` would not notice a cancellation at once."""
        mesh, adapter = self._meshes.find(request.model or None)
        share = self._shares.of(call_tenant())
        with share.take_message(request.ByteSize(), self._shares.messages), _named(request):
            generate_request, plan, ignored = read_request(request, mesh.plans, call_tenant(), context.time_remaining())
            token = read_resume_token(request, call_tenant(), context.invocation_metadata() or ())
            await _send_head(request, ignored, context)
            await self._answer(mesh, request, replace(generate_request, adapter=adapter), plan, context, token=token)

    async def Resume(  # type: ignore[override]
        self, request: inference_pb2.InferenceResumeRequest, context: Context
    ) -> None:
        """Writes to the context, for the same reason."""
        original = request.request
        mesh, adapter = self._meshes.find(original.model or None)
        share = self._shares.of(call_tenant())
        with share.take_message(request.ByteSize(), self._shares.messages), _named(original):
            generate_request, plan, ignored = read_request(
                original, mesh.plans, call_tenant(), context.time_remaining()
            )
            generate_request = replace(generate_request, adapter=adapter)
            token, delivered = read_resumption(request)
            await _send_head(original, ignored, context)
            await self._answer(mesh, original, generate_request, plan, context, token=token, delivered=delivered)

    async def Cancel(
        self, request: inference_pb2.InferenceCancelRequest, context: Context
    ) -> inference_pb2.InferenceCancelResponse:
        tenant = call_tenant()
        self._meshes.cancel(read_cancellation(request, tenant), tenant.name)
        return inference_pb2.InferenceCancelResponse()

    async def GenerateSession(  # type: ignore[override]
        self, request_iterator: AsyncIterator[inference_pb2.GenerateRequest], context: Context
    ) -> None:
        """Writes to the context, for the same reason."""
        share = self._shares.of(call_tenant())
        with share.take_session(self._shares.sessions):
            await self._converse(request_iterator, context, share)

    async def _converse(
        self, requests: AsyncIterator[inference_pb2.GenerateRequest], context: Context, share: TenantShare
    ) -> None:
        """Read a turn when the one before is answered; turns that wait are bounded by gRPC's window."""
        session: InputSession | None = None
        served: tuple[ServedMesh, NamedAdapter | None] | None = None
        while (request := await next_request(requests, self._idle_timeout, "turn")) is not None:
            if served is None or request.model:
                asked = self._meshes.find(request.model or None)
                if served not in (None, asked):
                    raise errors.InvalidArgument("a session stays with the model of its first turn", "model")
                served = asked
            mesh, adapter = served
            is_first, session = session is None, session or InputSession(call_tenant())
            with share.take_message(request.ByteSize(), self._shares.messages):
                # Each turn is a request of its own, and the prefix cache gives it the tokens of the turns before it:
                # scheduler and engines know nothing of sessions.
                token, delivered = read_turn_token(request)
                prompt: Sequence[int] = ()
                if delivered is not None:
                    if not is_first:
                        message = "continued_turn is only for the first message of a session"
                        raise errors.InvalidArgument(message, "continued_turn")
                    prompt = await _prompt_of(mesh, token.request_id)
                generate_request, ignored = session.read_turn(request, mesh.plans, context.time_remaining(), prompt)
                if is_first:
                    await _send_head(request, ignored, context)
                generate_request = replace(generate_request, adapter=adapter)
                await self._answer(mesh, request, generate_request, None, context, session, token, delivered)

    async def _answer(
        self,
        mesh: ServedMesh,
        request: inference_pb2.GenerateRequest,
        generate_request: GenerateRequest,
        plan: MessagePlan | None,
        context: Context,
        session: InputSession | None = None,
        token: ResumeToken = NEW,
        delivered: Delivered | None = None,
    ) -> None:
        """Write the answer to one request.

        Args:
            session: Gets its tokens.
            token: Which request of the mesh it is.
            delivered: What the client has of the answer; None: it begins now.
        """
        trace_headers = pick_headers(context.invocation_metadata() or ())
        async with mesh.generator.open(generate_request, trace_headers, token) as generation:
            if session is not None:
                session.begin(generation.prompts[0])
            has_begun = delivered is not None and not delivered.is_over
            prompt_ids = generation.prompts[0] if request.return_prompt_token_ids and not has_begun else ()
            live = generation.num_outputs
            text_lengths = [0] * live if token.fingerprint else None
            turns = [] if plan is None else [_turn(plan, generation) for _ in range(live)]
            while not generation.done:
                for delta, is_new in _parts(await generation.take(), delivered):
                    response = _response(generation, delta)
                    if text_lengths is not None:
                        text_lengths[delta.index] += len(delta.text)
                        response.text_length = text_lengths[delta.index]
                    if session is not None:
                        session.take(delta.token_ids)
                    if turns:
                        _split_text(response, turns[delta.index], ends=delta.finished is not None)
                    live -= delta.finished is not None
                    if not is_new:
                        if live:
                            continue
                        # The usage comes with the last end, which the client may have had before the others.
                        response = inference_pb2.GenerateResponse(request_id=generation.request_id, index=delta.index)
                    response.prompt_token_ids.extend(prompt_ids)
                    prompt_ids = ()
                    if not live:
                        response.usage.CopyFrom(generation.usage)
                        if request.return_timeline:
                            response.timeline.CopyFrom(generation.timeline)
                    await context.write(response)
            if session is not None:
                session.end(generation.finished[0], generation.stop_token_ids)

    async def Embed(self, request: inference_pb2.EmbedRequest, context: Context) -> None:  # type: ignore[override]
        with self._pooling(request) as call:
            await call.pool(request, embed_params(request), context)

    async def Classify(  # type: ignore[override]
        self, request: inference_pb2.ClassifyRequest, context: Context
    ) -> None:
        with self._pooling(request) as call:
            await call.pool(request, classify_params(request), context)

    async def Pool(self, request: inference_pb2.PoolRequest, context: Context) -> None:  # type: ignore[override]
        with self._pooling(request) as call:
            await call.pool(request, pool_params(request), context)

    async def Score(self, request: inference_pb2.ScoreRequest, context: Context) -> None:  # type: ignore[override]
        with self._pooling(request) as call:
            await call.score(request, context)

    async def Transcribe(  # type: ignore[override]
        self, request_iterator: AsyncIterator[inference_pb2.TranscribeRequest], context: Context
    ) -> None:
        """Writes to the context, for the same reason."""
        tenant, pieces = call_tenant(), read_sound(request_iterator, self._idle_timeout)
        share = self._shares.of(tenant)
        async with refusing(request_iterator, self._uploads.max_bytes):
            options = await read_options(request_iterator, self._idle_timeout)
            mesh, adapter = self._meshes.find(options.model or None)
            call = TranscribeCall.of(mesh, tenant, adapter, options, context.time_remaining())
            with share.take_message(options.ByteSize(), self._shares.messages):
                async with self._uploads.collect(pieces, share) as file:
                    await call.answer(file, context)

    @contextmanager
    def _pooling(self, request: InputsRequest | inference_pb2.ScoreRequest) -> Iterator[PoolingCall]:
        """Count the request's bytes for the length of the ``with`` block."""
        tenant = call_tenant()
        mesh, adapter = self._meshes.find(request.model or None)
        with self._shares.of(tenant).take_message(request.ByteSize(), self._shares.messages):
            yield PoolingCall(mesh.generator, tenant, adapter)

    async def ListModels(
        self, request: inference_pb2.ListModelsRequest, context: Context
    ) -> inference_pb2.ListModelsResponse:
        models: list[inference_pb2.Model] = []
        listed = frozenset(self._meshes.listed())
        for mesh in self._meshes:
            limits = mesh.health.limits()
            max_model_len = limits.max_model_len if limits else 0
            models += [inference_pb2.Model(name=name, max_model_len=max_model_len) for name in mesh.names]
            models += [
                inference_pb2.Model(name=name, max_model_len=max_model_len, parent=mesh.model)
                for name in mesh.models.adapters()
                if name in listed
            ]
        return inference_pb2.ListModelsResponse(models=models)


async def _prompt_of(mesh: ServedMesh, request_id: str) -> Sequence[int]:
    """Return the prompt of a request that another gateway has begun. Raises ``RequestLost``."""
    recalled = await mesh.generator.recall(request_id, call_tenant().name, with_prompt=True)
    return recalled.prompt.token_ids or packed_ids.ids_of(recalled.prompt)


def _parts(deltas: list[Delta], delivered: Delivered | None) -> Iterator[tuple[Delta, bool]]:
    """Return output with whether it is new to the client."""
    if delivered is None:
        return zip(deltas, repeat(True), strict=False)
    return chain.from_iterable(map(delivered.cut, deltas))


def _turn(plan: MessagePlan, generation: RunningGeneration) -> ParsedMessage:
    is_open, may_reason = generation.opens_reasoning, generation.may_reason
    return ParsedMessage(plan, reasoning_is_open=is_open, may_reason=may_reason)


@contextmanager
def _named(request: inference_pb2.GenerateRequest) -> Iterator[None]:
    """Name fields in errors as the client does."""
    try:
        yield
    except errors.InvalidArgument as error:
        raise error.renamed(field_names(request)) from error


async def _send_head(request: inference_pb2.GenerateRequest, ignored: Sequence[str], context: Context) -> None:
    """Return the client's id for the request, in a form that fits metadata, and record it; and the names of what has no
    effect."""
    head: list[tuple[str, str]] = []
    if request.user_request_id:
        printable = "".join(char for char in request.user_request_id[:128] if " " <= char <= "~")
        if (record := CURRENT_RECORD.get()) is not None:
            record.request_id = printable
        head.append(("x-request-id", printable))
    if ignored:
        head.append((IGNORED_HEADER.decode(), listed(ignored).decode()))
    if head:
        await context.send_initial_metadata(tuple(head))


def _response(generation: RunningGeneration, delta: Delta) -> inference_pb2.GenerateResponse:
    response = inference_pb2.GenerateResponse(
        request_id=generation.request_id,
        index=delta.index,
        text=delta.text,
        token_ids=delta.token_ids,
        token_index=delta.token_index,
    )
    for part in delta.logprobs:
        response.logprobs.top = part.logprobs.top
        logprob_columns.extend(response.logprobs, part.logprobs)
    for part in delta.prompt_logprobs:
        response.prompt_logprobs.top = part.logprobs.top
        logprob_columns.extend(response.prompt_logprobs, part.logprobs)
    if delta.finished is not None:
        response.finish_reason = delta.finished.reason
        response.stop_reason = delta.finished.stop_reason
        response.weights_version = delta.finished.weights_version
        response.mixed_numerics = delta.finished.timeline.mixed_numerics
        if delta.finished.HasField("routed_experts"):
            response.routed_experts.CopyFrom(delta.finished.routed_experts)
    return response


def _split_text(response: inference_pb2.GenerateResponse, turn: ParsedMessage, *, ends: bool) -> None:
    """Move reasoning and calls out of the text into their own fields."""
    added = turn.feed(response.text, ends=ends)
    response.text, response.reasoning = text_of(added), reasoning_of(added)
    for call in calls_of(added):
        new = response.tool_calls.add(index=call.index, id=call.call_id)
        new.function.name, new.function.arguments = call.name, call.arguments
    is_cut = response.stop_reason and turn.is_within_call
    if turn.num_calls and response.finish_reason == types_pb2.FINISH_REASON_STOP and not is_cut:
        response.finish_reason = types_pb2.FINISH_REASON_TOOL_CALLS
