"""Reads requests of the public gRPC API, and of its sessions: prompts that continue after they were answered."""

import asyncio
from collections.abc import AsyncIterator, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar
from uuid import uuid4

from google.protobuf.message import Message

from tokenloom.request.errors import DeadlineExceeded, InvalidArgument
from tokenloom.request.limits import MAX_TTFT_DEADLINE, TTFT_DEADLINE
from tokenloom.request.output_constraints import relax
from tokenloom.request.validation import check_samples, check_stop_count
from tokenloom.v1 import inference_pb2, output_processor_pb2, types_pb2

from ..assistant.message_plans import MessagePlan, MessagePlans
from ..generation.delivered import Delivered
from ..records.generate_request import BeamOptions, Chat, EmbeddedPrompt, GenerateRequest
from ..records.request_ids import NEW, ClientPosition, ResumeToken, fingerprint, is_request_id, token_of_key, tokens_of
from ..tenants.tenant import Tenant
from .chat_prompt import read_chat_prompt


def read_request(
    request: inference_pb2.GenerateRequest,
    plans: MessagePlans,
    tenant: Tenant,
    timeout: float | None,
    *,
    is_turn: bool = False,
) -> tuple[GenerateRequest, MessagePlan | None, Sequence[str]]:
    """Return the request; how a chat's turns are read, None: as plain text; and the names of what has no effect.

    ``timeout``: seconds that are left. ``is_turn``: it is of a session. Raises ``InvalidArgument`` naming the field.
    """
    if request.HasField("continued_turn") and not is_turn:
        raise InvalidArgument(
            "continued_turn is only for sessions; an answer is continued with Resume", "continued_turn"
        )
    if request.WhichOneof("prompt") != "chat":
        return _generate_request(request, _prompts(request), tenant, timeout), None, _relaxed(request)
    chat, tools = read_chat_prompt(request.chat, plans.shown)
    generate_request = _generate_request(request, chat, tenant, timeout)
    include_reasoning = not request.chat.HasField("include_reasoning") or request.chat.include_reasoning
    if tools.is_forced and request.sampling_params.HasField("structured_outputs"):
        lost: Sequence[str] = ("sampling_params.structured_outputs",)
    else:
        lost = _relaxed(request)
    plan, unbound = plans.apply(tools, generate_request, include_reasoning=include_reasoning)
    return generate_request, plan, (*lost, *unbound)


def field_names(request: inference_pb2.GenerateRequest) -> Mapping[str, str]:
    """Return what the client calls a field, by our name: calls are constrained by the schemas of its tools."""
    chat = request.chat
    forced = chat.tool_choice.function or chat.tool_choice.mode == inference_pb2.TOOL_CHOICE_MODE_REQUIRED
    if chat.tools and (forced or not request.sampling_params.HasField("structured_outputs")):
        return {"structured_outputs": "tools"}
    return {}


def _relaxed(request: inference_pb2.GenerateRequest) -> Sequence[str]:
    """Fit a constraint to what a grammar can express; return the keywords that do not bind the output."""
    if not request.sampling_params.HasField("structured_outputs"):
        return ()
    return relax(request.sampling_params.structured_outputs)


def _prompts(request: inference_pb2.GenerateRequest) -> list[str] | list[list[int]] | list[EmbeddedPrompt]:
    match request.WhichOneof("prompt"):
        case "text":
            return [request.text]
        case "token_ids":
            return [list(request.token_ids.ids)]
        case "parts":
            parts = request.parts.parts
            return [EmbeddedPrompt([p.embeds if p.HasField("embeds") else list(p.token_ids.ids) for p in parts])]
    raise InvalidArgument("prompt must be set: text, token_ids, chat or parts", "prompt")


def _generate_request(
    request: inference_pb2.GenerateRequest,
    prompts: Chat | list[str] | list[list[int]] | list[EmbeddedPrompt],
    tenant: Tenant,
    timeout: float | None,
) -> GenerateRequest:
    check_stop_count(len(request.stop))
    text = output_processor_pb2.TextOptions(
        stop=request.stop,
        include_stop_str_in_output=request.include_stop_str_in_output,
        skip_special_tokens=_optional(request, "skip_special_tokens"),
        spaces_between_special_tokens=_optional(request, "spaces_between_special_tokens"),
        detokenize=_optional(request, "detokenize"),
        stream_interval=request.stream_interval,
    )
    return GenerateRequest(
        prompts,
        request.WhichOneof("prompt") or "prompt",
        request.sampling_params,
        text,
        tenant=tenant,
        ignore_eos=request.ignore_eos,
        priority=request.priority,
        ttft_deadline=_ttft_deadline(request),
        num_samples=request.n or 1,
        beam_search=_beam_search(request),
        bad_words=request.bad_words,
        truncate_prompt_tokens=_optional(request, "truncate_prompt_tokens"),
        add_special_tokens=_optional(request, "add_special_tokens") is not False,
        data_parallel_rank=_optional(request, "data_parallel_rank"),
        timeout=timeout,
        session=request.session,
        keep_seconds=request.keep_seconds,
    )


