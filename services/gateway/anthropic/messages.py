"""``/v1/messages``: reads bodies and shapes answers; and counts tokens at ``/v1/messages/count_tokens``."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from tokenloom.request import errors
from tokenloom.request.errors import InvalidArgument
from tokenloom.request.packed_ids import num_ids
from tokenloom.v1.tokenizer_pb2 import TokenizedPrompt

from ..encoding.sse import encode_json
from ..formats.tool_request import read_tools
from ..generation.generator import Generator
from ..generation.running_generation import RunningGeneration
from ..http.http_exchange import ErrorForm, HttpExchange
from ..http.request_body import BodyParser
from ..mesh.tokenizer_client import limited
from ..openai.body_reader import AnswerOptions, Body, BodyReader, ignored_members, inherited, renamed_twice
from ..openai.chat import ChatApi, read_chat
from ..openai.event_ids import IdKind
from ..openapi.request_schemas import CountTokensRequest, MessagesRequest
from ..records.generate_request import Chat, GenerateRequest
from ..records.model_names import ModelNames
from ..records.volatile_lines import AGENTS, VolatileLine, lines_of, settled
from ..tenants.tenant import Tenant
from .context_edits import ContextEdits, ignored_edits, read_edits
from .message_answer import MessageAnswer, MessageReports
from .messages_body import chat_body, conversation, lifetimes, most_tokens, previous_message, session, thinking_of

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

if TYPE_CHECKING:
    from ..http.body_files import BodyFiles


@dataclass(frozen=True, slots=True)
class MessagesApi:
    """Reads bodies of the endpoint and makes its answers. A body becomes that of a chat, which is the same request."""

    reader: BodyReader
    chats: ChatApi
    event_ids = IdKind.NUMBER

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


_TURN = frozenset({"role", "content"})
_TOOL = frozenset({"type", "name", "description", "input_schema", "strict", "cache_control"})
_METADATA = frozenset({"user_id"})
_THINKING = frozenset({"type", "budget_tokens"})
_OUTPUT = frozenset({"effort", "format"})
_CHOICE = frozenset({"type", "name", "disable_parallel_tool_use"})
_BLOCKS: Mapping[str, frozenset[str]] = {
    "text": frozenset({"type", "text", "cache_control"}),
    "tool_use": frozenset({"type", "id", "name", "input", "cache_control"}),
    "tool_result": frozenset({"type", "tool_use_id", "content", "is_error", "cache_control"}),
    "thinking": frozenset({"type", "thinking", "signature"}),
    "redacted_thinking": frozenset({"type", "data"}),
    "document": frozenset({"type", "source", "cache_control"}),
    "image": frozenset({"type", "source", "cache_control"}),
}
"""The members of a block that are read, or that only the service which made them can read."""


def ignored_in_message(fields: MessagesRequest, *, keeps_budget: bool) -> tuple[str, ...]:
    """Return the members of a request that have no effect, each once. The request was checked.

    ``keeps_budget``: whether a budget of thinking is kept.
    """
    found = [*_in_blocks("system[]", fields.system), *ignored_members("messages[]", fields.messages, _TURN)]
    for turn in fields.messages:
        found += _in_blocks("messages[].content[]", turn.get("content"))
    found += ignored_members("tools[]", fields.tools or (), _TOOL)
    if fields.metadata:
        found += ignored_members("metadata", (fields.metadata,), _METADATA)
    found += ignored_members("tool_choice", (fields.tool_choice,), _CHOICE)
    found += ignored_members(
        "thinking", (fields.thinking,), _THINKING if keeps_budget else _THINKING - {"budget_tokens"}
    )
    found += ignored_members("output_config", (fields.output_config,), _OUTPUT)
    return tuple(dict.fromkeys(found)) if found else ()


def _in_blocks(where: str, blocks: str | Sequence[Any] | None) -> Iterator[str]:
    if not isinstance(blocks, list):
        return
    for block in blocks:
        yield from ignored_members(where, (block,), _BLOCKS[block["type"]])
        if block["type"] == "tool_result":
            yield from _in_blocks(f"{where}.content[]", block.get("content"))


_TYPES: Mapping[int, str] = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    415: "invalid_request_error",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def error_body(error: errors.TokenloomError) -> dict[str, object]:
    """Return the JSON body of an error. The field that is wrong stands before the message."""
    message = error.message
    if isinstance(error, errors.ContextLengthExceeded):
        # Anthropic's clients shorten a conversation where they read these words. An error of another part has no
        # numbers.
        counts = f": {error.num_tokens} tokens > {error.max_tokens} maximum" if error.num_tokens else ""
        message = f"prompt is too long{counts}. {message}"
    elif error.field is not None and error.field not in message:
        message = f"{error.field}: {message}"
    return {"type": "error", "error": {"type": _TYPES.get(error.http_status, "api_error"), "message": message}}


ANTHROPIC = ErrorForm(error_body, event_name=b"error", id_header=b"request-id")


@dataclass(frozen=True, slots=True)
class CountTokens:
    """Counts the tokens of a conversation as the chat template writes it."""

    parser: BodyParser
    reader: BodyReader
    generator: Generator
    names: ModelNames
    max_body_bytes: int
    timeout: float
    """Seconds that a call may take."""
    volatile: Sequence[VolatileLine] | None = ()
    """As in :class:`.GenerationEndpoint`: what is counted is what ``/v1/messages`` would be given."""
    files: "BodyFiles | None" = None
    """As there, too."""

    async def __call__(self, exchange: HttpExchange) -> None:
        with await exchange.read_body(self.max_body_bytes, self.files) as received:
            lines, agent = self.volatile, exchange.headers.get(b"user-agent", b"")
            if lines is not None and agent.startswith(AGENTS):
                lines = lines_of(agent, lines)
            chat, edits = await self.parser.read(received.data, partial(self._chat, lines))

        async def encode(chat: Chat) -> TokenizedPrompt:
            return await self.generator.tokenize(chat, exchange.tenant, exchange.body.files)

        async with limited(self.timeout):
            prompt = await encode(chat) if edits is None else (await edits.run(chat, encode))[1]
        before = {} if edits is None else {"context_management": {"original_input_tokens": edits.num_tokens}}
        await exchange.respond(200, encode_json({"input_tokens": num_ids(prompt)} | before))

    def _chat(self, lines: Sequence[VolatileLine] | None, body: Body) -> tuple[Chat, ContextEdits | None]:
        self.names.find(body.get("model"))
        if lines:
            body, _ = settled(body, lines)
        fields = self.reader.read(body, CountTokensRequest)
        chat, reasoning = conversation(fields), thinking_of(fields.thinking)
        read = read_chat(
            chat["messages"],
            read_tools(chat.get("tools")),
            reasoning.get("chat_template_kwargs"),
            continue_final_message=chat.get("continue_final_message"),
        )
        return read, read_edits(fields.context_management)
