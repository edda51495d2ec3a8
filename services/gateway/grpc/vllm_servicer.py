"""Serves the contract of vLLM's engines (``vllm.grpc.engine.VllmEngine``), by which routers send token ids."""

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import grpc.aio

from tokenloom.request import errors
from tokenloom.request.narrowing import narrow_int
from tokenloom.services.runtime.telemetry.tracing import pick_headers
from tokenloom.v1.vllm import vllm_engine_pb2 as pb
from tokenloom.v1.vllm import vllm_engine_pb2_grpc

from ..generation.running_generation import RunningGeneration
from ..mesh.collector import Delta
from ..openai.answer import finish_reason
from ..openai.body_reader import AnswerOptions, BodyReader
from ..openai.openai_logprobs import TokenPosition, positions
from ..openai.token_generation import TokensApi
from ..records.generate_request import GenerateRequest
from ..records.request_ids import NEW, ResumeToken, fingerprint, token_of_key
from ..serving.fronts import Front, FrontParts, GrpcService
from ..serving.served_meshes import ServedMeshes
from ..tenants.api_keys import call_tenant
from ..tenants.tenant import Tenant
from ..tenants.tenant_shares import TenantShares
from .inference_request import KEY_FIELD

Context = grpc.aio.ServicerContext[Any, Any]

WEIGHTS_METADATA, MIXED_METADATA = "x-tokenloom-weights-version", "x-tokenloom-mixed-numerics"
_MOST_VERSIONS = 4096
"""Characters of versions. Clients of gRPC refuse a call with more than 8 KB of trailing metadata, at its very end."""
_REFUSED = ("kv_transfer_params", "mm_inputs", "kv_transfer_params_json", "media_refs")
_POSITIVE = (
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "min_tokens",
    "n",
)
"""Fields of sampling parameters that are unset if they are 0."""
_OPTIONAL = ("temperature", "max_tokens", "logprobs", "prompt_logprobs", "seed")
_LISTS = ("stop", "stop_token_ids")
_CONSTRAINTS = {"json_schema": "json", "regex": "regex", "grammar": "grammar", "structural_tag": "structural_tag"}
_SERVER = "tokenloom"
_VALUES_PER_TURN = 2048
"""Log probabilities that are written before the event loop runs again: a few milliseconds."""


@dataclass(slots=True)
class _Named:
    """A request that its caller may end by its id.

    Attributes:
        generation: None: it has not begun, because its prompt is encoded or it waits for the first engine.
    """

    limit: asyncio.Timeout
    generation: RunningGeneration | None = None

    def end(self) -> None:
        if self.generation is None:
            self.limit.reschedule(asyncio.get_running_loop().time())
        else:
            self.generation.fail(_ended())


def _ended() -> errors.Aborted:
    return errors.Aborted("The request was ended by a call of Abort.")


def vllm(gateway: FrontParts) -> Front:
    """Return the contract as a front."""
    servicer = VllmEngineServicer(BodyReader(strict=gateway.strict), gateway.meshes, gateway.shares)
    requests = {"Generate": pb.GenerateRequest, "Abort": pb.AbortRequest}
    return Front(grpc=(GrpcService(vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server, servicer, requests),))


