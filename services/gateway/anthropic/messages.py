"""``/v1/messages``: reads bodies and shapes answers."""

from dataclasses import dataclass, replace

from tokenloom.request.errors import InvalidArgument

from ..generation.running_generation import RunningGeneration
from ..openai.body_reader import AnswerOptions, Body, BodyReader, inherited, renamed_twice
from ..openai.chat import ChatApi
from ..openapi.request_schemas import MessagesRequest
from ..records.generate_request import GenerateRequest
from ..tenants.tenant import Tenant
from .context_edits import ignored_edits, read_edits
from .ignored_members import ignored_in_message
from .message_answer import MessageAnswer, MessageReports
from .messages_body import chat_body, lifetimes, most_tokens, previous_message, session

_FIELDS = {
    "stop": "stop_sequences",
    "function.name": "name",
    "function.description": "description",
    "function.strict": "strict",
    "function.parameters": "input_schema",
    "thinking_token_budget": "thinking.budget_tokens",
    "response_format": "output_config.format",
}
"""Fields of a chat that have another name here."""


@dataclass(frozen=True, slots=True)
class MessagesApi:
    """Reads bodies of the endpoint and makes its answers. A body becomes that of a chat, which is the same request."""

    reader: BodyReader
    chats: ChatApi
    is_resumable = False

    def read(self, body: Body, tenant: Tenant) -> tuple[GenerateRequest, AnswerOptions]:
        """Return what the body asks for. Raises :class:`InvalidArgument` naming the field."""
        fields = self.reader.read(body, MessagesRequest)
        if body.get("prompt_logprobs") is not None:
            raise InvalidArgument("prompt_logprobs: this API returns no log probabilities", "prompt_logprobs")
        longest = most_tokens(body)
        reasons = self.chats.plans.reasoning is not None
        try:
            chat = chat_body(body, fields, reasons=reasons)
            request, options = self.chats.read(chat, tenant)
        except InvalidArgument as error:
            raise error.renamed(_FIELDS) from None
        members = ignored_in_message(fields, keeps_budget=reasons)
        if options.ignored:
            members += inherited(options.ignored, _FIELDS)
        members += tuple(ignored_edits(fields.context_management))
        ignored = (*self.reader.ignored(body, MessagesRequest), *members)
        kept = lifetimes(fields)
        edits, previous = read_edits(fields.context_management), previous_message(fields)
        reports = MessageReports(edits, previous, keep_seconds=kept[0] if len({*kept}) == 1 else None)
        request = replace(
            request,
            most_tokens=longest,
            session=session(fields),
            keep_seconds=max(kept, default=0),
            edits=reports.edits,
            compared=reports.previous,
        )
        return request, replace(
            options, request=reports, ignored=ignored, field_names=renamed_twice(options.field_names, _FIELDS)
        )

    def answer(self, generation: RunningGeneration, options: AnswerOptions) -> MessageAnswer:
        return MessageAnswer(generation, options)
