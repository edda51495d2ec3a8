"""``/v1/responses``: reads bodies and shapes answers."""

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from tokenloom.request.errors import InvalidArgument
from tokenloom.request.narrowing import narrow_int

from ..generation.running_generation import RunningGeneration
from ..openai.body_reader import AnswerOptions, Body, BodyReader, ignored_members, inherited, renamed_twice
from ..openai.chat import ChatApi
from ..openai.event_ids import IdKind
from ..openapi.request_schemas import ResponsesRequest
from ..records.cache_marks import OPTIONS, comparison
from ..records.generate_request import Chat, GenerateRequest
from ..records.model_names import ModelNames
from ..tenants.tenant import Tenant
from .function_tools import is_left_out, namespaced
from .input_items import Turn, items_of, read_input
from .mcp_servers import MAX_CALLS, McpServers
from .mcp_tools import McpTool, read_approvals, shown
from .output_items import OutputItems
from .response_answer import CompactAnswer, McpAnswer, McpRun, Previous, Recipe, ResponseAnswer, ResponseRequest
from .response_store import CONVERSATION, ResponseStore, StoredResponse

if TYPE_CHECKING:
    from ..records.media import AnyFile, FindStored


from ..openai.body_reader import SAMPLING_FIELDS
from ..records.cache_marks import openai_seconds
from .function_tools import tools_of

_REFUSED: Mapping[str, tuple[object, str]] = {
    "prompt": (None, "templates of prompts are not stored"),
    "top_logprobs": (0, "this API returns no log probabilities here; use /v1/chat/completions"),
}
"""Fields that may only be null or have one other value, and what to do instead."""


def chat_body(body: Body, fields: ResponsesRequest, turns: Sequence[Turn]) -> dict[str, Any]:
    """Return the chat that a body asks for, in the spelling of :class:`ChatApi`. Raises ``InvalidArgument``.

    ``turns``: the whole conversation, without the instructions.
    """
    for name, (neutral, advice) in _REFUSED.items():
        if getattr(fields, name) not in (None, neutral):
            raise InvalidArgument(f"{name} is not supported; {advice}", name)
    if fields.truncation not in (None, "auto", "disabled"):
        raise InvalidArgument("truncation must be auto or disabled", "truncation")
    chat: dict[str, Any] = {name: body[name] for name in body.keys() & (SAMPLING_FIELDS - {"max_tokens"})}
    chat["messages"] = [{"role": "system", "content": fields.instructions}] if fields.instructions else []
    chat["messages"] += turns
    chat["stream"] = fields.stream
    chat["response_format"] = _response_format(fields.text)
    return chat | tools_of(fields) | _reasoning(fields.reasoning)


def most_tokens(fields: ResponsesRequest) -> int:
    """Return the most tokens that the client accepts, which may exceed what the prompt leaves of the context; 0: it
    names no limit. Raises ``InvalidArgument``."""
    limit = fields.max_output_tokens
    return 0 if limit is None else narrow_int("max_output_tokens", limit, 1, 2**32 - 1)


def keep_seconds(fields: ResponsesRequest) -> int:
    """Return for how long the client wants the prompt kept in the cache; 0: it does not say. Raises
    ``InvalidArgument``."""
    items = fields.input if isinstance(fields.input, list) else ()
    parts = (
        (f"input[{index}].{member}", item.get(member))
        for index, item in enumerate(items)
        for member in ("content", "output")
    )
    return openai_seconds(fields.prompt_cache_options, parts)


