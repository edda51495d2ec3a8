"""``/v1/responses``: reads bodies and shapes answers."""

import time
from dataclasses import dataclass, replace
from typing import Any
from uuid import uuid4

from tokenloom.request.errors import InvalidArgument

from ..generation.running_generation import RunningGeneration
from ..openai.body_reader import AnswerOptions, Body, BodyReader, inherited, renamed_twice
from ..openai.chat import ChatApi
from ..openapi.request_schemas import ResponsesRequest
from ..records.generate_request import GenerateRequest
from ..records.model_names import ModelNames
from ..tenants.tenant import Tenant
from .function_tools import namespaced
from .ignored_members import ignored_in_response
from .input_items import Turn, read_input
from .response_answer import ResponseAnswer, ResponseRequest
from .response_body import chat_body, most_tokens
from .response_store import ResponseStore

_FIELDS = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "function.name": "name",
    "function.description": "description",
    "function.strict": "strict",
    "function.parameters": "parameters",
}
"""Fields of a chat that have another name here."""
_DEFAULTS: dict[str, Any] = {
    "tools": [],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"effort": None, "summary": None},
    "text": {"format": {"type": "text"}},
    "metadata": {},
    "truncation": "disabled",
}
_ECHOED = (*_DEFAULTS, "instructions", "previous_response_id", "max_output_tokens", "max_tool_calls", "top_logprobs")
_ECHOED_SAMPLING = {"temperature": 1.0, "top_p": 1.0}


@dataclass(frozen=True, slots=True)
class ResponsesApi:
    """Reads bodies of the endpoint and makes its answers. A body becomes that of a chat, which is the same request."""

    reader: BodyReader
    chats: ChatApi
    names: ModelNames
    store: ResponseStore
    is_resumable = False

    def read(self, body: Body, tenant: Tenant) -> tuple[GenerateRequest, AnswerOptions]:
        """Return what the body asks for. Raises :class:`InvalidArgument` naming the field, and
        :class:`errors.NotFound` for a previous response that is not stored."""
        fields = self.reader.read(body, ResponsesRequest)
        request = self._request(body, fields, tenant)
        longest = most_tokens(fields)
        try:
            generate_request, options = self.chats.read(chat_body(body, fields, request.turns), tenant)
        except InvalidArgument as error:
            raise error.renamed(_FIELDS) from None
        ignored = (*ignored_in_response(fields), *self.reader.ignored(body, ResponsesRequest))
        if options.ignored:
            ignored += inherited(options.ignored, _FIELDS)
        return replace(generate_request, most_tokens=longest, session=request.session), replace(
            options, request=request, ignored=ignored, field_names=renamed_twice(options.field_names, _FIELDS)
        )

    def answer(self, generation: RunningGeneration, options: AnswerOptions) -> ResponseAnswer:
        assert isinstance(options.request, ResponseRequest)
        return ResponseAnswer(generation, options, options.request, self.store)

    def _request(self, body: Body, fields: ResponsesRequest, tenant: Tenant) -> ResponseRequest:
        is_background = bool(fields.background)
        is_stored = self.store.is_on and fields.store is not False
        if is_background and (fields.stream or not is_stored):
            raise InvalidArgument("background needs a stored response, and excludes stream", "background")
        echo = {name: getattr(fields, name) for name in _ECHOED} | {"model": self.names.answers_as(body.get("model"))}
        echo |= {name: value for name, value in _DEFAULTS.items() if echo[name] is None}
        echo |= {name: default if body.get(name) is None else body[name] for name, default in _ECHOED_SAMPLING.items()}
        turns, session = self._turns(fields, tenant)
        return ResponseRequest(
            response_id=f"resp_{uuid4().hex}",
            created=int(time.time()),
            echo=echo,
            turns=turns,
            session=fields.prompt_cache_key or _conversation(fields) or session,
            tenant=tenant.name,
            is_background=is_background,
            is_stored=is_stored,
            namespaced=namespaced(fields),
        )

    def _turns(self, fields: ResponsesRequest, tenant: Tenant) -> tuple[list[Turn], str]:
        """Return the whole conversation and the session of the response that it continues; empty: it continues none."""
        new = read_input(fields.input)
        if fields.previous_response_id is None:
            return new, ""
        field = "previous_response_id"
        previous = self.store.get(fields.previous_response_id, tenant.name, field)
        if previous.cancel is not None:
            raise InvalidArgument("the previous response has not ended", field)
        return [*previous.turns, *new], previous.session or fields.previous_response_id


def _conversation(fields: ResponsesRequest) -> str:
    """Return the id of the conversation that a body names; empty: it names none."""
    named = fields.conversation
    found = named.get("id") if isinstance(named, dict) else named
    return found if isinstance(found, str) else ""