class VllmEngineServicer(vllm_engine_pb2_grpc.VllmEngineServicer):
    """Takes tokens and gives tokens, as ``/inference/v1/generate`` does."""

    def __init__(self, reader: BodyReader, meshes: ServedMeshes, shares: TenantShares) -> None:
        """``shares``: what each tenant has in work."""
        self._api = TokensApi(reader)
        self._meshes = meshes
        self._shares = shares
        self._began = asyncio.get_running_loop().time()
        self._live: dict[tuple[str, str], list[_Named]] = {}  # by tenant and the caller's id

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> None:  # type: ignore[override]
        """Writes to the context: a handler that waits in a ``yield`` would not notice a cancellation at once."""
        tenant = call_tenant()
        with self._shares.of(tenant).take_message(request.ByteSize(), self._shares.messages):
            asked, options = read_request(request, self._api, tenant)
            asked = replace(asked, timeout=context.time_remaining())
            metadata = context.invocation_metadata() or ()
            mesh, trace = self._meshes.pick(None), pick_headers(metadata)
            async with (
                self._named(tenant.name, request.request_id) as named,
                mesh.generator.open(asked, trace, _token(request, tenant, metadata)) as generation,
            ):
                named.generation = generation
                answer = _Answer(generation, options, streams=request.stream)
                while not generation.done:
                    for delta in await generation.take():
                        async for response in answer.responses(delta):
                            await context.write(response)
                # vLLM's messages have no fields for it.
                context.set_trailing_metadata(_origin(generation))

    async def HealthCheck(self, request: pb.HealthCheckRequest, context: Context) -> pb.HealthCheckResponse:
        missing = self._meshes.missing()
        return pb.HealthCheckResponse(healthy=not missing, message=", ".join(missing))

    async def Abort(self, request: pb.AbortRequest, context: Context) -> pb.AbortResponse:
        tenant = call_tenant().name
        for request_id in request.request_ids:
            for named in tuple(self._live.get((tenant, request_id), ())):
                named.end()
        return pb.AbortResponse()

    async def GetModelInfo(self, request: pb.GetModelInfoRequest, context: Context) -> pb.GetModelInfoResponse:
        mesh = self._meshes.pick(None)
        limits, info = mesh.generator.limits(), mesh.tokenizers.info
        return pb.GetModelInfoResponse(
            model_path=mesh.model,
            is_generation=not limits.HasField("generates") or limits.generates,
            max_context_length=limits.max_model_len,
            vocab_size=limits.vocab_size,
            served_model_name=mesh.model,
            eos_token_ids=() if info is None else info.eos_token_ids,
            max_req_input_len=max(limits.max_model_len - 1, 0),
        )

    async def GetServerInfo(self, request: pb.GetServerInfoRequest, context: Context) -> pb.GetServerInfoResponse:
        mesh = self._meshes.pick(None)
        return pb.GetServerInfoResponse(
            active_requests=mesh.generator.num_live,
            uptime_seconds=asyncio.get_running_loop().time() - self._began,
            server_type=_SERVER,
            block_size=mesh.view.block_size,
        )

    @asynccontextmanager
    async def _named(self, tenant: str, request_id: str) -> AsyncIterator[_Named]:
        """Let the caller end a request by its id for the length of the ``async with`` block."""
        key = tenant, request_id
        try:
            async with asyncio.timeout(None) as limit:
                named = _Named(limit)
                if not request_id:
                    yield named
                    return
                self._live.setdefault(key, []).append(named)
                try:
                    yield named
                finally:
                    self._live[key].remove(named)
                    if not self._live[key]:
                        del self._live[key]
        except TimeoutError:
            if not limit.expired():
                raise
            raise _ended() from None


def _token(request: pb.GenerateRequest, tenant: Tenant, metadata: Iterable[tuple[str, str | bytes]]) -> ResumeToken:
    """Return the token of a call: a repeat with the same key gets the answer of the first one from its beginning."""
    if (key := next((value for name, value in metadata if name == KEY_FIELD), None)) is None:
        return NEW
    digest = fingerprint("vllm.Generate", request.SerializeToString(deterministic=True))
    return token_of_key(tenant.name, str(key), digest, KEY_FIELD)


def read_request(request: pb.GenerateRequest, api: TokensApi, tenant: Tenant) -> tuple[GenerateRequest, AnswerOptions]:
    """Return what a message asks for. Raises ``InvalidArgument`` naming the field."""
    for name in _REFUSED:
        if request.HasField(name):
            raise errors.InvalidArgument(f"{name} is not accepted: the mesh places prefill and decode itself", name)
    if request.extra_mm_inputs:
        raise errors.InvalidArgument("extra_mm_inputs is not accepted: send text", "extra_mm_inputs")
    params, has_text = request.sampling_params, request.WhichOneof("input") == "text"
    if not has_text and not request.tokenized.input_ids:
        raise errors.InvalidArgument("tokenized.input_ids is empty; at least one token is needed", "tokenized")
    ids = [0] if has_text else list(request.tokenized.input_ids)
    body: dict[str, Any] = {"token_ids": ids, "sampling_params": _sampling(params), "stream": request.stream}
    if params.grammar_from_first_token:
        body["reasoning_ended"] = True
    asked, options = api.read(body, tenant)
    if has_text:
        asked = replace(asked, prompts=[request.text], prompt_field="text")
    if params.HasField("truncate_prompt_tokens"):
        keep = narrow_int("truncate_prompt_tokens", params.truncate_prompt_tokens, -1, 2**31 - 1)
        asked = replace(asked, truncate_prompt_tokens=keep)
    if request.HasField("data_parallel_rank"):
        rank = narrow_int("data_parallel_rank", request.data_parallel_rank, 0, 2**31 - 1)
        asked = replace(asked, data_parallel_rank=rank)
    return asked, options


def _sampling(params: pb.SamplingParams) -> dict[str, Any]:
    """Return the parameters as a body has them; those that are not set are left out."""
    values: dict[str, Any] = {name: value for name in _POSITIVE if (value := getattr(params, name))}
    values |= {name: getattr(params, name) for name in _OPTIONAL if params.HasField(name)}
    values |= {name: list(value) for name in _LISTS if (value := getattr(params, name))}
    if params.ignore_eos:
        values["ignore_eos"] = True
    if params.logit_bias:
        values["logit_bias"] = dict(params.logit_bias)
    kind = params.WhichOneof("constraint")
    if kind == "choice":
        values["structured_outputs"] = {"choice": list(params.choice.choices)}
    elif kind == "json_object":
        values["structured_outputs"] = {"json_object": params.json_object}
    elif kind is not None:
        values["structured_outputs"] = {_CONSTRAINTS[kind]: getattr(params, kind)}
    return values