def _reasoning(reasoning: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the variables of the chat template, which has the say over what an effort means."""
    effort = None if reasoning is None else reasoning.get("effort")
    if effort is None:
        return {}
    if not isinstance(effort, str):
        raise InvalidArgument("reasoning.effort must be a string", "reasoning.effort")
    switch = {"enable_thinking": False} if effort == "none" else {}
    return {"chat_template_kwargs": {"reasoning_effort": effort, **switch}}


def _response_format(text: Mapping[str, Any] | None) -> dict[str, Any] | None:
    form = None if text is None else text.get("format")
    if form is None:
        return None
    if not isinstance(form, dict):
        raise InvalidArgument("text.format must be an object", "text.format")
    if form.get("type") != "json_schema":
        return form
    names = ("name", "schema", "strict")
    return {"type": "json_schema", "json_schema": {name: form[name] for name in names if form.get(name) is not None}}


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
    servers: McpServers | None
    """The MCP servers that the operator names; None: none."""
    uploads: "Callable[[str], FindStored] | None" = None
    """Returns what finds the uploaded files of a tenant; None: the gateway keeps none."""
    is_held: bool = False
    """Whether other gateways continue the responses of this one."""
    event_ids = IdKind.NUMBER

    def read(self, body: Body, tenant: Tenant) -> tuple[GenerateRequest, AnswerOptions]:
        """Return what the body asks for. Raises :class:`InvalidArgument` naming the field, and
        :class:`errors.NotFound` for a previous response that is not stored."""
        fields = self.reader.read(body, ResponsesRequest)
        hosted = {} if self.servers is None else self.servers.tools_of(fields, tenant.name)
        request = self._request(body, fields, tenant)
        images: dict[bytes, AnyFile] = {}
        if any(isinstance(turn.get("content"), list) for turn in request.turns):
            images = _named(request.turns, None if self.uploads is None else self.uploads(tenant.name))
        longest = most_tokens(fields)
        chat = chat_body(body, fields, request.turns)
        if hosted:
            request = replace(request, mcp=self._mcp_run(fields, request, hosted, chat, tenant))
        generate_request, options = self.read_chat(chat, tenant)
        ignored = (*ignored_in_response(fields, hosted), *self.reader.ignored(body, ResponsesRequest))
        if options.ignored:
            ignored += inherited(options.ignored, _FIELDS)
        generate_request = replace(
            generate_request,
            most_tokens=longest,
            session=request.session,
            keep_seconds=keep_seconds(fields),
            answer=request.response_id,
            compared=request.compared,
        )
        if isinstance(generate_request.prompts, Chat) and generate_request.prompts.media:
            generate_request = _with_files(generate_request, images, is_kept=self.store.is_on)
        elif not hosted and (request.is_background or (self.is_held and _continues(fields))):
            # Not with tools: a second run of them might have effects.
            request = replace(request, recipe=self._recipe(body, fields, request))
        return generate_request, replace(
            options, request=request, ignored=ignored, field_names=renamed_twice(options.field_names, _FIELDS)
        )

    def read_chat(self, chat: Body, tenant: Tenant) -> tuple[GenerateRequest, AnswerOptions]:
        """Return what a chat asks for that stands for a response, or for one of its rounds. Raises as :meth:`read`."""
        try:
            return self.chats.read(chat, tenant)
        except InvalidArgument as error:
            raise error.renamed(_FIELDS) from None

    def answer(self, generation: RunningGeneration, options: AnswerOptions) -> ResponseAnswer:
        assert isinstance(options.request, ResponseRequest)
        if (run := options.request.mcp) is not None:
            return McpAnswer(generation, options.request, run, self.store)
        return ResponseAnswer(generation, options, options.request, self.store)

    def _request(self, body: Body, fields: ResponsesRequest, tenant: Tenant) -> ResponseRequest:
        is_background = bool(fields.background)
        is_stored = self.store.is_on and fields.store is not False
        if is_background and not is_stored:
            raise InvalidArgument("background needs a stored response", "background")
        echo = {name: getattr(fields, name) for name in _ECHOED} | {"model": self.names.answers_as(body.get("model"))}
        echo["tools"] = shown(fields.tools or ())
        echo |= {name: value for name, value in _DEFAULTS.items() if echo[name] is None}
        echo |= {name: default if body.get(name) is None else body[name] for name, default in _ECHOED_SAMPLING.items()}
        turns, session = self._turns(fields, tenant)
        if conversation := _conversation(fields):
            echo["conversation"] = {"id": conversation}
        if fields.prompt_cache_options is not None:
            echo[OPTIONS] = {"mode": "implicit", "ttl": "30m", **fields.prompt_cache_options}
        return ResponseRequest(
            response_id=f"resp_{uuid4().hex}",
            created=int(time.time()),
            echo=echo,
            turns=turns,
            session=fields.prompt_cache_key or session,
            tenant=tenant.name,
            is_background=is_background,
            is_stored=is_stored,
            namespaced=namespaced(fields),
            conversation=conversation,
            items=items_of(fields.input) if conversation else (),
            compared=comparison(fields.prompt_cache_options),
        )

    def _recipe(self, body: Body, fields: ResponsesRequest, request: ResponseRequest) -> Recipe:
        """Return what another gateway needs to shape the response."""
        previous, tenant = None, request.tenant
        if name := request.conversation or fields.previous_response_id:
            kept = self.store.get(name, tenant)
            previous = Previous(name, [*kept.turns], kept.session)
        return Recipe(dict(body), request.created, previous=previous)

    def reading(self, recipe: Recipe, tenant: str) -> "ResponsesApi":
        """Return the same API, which finds what the response of a recipe continues, and nothing else."""
        store = ResponseStore(sys.maxsize, is_shared=False)
        if (previous := recipe.previous) is not None:
            store.put(StoredResponse(tenant, {"id": previous.name}, previous.turns, previous.session))
        return replace(self, store=store, servers=None)

    def _mcp_run(
        self,
        fields: ResponsesRequest,
        request: ResponseRequest,
        hosted: Mapping[int, McpTool],
        chat: dict[str, Any],
        tenant: Tenant,
    ) -> McpRun:
        """Return how a response with tools of MCP servers is run, and take the choice of tools out of its chat: what it
        names is known only when the servers have listed their tools."""
        assert self.servers is not None
        choice = chat.pop("tool_choice", None)
        turns = [*request.turns]
        items = fields.input if isinstance(fields.input, list) else ()
        listed = {str(item.get("server_label")) for item in items if item.get("type") == "mcp_list_tools"}
        if fields.previous_response_id is not None:
            listed |= self.store.get(fields.previous_response_id, tenant.name).listed
        if request.conversation:
            kept = self.store.get(request.conversation, tenant.name, "conversation").turns
            listed |= {item["server_label"] for item in kept if item.get("type") == "mcp_list_tools"}
        most_calls = fields.max_tool_calls
        return McpRun(
            response_id=request.response_id,
            servers=self.servers,
            tools=[*hosted.values()],
            chat={**chat, "messages": chat["messages"][: len(chat["messages"]) - len(turns)]},
            functions=chat.get("tools", ()),
            choice=fields.tool_choice if choice is None else choice,
            parallel=fields.parallel_tool_calls,
            turns=turns,
            approvals=read_approvals(fields.input, turns),
            listed=frozenset(listed),
            most_calls=MAX_CALLS if most_calls is None else narrow_int("max_tool_calls", most_calls, 0, MAX_CALLS),
            items=OutputItems(request.response_id.removeprefix("resp_"), request.namespaced),
        )

    def _turns(self, fields: ResponsesRequest, tenant: Tenant) -> tuple[list[Turn], str]:
        """Return the whole conversation and the session of the response that it continues; empty: it continues none."""
        new = read_input(fields.input)
        if conversation := _conversation(fields):
            if fields.previous_response_id is not None:
                message = "conversation and previous_response_id exclude each other"
                raise InvalidArgument(message, "conversation")
            kept = self.store.get(conversation, tenant.name, "conversation").turns
            return read_input([*kept, *items_of(fields.input)]), conversation
        if fields.previous_response_id is None:
            return new, ""
        field = "previous_response_id"
        if fields.previous_response_id.startswith(CONVERSATION):  # what it keeps are items, not turns
            raise InvalidArgument("previous_response_id is the id of a conversation: send it as conversation", field)
        previous = self.store.get(fields.previous_response_id, tenant.name, field)
        if previous.task is not None:
            raise InvalidArgument("the previous response has not ended", field)
        return [*map(_of_before, previous.turns), *new], previous.session or fields.previous_response_id


def _of_before(turn: Turn) -> Turn:
    """Return a turn of a stored response, whose images have the client's name of that."""
    content = turn.get("content")
    if not isinstance(content, list):
        return turn
    parts = [{**part, "field": "previous_response_id"} if "field" in part else part for part in content]
    return {**turn, "content": parts}


def _named(turns: Sequence[Turn], find: "FindStored | None") -> "dict[bytes, AnyFile]":
    """Name the images of turns by digest, as they are kept, and return the files that the client has sent or named
    now."""
    from ..records.media import name_by_digest  # here: most conversations have none

    return name_by_digest(turns, find)


def _with_files(request: GenerateRequest, files: "Mapping[bytes, AnyFile]", *, is_kept: bool) -> GenerateRequest:
    from ..records.media import with_files

    assert isinstance(request.prompts, Chat)
    chat = replace(request.prompts, media=with_files(request.prompts.media, files))
    return replace(request, prompts=chat, keeps_files=is_kept)


def _continues(fields: ResponsesRequest) -> bool:
    """Return whether a response needs what is stored at this gateway."""
    return fields.previous_response_id is not None or fields.conversation is not None


def _conversation(fields: ResponsesRequest) -> str:
    """Return the id of the conversation that a body names; empty: it names none. Raises ``InvalidArgument``."""
    named = fields.conversation
    found = named.get("id") if isinstance(named, dict) else named
    if named is None:
        return ""
    if not isinstance(found, str) or not found.startswith(CONVERSATION):
        raise InvalidArgument("conversation must be the id of a conversation, or an object with it", "conversation")
    return found


COMPACT = (
    "Write a summary of this conversation for the assistant who will continue it without the messages above: the task, "
    "what was done and decided, the files, commands and names that matter, and what is left to do. Write only that."
)
"""The last message of a conversation that is to be compacted."""


_NOT_COMPACTED = frozenset(
    {"stream", "background", "conversation", "tools", "tool_choice", "parallel_tool_calls", "max_tool_calls", "text"}
)
"""Fields of the client's turns without a meaning for a summary."""


@dataclass(frozen=True, slots=True)
class CompactApi:
    """``/v1/responses/compact``: the model writes a summary, which later requests send in place of the conversation."""

    responses: ResponsesApi
    event_ids = IdKind.NONE

    def read(self, body: Body, tenant: Tenant) -> tuple[GenerateRequest, AnswerOptions]:
        """Return what the body asks for. Raises as :meth:`ResponsesApi.read`."""
        own = body.get("input")
        if own is not None:
            read_input(own)
        before = [] if own is None else items_of(own)
        asked: dict[str, Any] = {"type": "message", "role": "user", "content": COMPACT}
        fixed = {"input": [*before, asked], "store": False}
        taken = {name: body[name] for name in body if name not in _NOT_COMPACTED}
        request, options = self.responses.read({**taken, **fixed}, tenant)
        left = tuple(name for name in body if name not in taken and body[name])
        assert isinstance(options.request, ResponseRequest)
        items = [item for item in before if item.get("role") == "user"]
        asked_for = replace(options.request, items=items)
        return request, replace(options, request=asked_for, ignored=(*options.ignored, *left))

    def answer(self, generation: RunningGeneration, options: AnswerOptions) -> CompactAnswer:
        assert isinstance(options.request, ResponseRequest)
        return CompactAnswer(generation, options, options.request, self.responses.store)


_WITHOUT_EFFECT = ("include", "max_tool_calls", "stream_options")
_REASONING = frozenset({"effort"})
_CACHE_OPTIONS = frozenset({"mode", "ttl", "comparison_response_id"})
_TEXT = frozenset({"format"})
_TOOL = frozenset({"type", "name", "description", "parameters", "strict"})
_NAMESPACE = frozenset({"type", "name", "tools"})
_MCP = frozenset(
    {"type", "server_label", "server_url", "server_description", "allowed_tools", "require_approval"}
    | {"headers", "authorization"}
)
_OF_ANY = frozenset({"type", "id", "status"})
_ITEMS: Mapping[str, frozenset[str]] = {
    "message": _OF_ANY | {"role", "content"},
    "reasoning": _OF_ANY | {"content", "summary"},
    "function_call": _OF_ANY | {"call_id", "name", "namespace", "arguments"},
    "function_call_output": _OF_ANY | {"call_id", "output"},
    "compaction": _OF_ANY | {"encrypted_content", "created_by"},
    "mcp_list_tools": _OF_ANY | {"server_label", "tools", "error"},
    "mcp_call": _OF_ANY | {"server_label", "name", "arguments", "output", "error", "approval_request_id"},
    "mcp_approval_request": _OF_ANY | {"server_label", "name", "arguments"},
    "mcp_approval_response": _OF_ANY | {"approval_request_id", "approve", "reason"},
}


def ignored_in_response(fields: ResponsesRequest, hosted: Mapping[int, McpTool]) -> tuple[str, ...]:
    """Return fields and members that have no effect, each once. The request was checked. ``hosted``: the tools that the
    gateway runs, by index."""
    found = [name for name in _WITHOUT_EFFECT if getattr(fields, name) and not (hosted and name == "max_tool_calls")]
    if fields.truncation == "auto":  # a longer input is refused all the same
        found.append("truncation")
    found += ignored_members("reasoning", (fields.reasoning,), _REASONING)
    found += ignored_members("text", (fields.text,), _TEXT)
    found += ignored_members(OPTIONS, (fields.prompt_cache_options,), _CACHE_OPTIONS)
    found += _in_tools(fields.tools or (), hosted)
    for item in fields.input if isinstance(fields.input, list) else ():
        found += ignored_members("input[]", (item,), _ITEMS[item.get("type", "message")])
    return tuple(dict.fromkeys(found)) if found else ()


def _in_tools(tools: Any, hosted: Mapping[int, McpTool]) -> Iterator[str]:
    for index, tool in enumerate(tools):
        if (run := hosted.get(index)) is not None:
            known = _MCP if run.takes_headers else _MCP - {"headers", "authorization"}
            yield from ignored_members("tools[]", (tool,), known)
        elif is_left_out(tool):
            yield f"tools[].{tool['type']}"
        elif tool.get("type") == "namespace":
            yield from ignored_members("tools[]", (tool,), _NAMESPACE)
            yield from ignored_members("tools[].tools[]", tool["tools"], _TOOL)
        else:
            yield from ignored_members("tools[]", (tool,), _TOOL)
