"""Answers the calls of the public gRPC API that generate nothing: Embed, Classify, Score and Pool."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import grpc.aio
from google.protobuf.message import Message

from tokenloom.request.errors import InvalidArgument
from tokenloom.services.runtime.telemetry.tracing import pick_headers
from tokenloom.v1 import inference_pb2, types_pb2

from ..generation.generator import Generator
from ..generation.running_pooling import RunningPooling
from ..pooling.scores import plan_scoring
from ..pooling.vector_json import floats
from ..records.generate_request import GenerateRequest
from ..records.model_names import NamedAdapter
from ..records.pooling_input import TASKS, PoolingInput, check_count
from ..tenants.tenant import Tenant

Context = grpc.aio.ServicerContext[Any, Any]
InputsRequest: TypeAlias = inference_pb2.EmbedRequest | inference_pb2.ClassifyRequest | inference_pb2.PoolRequest

_MESSAGE_BYTES = 1 << 20
"""Numbers in one message: clients accept messages of 4 MiB."""


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
