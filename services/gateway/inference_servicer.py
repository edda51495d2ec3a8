"""The public gRPC API."""

from collections.abc import Mapping
from typing import Any

import grpc.aio
from google.protobuf import json_format

from tokenloom.v1 import inference_pb2, inference_pb2_grpc, output_processor_pb2

from ..runtime import errors, logprob_columns
from ..runtime.tracing import pick_headers
from . import sse
from .collector import Delta
from .embeds_prompt import EmbedsPrompt, of_message
from .endpoint import check_model
from .generation import Generation, Generator
from .health import MeshHealth
from .job import Chat, Job
from .messages import read_messages

Context = grpc.aio.ServicerContext[Any, Any]


class InferenceServicer(inference_pb2_grpc.InferenceServicer):
    """Generates over the same road as HTTP."""

    def __init__(self, generator: Generator, health: MeshHealth, model: str) -> None:
        self._generator = generator
        self._health = health
        self._model = model

    async def Generate(self, request: inference_pb2.GenerateRequest, context: Context) -> None:  # type: ignore[override]
        """Writes to the context: a handler parked in a ``yield`` would not see the cancellation at once."""
        check_model(request.model or None, self._model)
        job = _job(request, context.time_remaining())
        if request.user_request_id:
            await context.send_initial_metadata((("x-request-id", _printable(request.user_request_id)),))
        trace_headers = pick_headers(context.invocation_metadata() or ())
        async with self._generator.open(job, trace_headers) as generation:
            prompt_ids = generation.prompts[0] if request.return_prompt_token_ids else ()
            live = generation.num_outputs
            while not generation.done:
                for delta in await generation.take():
                    response = _response(generation, delta)
                    response.prompt_token_ids.extend(prompt_ids)
                    prompt_ids = ()
                    live -= delta.finished is not None
                    if not live:
                        _close(response, generation, with_timeline=request.return_timeline)
                    await context.write(response)

    async def ListModels(
        self, request: inference_pb2.ListModelsRequest, context: Context
    ) -> inference_pb2.ListModelsResponse:
        limits = self._health.limits()
        model = inference_pb2.Model(name=self._model, max_model_len=limits.max_model_len if limits else 0)
        return inference_pb2.ListModelsResponse(models=[model])


def _job(request: inference_pb2.GenerateRequest, timeout: float | None) -> Job:
    kind = request.WhichOneof("prompt")
    if kind is None:
        raise errors.InvalidArgument("prompt must be set: text, token_ids, chat or parts", "prompt")
    text = output_processor_pb2.TextOptions(
        stop=request.stop,
        include_stop_str_in_output=request.include_stop_str_in_output,
        skip_special_tokens=_optional(request, "skip_special_tokens"),
        spaces_between_special_tokens=_optional(request, "spaces_between_special_tokens"),
        detokenize=_optional(request, "detokenize"),
        stream_interval=request.stream_interval,
    )
    prompts: Chat | list[str] | list[list[int]] | list[EmbedsPrompt]
    if kind == "chat":
        prompts = _chat(request.chat)
    elif kind == "parts":
        prompts = [of_message(request.parts)]
    else:
        prompts = [request.text] if kind == "text" else [list(request.token_ids.ids)]
    return Job(
        prompts,
        kind,
        request.sampling_params,
        text,
        ignore_eos=request.ignore_eos,
        priority=request.priority,
        num_samples=request.n or 1,
        bad_words=request.bad_words,
        truncate_prompt_tokens=_optional(request, "truncate_prompt_tokens"),
        add_special_tokens=_optional(request, "add_special_tokens") is not False,
        timeout=timeout,
    )


def _optional(request: inference_pb2.GenerateRequest, name: str) -> Any:
    """None: the client left it open."""
    return getattr(request, name) if request.HasField(name) else None


def _chat(chat: inference_pb2.ChatPrompt) -> Chat:
    messages = [_message(message) for message in chat.messages]
    try:
        kwargs = _whole_numbers(json_format.MessageToDict(chat.template_kwargs))
    except (ValueError, json_format.Error) as error:  # NaN and infinities
        raise errors.InvalidArgument(f"chat.template_kwargs: {error}", "chat.template_kwargs") from None
    return Chat(
        messages_json=read_messages(messages, "chat.messages"),
        template_kwargs_json=sse.encode_json(kwargs) if kwargs else b"",
        add_generation_prompt=not chat.HasField("add_generation_prompt") or chat.add_generation_prompt,
    )


def _message(message: inference_pb2.ChatMessage) -> Mapping[str, str]:
    return {"role": message.role, "content": message.content, "name": message.name}


def _whole_numbers(value: Any) -> Any:
    """A Struct has no integers; a template that counts or slices needs them."""
    if isinstance(value, dict):
        return {key: _whole_numbers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_whole_numbers(item) for item in value]
    is_whole = isinstance(value, float) and value.is_integer() and abs(value) < 2**53
    return int(value) if is_whole else value


def _response(generation: Generation, delta: Delta) -> inference_pb2.GenerateResponse:
    response = inference_pb2.GenerateResponse(
        request_id=generation.request_id,
        index=delta.index,
        text=delta.text,
        token_ids=delta.token_ids,
        token_index=delta.token_index,
    )
    for told in delta.logprobs:
        response.logprobs.top = told.logprobs.top
        logprob_columns.extend(response.logprobs, told.logprobs)
    for told in delta.prompt_logprobs:
        response.prompt_logprobs.top = told.logprobs.top
        logprob_columns.extend(response.prompt_logprobs, told.logprobs)
    if delta.finished is not None:
        response.finish_reason = delta.finished.reason
        response.stop_reason = delta.finished.stop_reason
    return response


def _close(response: inference_pb2.GenerateResponse, generation: Generation, *, with_timeline: bool) -> None:
    response.usage.CopyFrom(generation.usage)
    if with_timeline:
        response.timeline.CopyFrom(generation.timeline)


def _printable(text: str) -> str:
    """Fit for metadata, and no longer than an id needs to be."""
    return "".join(c for c in text[:128] if " " <= c <= "~")