class _Answer:
    """Makes the messages of one request."""

    def __init__(self, generation: RunningGeneration, options: AnswerOptions, *, streams: bool) -> None:
        self._generation, self._options, self._streams = generation, options, streams
        outputs = range(generation.num_outputs)
        self._token_ids: list[list[int]] = [[] for _ in outputs]
        self._logprobs = [pb.OutputLogProbs() for _ in outputs]
        self._inputs: pb.InputLogProbs | None = None
        self._num_values = 0

    async def responses(self, delta: Delta) -> AsyncIterator[pb.GenerateResponse]:
        """Yield the messages of some output. The event loop runs in between if they have many log probabilities."""
        generation, index = self._generation, delta.index
        self._token_ids[index] += delta.token_ids
        num_prompt, num_output = len(generation.prompt_of(index)), len(self._token_ids[index])
        logprobs = pb.OutputLogProbs() if self._streams else self._logprobs[index]
        num_best = self._options.num_logprobs
        if num_best is not None:
            for at in positions(delta.logprobs, delta.token_ids, delta.token_index, num_best):
                _add(logprobs, at)
                await self._count(1 + len(at.ids))
        has_logprobs = num_best is not None
        if self._streams and delta.token_ids:
            chunk = pb.GenerateStreamChunk(
                token_ids=delta.token_ids,
                prompt_tokens=num_prompt,
                completion_tokens=num_output,
                output_logprobs=logprobs if has_logprobs else None,
                index=index,
            )
            yield pb.GenerateResponse(chunk=chunk)
        if (finished := delta.finished) is None:
            return
        complete = pb.GenerateComplete(
            output_ids=self._token_ids[index],
            finish_reason=finish_reason(finished),
            prompt_tokens=num_prompt,
            completion_tokens=num_output,
            cached_tokens=finished.cached_tokens,
            index=index,
        )
        if has_logprobs and not self._streams:
            complete.output_logprobs.CopyFrom(logprobs)
        if self._options.num_prompt_logprobs is not None:
            complete.input_logprobs.CopyFrom(await self._of_prompt())
        self._add_stop(complete, finished.stop_reason)
        yield pb.GenerateResponse(complete=complete)

    async def _of_prompt(self) -> pb.InputLogProbs:
        """Return the log probabilities of the prompt, which all samples have."""
        if self._inputs is not None:
            return self._inputs
        prompt, parts = self._generation.prompt_of(0), self._generation.prompt_logprobs[0]
        top = parts[0].logprobs.top if parts else 0
        found = pb.InputLogProbs(token_ids=prompt[:1])
        found.token_logprobs.add()  # the first token has none
        found.top_logprobs.add()
        for at in positions(parts, prompt, 0, top):
            found.token_ids.append(at.token_id)
            found.token_logprobs.add(value=at.logprob)
            found.top_logprobs.add(values=at.logprobs, token_ids=at.ids)
            await self._count(1 + len(at.ids))
        self._inputs = found
        return found

    async def _count(self, num_values: int) -> None:
        self._num_values += num_values
        if self._num_values >= _VALUES_PER_TURN:
            self._num_values = 0
            await asyncio.sleep(0)

    def _add_stop(self, complete: pb.GenerateComplete, reason: str) -> None:
        """Say what has ended an output, if the request named it."""
        if reason in self._options.stop:
            complete.matched_stop_str = reason
        elif reason.isdecimal() and int(reason) in self._options.stop_token_ids:
            complete.matched_token_id = int(reason)


def _origin(generation: RunningGeneration) -> Sequence[tuple[str, str]]:
    """Return what computed the outputs, as metadata: versions of weights by output, and a mark of several numerics."""
    ends = [generation.finished[index] for index in sorted(generation.finished)]
    found, versions = [], [finished.weights_version for finished in ends]
    if sum(map(len, versions)) > _MOST_VERSIONS:
        versions = [each[each.rfind("+") :] if "+" in each else each for each in versions]
    if any(versions):
        found.append((WEIGHTS_METADATA, ",".join(versions)))
    if any(finished.timeline.mixed_numerics for finished in ends):
        found.append((MIXED_METADATA, "true"))
    return found


def _add(logprobs: pb.OutputLogProbs, at: TokenPosition) -> None:
    ids: Sequence[int] = at.ids
    logprobs.token_logprobs.append(at.logprob)
    logprobs.token_ids.append(at.token_id)
    logprobs.top_logprobs.add(values=at.logprobs, token_ids=ids)
