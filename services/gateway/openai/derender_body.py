"""Reads the bodies of ``/v1/chat/completions/derender`` and ``/v1/completions/derender``."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from tokenloom.request import errors
from tokenloom.request.narrowing import narrow_int, narrow_token_ids

from ..openapi.token_schemas import DerenderChatRequest, DerenderCompletionRequest, DerenderState, GeneratedTokens
from ..records.generate_request import GenerateRequest
from ..tenants.tenant import Tenant
from .body_reader import AnswerOptions, Body, BodyReader
from .chat import ChatApi
from .completions import CompletionsApi

MAX_CHOICES: Final = 1024
"""Outputs of an answer, as many as a request may have."""
_PLAIN_CHAT: Final[Body] = {"messages": [{"role": "user", "content": ""}]}
_PLAIN_COMPLETION: Final[Body] = {"prompt": " "}


@dataclass(frozen=True, slots=True)
class Derendering:
    """A checked body, except for its values."""

    request: GenerateRequest
    """What was rendered; without a prompt if the client does not say it."""
    options: AnswerOptions
    is_chat: bool
    responses: Sequence[GeneratedTokens]
    """One for each prompt; in a stream one chunk."""
    prompts: Sequence[Sequence[int] | None]
    """The ids of each prompt; None: not known."""
    num_prompt_tokens: int | None
    streams: bool
    state: DerenderState | None
    """Of the chunk before."""
    knows_chat: bool = True
    """Whether the client said what was rendered."""


@dataclass(frozen=True, slots=True)
class DerenderReader:
    """Reads the bodies of both endpoints."""

    reader: BodyReader
    chats: ChatApi

    def chat(self, body: Body, tenant: Tenant) -> Derendering:
        """Raises :class:`errors.InvalidArgument` naming the field."""
        fields = self.reader.read(body, DerenderChatRequest)
        request, options = self._inner("chat_request", fields.chat_request or _PLAIN_CHAT, self.chats, tenant)
        whole = fields.generate_response
        responses = _responses(fields, "generate_response", None if whole is None else [whole])
        own = fields.prompt_token_ids if fields.prompt_token_ids is not None else responses[0].prompt_token_ids
        return Derendering(
            request,
            options,
            True,
            responses,
            [read_prompt("prompt_token_ids", own)],
            _count("prompt_tokens", fields.prompt_tokens),
            bool(fields.stream),
            fields.stream_state,
            fields.chat_request is not None,
        )

    def completion(self, body: Body, tenant: Tenant) -> Derendering:
        """Raises :class:`errors.InvalidArgument` naming the field."""
        fields = self.reader.read(body, DerenderCompletionRequest)
        asked = fields.completion_request or _PLAIN_COMPLETION
        request, options = self._inner("completion_request", asked, CompletionsApi(self.reader), tenant)
        if options.echo:
            raise errors.InvalidArgument(
                "echo is not available here: put the prompt before it", "completion_request.echo"
            )
        responses = _responses(fields, "generate_responses", fields.generate_responses)
        counts, prompts = fields.prompt_tokens, fields.prompt_token_ids
        if fields.stream:
            counts, prompts = None if counts is None else [counts], None if prompts is None else [prompts]
        for name, values in (("prompt_tokens", counts), ("prompt_token_ids", prompts)):
            if values is not None and (not isinstance(values, list) or len(values) != len(responses)):
                raise errors.InvalidArgument(f"{name} must be a list with an entry for each answer", name)
        own = [each.prompt_token_ids for each in responses] if prompts is None else prompts
        total = None if counts is None else sum(_count("prompt_tokens", each) or 0 for each in counts)
        ids = [read_prompt("prompt_token_ids", each) for each in own]
        return Derendering(request, options, False, responses, ids, total, bool(fields.stream), fields.stream_state)

    def _inner(
        self, name: str, body: Body, api: ChatApi | CompletionsApi, tenant: Tenant
    ) -> tuple[GenerateRequest, AnswerOptions]:
        try:
            return api.read(body, tenant)
        except errors.InvalidArgument as error:
            where = f"{name}.{error.field}" if error.field else name
            raise errors.InvalidArgument(f"{name}: {error.message}", where) from None


def _responses(
    fields: DerenderChatRequest | DerenderCompletionRequest, name: str, whole: Sequence[GeneratedTokens] | None
) -> Sequence[GeneratedTokens]:
    """Return the answers, or the one chunk. Raises ``InvalidArgument``."""
    if not fields.stream:
        for other in ("generate_chunk", "stream_state"):
            if getattr(fields, other) is not None:
                raise errors.InvalidArgument(f"{other} needs stream", other)
        if not whole:
            raise errors.InvalidArgument(f"{name} is missing", name)
        responses = whole
    elif whole is not None or fields.generate_chunk is None:
        raise errors.InvalidArgument(f"with stream, send generate_chunk and no {name}", "generate_chunk")
    else:
        name, responses = "generate_chunk", [fields.generate_chunk]
        if len(responses[0].choices) > 1:
            raise errors.InvalidArgument(
                "a chunk has one choice at most; send the others in other calls", f"{name}.choices"
            )
    if any(each.output_mode != "tokens" for each in responses):
        reason = "an answer of output_mode text has its text already"
        raise errors.InvalidArgument(f"{name}: {reason}", f"{name}.output_mode")
    if sum(len(each.choices) for each in responses) > MAX_CHOICES:
        raise errors.InvalidArgument(f"{name}: at most {MAX_CHOICES} choices", f"{name}.choices")
    return responses


def read_prompt(name: str, ids: object) -> list[int] | None:
    """Return token ids of a client; None if it sends none. Raises ``InvalidArgument``."""
    return None if ids is None else narrow_token_ids(name, ids)


def _count(name: str, value: object) -> int | None:
    return None if value is None else narrow_int(name, value, 0, 2**31 - 1)
