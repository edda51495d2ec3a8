"""Requests of the public gRPC API, narrowed to jobs."""

from typing import Any

from tokenloom.request.errors import InvalidArgument
from tokenloom.v1 import inference_pb2, output_processor_pb2

from ..assistant.message_plans import MessagePlans
from ..assistant.parsed_message import MessagePlan
from ..generation.embeds_prompt import EmbedsPrompt, of_message
from ..generation.job import Chat, Job
from .chat_prompt import read_chat


def read_request(
    request: inference_pb2.GenerateRequest, plans: MessagePlans, timeout: float | None
) -> tuple[Job, MessagePlan | None]:
    """What is asked for, and how a chat's turns are read; None: as they are. ``timeout``: seconds that are left.

    Raises ``InvalidArgument`` naming the field.
    """
    if request.WhichOneof("prompt") != "chat":
        return _job(request, _prompts(request), timeout), None
    chat, tools = read_chat(request.chat)
    job = _job(request, chat, timeout)
    include_reasoning = not request.chat.HasField("include_reasoning") or request.chat.include_reasoning
    return job, plans.apply(tools, job, include_reasoning=include_reasoning)


def _prompts(request: inference_pb2.GenerateRequest) -> list[str] | list[list[int]] | list[EmbedsPrompt]:
    match request.WhichOneof("prompt"):
        case "text":
            return [request.text]
        case "token_ids":
            return [list(request.token_ids.ids)]
        case "parts":
            return [of_message(request.parts)]
    raise InvalidArgument("prompt must be set: text, token_ids, chat or parts", "prompt")


def _job(
    request: inference_pb2.GenerateRequest,
    prompts: Chat | list[str] | list[list[int]] | list[EmbedsPrompt],
    timeout: float | None,
) -> Job:
    text = output_processor_pb2.TextOptions(
        stop=request.stop,
        include_stop_str_in_output=request.include_stop_str_in_output,
        skip_special_tokens=_optional(request, "skip_special_tokens"),
        spaces_between_special_tokens=_optional(request, "spaces_between_special_tokens"),
        detokenize=_optional(request, "detokenize"),
        stream_interval=request.stream_interval,
    )
    return Job(
        prompts,
        request.WhichOneof("prompt") or "prompt",
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