def _ttft_deadline(request: inference_pb2.GenerateRequest) -> float | None:
    if not request.HasField("ttft_deadline"):
        return None
    seconds = request.ttft_deadline.ToNanoseconds() / 1e9
    if not 0 < seconds <= MAX_TTFT_DEADLINE:
        raise InvalidArgument(
            f"{TTFT_DEADLINE} must be above 0 and at most {MAX_TTFT_DEADLINE} seconds, not {seconds:g}", TTFT_DEADLINE
        )
    return seconds


def _beam_search(request: inference_pb2.GenerateRequest) -> BeamOptions | None:
    if not request.HasField("beam_search"):
        return None
    for name, is_set in (
        ("return_timeline", request.return_timeline),
        (TTFT_DEADLINE, request.HasField("ttft_deadline")),
    ):
        if is_set:
            raise InvalidArgument(f"{name} is not available with beam search", name)
    penalty = _optional(request.beam_search, "length_penalty")
    return BeamOptions() if penalty is None else BeamOptions(penalty)


def _optional(request: Message, name: str) -> Any:
    """Return a field; None when the client did not set it."""
    return getattr(request, name) if request.HasField(name) else None


# vLLM keeps one request and its blocks between turns, in a state that holds a place in the batch and memory that cannot
# be preempted. Here an idle session holds only its tokens, and the prefix cache finds its blocks again.
class InputSession:
    """Streaming input (``resumable`` requests in vLLM V1): keeps the tokens of a session's turns.

    Each turn is a request of its own; the mesh finds what it repeats in the prefix cache.
    """

    def __init__(self, tenant: Tenant) -> None:
        self._tenant = tenant
        self._name = f"input session {uuid4().hex}"  # unless its client has another one
        self._tokens: list[int] = []
        self._num_output = 0

    def read_turn(
        self,
        request: inference_pb2.GenerateRequest,
        plans: MessagePlans,
        timeout: float | None,
        prompt: Sequence[int] = (),
    ) -> tuple[GenerateRequest, Sequence[str]]:
        """Return the next turn's request, and the names of what has no effect.

        ``prompt``: the whole prompt of a turn that another gateway has begun; empty: the turn is new. Raises
        ``InvalidArgument`` for what sessions do not support.
        """
        if (kind := request.WhichOneof("prompt")) not in (None, "text", "token_ids"):
            raise InvalidArgument(f"a turn of a session must be text or token_ids, not {kind}", kind)
        if request.n > 1:
            raise InvalidArgument("n must be 1 in a session: only one output can be continued", "n")
        if request.HasField("beam_search"):
            raise InvalidArgument("beam_search is not supported in a session", "beam_search")
        if request.HasField("truncate_prompt_tokens"):
            raise InvalidArgument("truncate_prompt_tokens is not supported in a session", "truncate_prompt_tokens")
        generate_request, _, ignored = read_request(request, plans, self._tenant, timeout, is_turn=True)
        if not generate_request.session:
            generate_request = replace(generate_request, session=self._name)
        if prompt:
            return replace(generate_request, prompts=[list(prompt)], prompt_field="continued_turn"), ignored
        if not self._tokens:
            return generate_request, ignored
        # The tokens that begin a text were added to the first turn.
        before, special = self._tokens, request.add_special_tokens
        return replace(generate_request, before=before, add_special_tokens=special), ignored

    def begin(self, prompt: Iterable[int]) -> None:
        """Start a turn with its whole prompt."""
        self._tokens = list(prompt)
        self._num_output = 0

    def take(self, token_ids: Iterable[int]) -> None:
        """Add output of the turn."""
        before = len(self._tokens)
        self._tokens += token_ids
        self._num_output += len(self._tokens) - before

    def end(self, finished: output_processor_pb2.RequestFinished, stop_token_ids: Collection[int]) -> None:
        """End the turn. Its last token is not continued, as in vLLM: its KV was never computed. It is if a grammar
        ended the turn without one of its ``stop_token_ids``, because the token belongs to the text then."""
        if not self._num_output:
            return
        is_stop = finished.reason == types_pb2.FINISH_REASON_STOP and not finished.stop_reason
        if not is_stop or self._tokens[-1] in stop_token_ids:
            del self._tokens[-1]


KEY_FIELD = "idempotency-key"


def read_resume_token(
    request: inference_pb2.GenerateRequest, tenant: Tenant, metadata: Iterable[tuple[str, str | bytes]]
) -> ResumeToken:
    """Return the token of a call of Generate. Raises ``InvalidArgument`` for a malformed key."""
    key = next((value for name, value in metadata if name == KEY_FIELD), None)
    if key is not None:
        return token_of_key(tenant.name, str(key), _fingerprint(request), KEY_FIELD)
    return ResumeToken(fingerprint=_fingerprint(request)) if request.resumable else NEW


def read_resumption(request: inference_pb2.InferenceResumeRequest) -> tuple[ResumeToken, Delivered]:
    """Return the token of a call of Resume, and what its caller has. Raises ``InvalidArgument`` naming the field."""
    if not is_request_id(request.request_id):
        raise InvalidArgument("request_id must be that of the answer to resume", "request_id")
    num_outputs = request.request.n or 1
    check_samples(num_outputs)  # before a list is made of their positions
    positions = {
        each.index: ClientPosition(each.num_tokens, each.text_length, each.finished, each.num_prompt_logprobs)
        for each in request.positions
    }
    if len(positions) < len(request.positions) or max(positions, default=0) >= num_outputs:
        raise InvalidArgument(f"positions must be of different indices, below {num_outputs}", "positions")
    fingerprint_of_body = _fingerprint(request.request)
    token = ResumeToken(request.request_id, fingerprint_of_body, resumes=True, num_delivered=tokens_of(positions))
    return token, Delivered(positions)


def read_turn_token(request: inference_pb2.GenerateRequest) -> tuple[ResumeToken, Delivered | None]:
    """Return the token of a turn of a session, and what its caller has of a turn that another gateway has begun; None:
    it is new. Raises ``InvalidArgument`` naming the field."""
    if not request.HasField("continued_turn"):
        return ResumeToken(fingerprint=_fingerprint_of_turn(request)) if request.resumable else NEW, None
    turn, field = request.continued_turn, "continued_turn"
    if not request.resumable:
        raise InvalidArgument("continued_turn: only a turn that was resumable can be continued", field)
    if not is_request_id(turn.request_id):
        raise InvalidArgument("continued_turn.request_id must be that of the turn's answer", field)
    if turn.position.index:
        raise InvalidArgument("continued_turn.position.index must be 0: a turn has one output", field)
    has = turn.position
    positions = {0: ClientPosition(has.num_tokens, has.text_length, has.finished, has.num_prompt_logprobs)}
    if not turn.HasField("position"):
        positions = {}
    body = inference_pb2.GenerateRequest()
    body.CopyFrom(request)
    body.ClearField("continued_turn")
    digest, delivered = _fingerprint_of_turn(body), tokens_of(positions)
    return ResumeToken(turn.request_id, digest, resumes=True, num_delivered=delivered), Delivered(positions)


def _fingerprint_of_turn(request: inference_pb2.GenerateRequest) -> bytes:
    return fingerprint("GenerateSession", request.SerializeToString(deterministic=True))


def read_cancellation(request: inference_pb2.InferenceCancelRequest, tenant: Tenant) -> str:
    """Return the id of the request that a call of Cancel names. Raises ``InvalidArgument`` naming the field."""
    if request.WhichOneof("name") == "idempotency_key":
        return token_of_key(tenant.name, request.idempotency_key, b"", "idempotency_key").request_id
    if not is_request_id(request.request_id):
        raise InvalidArgument("request_id must be that of the answer to cancel", "request_id")
    return request.request_id


def _fingerprint(request: inference_pb2.GenerateRequest) -> bytes:
    return fingerprint("Generate", request.SerializeToString(deterministic=True))


T = TypeVar("T")


async def next_request(requests: AsyncIterator[T], idle_seconds: float, noun: str) -> T | None:
    """Return the next request of a stream; None at its end. ``noun``: what the method calls a request.

    Raises ``DeadlineExceeded`` after ``idle_seconds`` without one: an open stream is one of the calls that the server
    may have, also while it says nothing.
    """
    try:
        async with asyncio.timeout(idle_seconds):
            return await anext(requests, None)
    except TimeoutError:
        raise DeadlineExceeded(f"no {noun} arrived within {idle_seconds:g} s") from None
