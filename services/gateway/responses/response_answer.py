"""Shapes an answer of OpenAI's Responses API: an object with items, whole or as events."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from tokenloom.request.errors import Unavailable
from tokenloom.v1 import inference_pb2
from tokenloom.v1.inference_pb2 import MissCause

from ..assistant.message_plans import OutputReader
from ..encoding.sse import KEEP_ALIVE, cache_miss, encode_json
from ..generation.open_turn import OpenTurn
from ..generation.running_generation import RunningGeneration
from ..mesh.collector import Delta
from ..openai.answer import finish_reason, origin_members
from ..openai.body_reader import AnswerOptions
from .input_items import Turn, compaction
from .mcp_servers import McpServers
from .mcp_tools import Approval, McpTool
from .output_items import OutputItems
from .response_store import ResponseStore, StoredResponse

_STATUSES = {"stop": "completed", "length": "incomplete", "repetition": "incomplete", "abort": "failed"}
_REASONS: Mapping[MissCause, str] = {
    inference_pb2.MISS_CAUSE_ADAPTER_CHANGED: "model_changed",
    inference_pb2.MISS_CAUSE_TOOLS_CHANGED: "tools_changed",
    inference_pb2.MISS_CAUSE_MESSAGE_CHANGED: "input_changed",
    inference_pb2.MISS_CAUSE_VOLATILE_LINE: "input_changed",
    inference_pb2.MISS_CAUSE_REASONING_DROPPED: "input_changed",
    inference_pb2.MISS_CAUSE_BLANKS_CHANGED: "input_changed",
    inference_pb2.MISS_CAUSE_ARGUMENTS_RESERIALISED: "input_changed",
}
"""The API's words for what a client changed; others are ``unavailable`` there."""
ABORTED = {"code": "server_error", "message": "the server ended the answer before it was complete; ask again"}
"""The error of a response whose generation was aborted. It keeps the output so far."""


@dataclass(slots=True)
class McpRun:
    """Holds what the rounds of a response share whose model may call tools of MCP servers.

    Attributes:
        response_id: The id of the response.
        servers: Where the tools are.
        tools: Those of the request whose server is named.
        chat: The chat that is asked for, without the conversation, the tools and the choice.
        functions: The client's own functions, as a chat has them.
        choice: The client's choice among all of them.
        parallel: Whether several calls may be made at once; None: they may.
        turns: The conversation without the instructions; it grows with each round.
        approvals: Of calls of the conversation.
        listed: The labels whose tools the conversation lists already.
        most_calls: Calls that may be run.
        items: The output.
        num_in_turns: How many of the items the conversation has.
        reader: Reads the output of the present round.
    """

    response_id: str
    servers: McpServers
    tools: Sequence[McpTool]
    chat: dict[str, Any]
    functions: Sequence[Mapping[str, Any]]
    choice: object
    parallel: bool | None
    turns: list[Turn]
    approvals: Sequence[Approval]
    listed: frozenset[str]
    most_calls: int
    items: OutputItems
    num_in_turns: int = 0
    reader: OutputReader | None = None

    def chat_with_turns(self) -> dict[str, Any]:
        """Return the chat of the next round, without tools."""
        return {**self.chat, "messages": [*self.chat["messages"], *self.turns]}


class Previous(msgspec.Struct):
    """What a response continues: a response or a conversation that is kept by the gateway which began it.

    Attributes:
        name: Its id.
        turns: Its turns or items.
        session: As in ``StoredResponse``.
    """

    name: str
    turns: Sequence[Turn]
    session: str = ""


class Recipe(msgspec.Struct):
    """What another gateway needs to shape a response in the background, or one that continues another, in JSON.

    Attributes:
        body: Of the client's request.
        response_id, created: As in ``ResponseRequest``.
        previous: What it continues; None: nothing.
        session: The name of its session, whether body or header has it.
        rank: As ``GenerateRequest.data_parallel_rank``.
    """

    body: dict[str, Any]
    created: int
    response_id: str = ""
    previous: Previous | None = None
    session: str = ""
    rank: int | None = None


class Step(Delta):
    """What the gateway did between two rounds, in the place of output. ``make`` is called once, in order: it changes
    the items and returns the events of that."""

    make: Callable[[], bytes] = bytes


@dataclass(frozen=True, slots=True)
class ResponseRequest:
    """Holds what an answer needs of its request.

    Attributes:
        response_id: The id of the response.
        created: When it was asked for, in seconds since 1970.
        echo: The members of the response that repeat the request.
        turns: The conversation without the instructions.
        session: The name of its session: the client's, or the id of its first response; empty: it may begin one.
        tenant: Name of the client's tenant.
        is_background: Whether the client asks for the response later.
        is_stored: Whether later requests may refer to the response.
        namespaced: The namespace and the own name of each function in a namespace, by its name in the chat.
        mcp: How the tools of MCP servers are run; None: the request names none that the operator names too.
        conversation: The id of the conversation object that the response belongs to; empty: to none.
        items: What the request adds to that object, or the user's messages that a compaction keeps.
        compared: The id of the response with whose prompt the client compares this one; None: with none.
        recipe: For other gateways; None: the response ends with this gateway, or was begun.
    """

    response_id: str
    created: int
    echo: Mapping[str, Any]
    turns: Sequence[Turn]
    session: str
    tenant: str
    is_background: bool
    is_stored: bool
    namespaced: Mapping[str, tuple[str, str]]
    mcp: McpRun | None = None
    conversation: str = ""
    items: Sequence[dict[str, Any]] = ()
    compared: str | None = None
    recipe: Recipe | None = None

    def diagnostics(self, turn: OpenTurn | None) -> dict[str, object]:
        """Return why the cache could not reuse the prompt of the compared response, as a member; empty if the client
        did not ask for it."""
        if self.compared is None:
            return {}
        return {"prompt_cache_diagnostics": self._compared(turn)}

    def _compared(self, turn: OpenTurn | None) -> dict[str, object]:
        if turn is None:
            return {"type": "unavailable"}
        if not turn.is_compared_with(self.compared or ""):
            return {"type": "comparison_response_not_found"}
        if (difference := turn.difference()) is None:
            return {"type": "cache_hit"}
        if (reason := _REASONS.get(difference.cause)) is None:
            return {"type": "unavailable"}
        counts = {"cache_missed_tokens": difference.missed_tokens, "comparison_reusable_tokens": turn.common}
        return {"type": "cache_miss", "reason": reason, **counts}


class ResponseAnswer:
    """Shapes a response, and stores it when it is complete."""

    def __init__(
        self, generation: RunningGeneration, options: AnswerOptions, request: ResponseRequest, store: ResponseStore
    ) -> None:
        self._generation = generation
        self._request = request
        self._store = store
        self._items = OutputItems(generation.request_id, request.namespaced)
        self._head = head_of(request)
        is_open, may_reason = generation.opens_reasoning, generation.may_reason
        self._reader = OutputReader(options.plan, reasoning_is_open=is_open, may_reason=may_reason)
        self._number = 0 if options.resumed is None else options.resumed.number

    def first_events(self) -> bytes:
        """Return the events before any output."""
        begun = response_of(self._head, "in_progress")
        event = self._items.events.event
        return event("response.created", response=begun) + event("response.in_progress", response=begun)

    def events(self, delta: Delta) -> bytes:
        """Return the events of some output; empty while nothing is certain."""
        return self._items.add(self._reader.feed(delta.text, ends=delta.finished is not None))

    def last_events(self) -> bytes:
        """Return the events after all output."""
        ended = self._items.end(_item_status(self._status()))
        response = self.complete()
        return ended + self._items.events.event(f"response.{response['status']}", response=response)

    def failed_event(self, response: dict[str, Any]) -> bytes:
        """Return the event that ends a stream whose response has failed."""
        return self._items.events.event("response.failed", response=response)

    def keep_alive(self) -> bytes:
        return KEEP_ALIVE

    def repeat(self, delta: Delta) -> None:
        """Take note of output that the client has."""
        self.events(delta)
        # How many events it came in depends on how it was cut into deltas there.
        self._items.events.go_on(self._number)

    def is_large(self, delta: Delta) -> bool:
        """Return False: the API has no log probabilities, which alone take long to shape."""
        return False

    def shape(self, delta: Delta) -> Iterator[int]:
        """Return nothing: no delta is large."""
        return iter(())

    def add(self, delta: Delta) -> None:
        """Keep some output for :meth:`body`."""
        self._items.add(self._reader.feed(delta.text, ends=delta.finished is not None))

    def body(self) -> Iterator[bytes]:
        """Return the whole JSON response."""
        yield encode_json(self.complete())

    def complete(self) -> dict[str, Any]:
        """Return the response, and store it if the client wants that."""
        status = self._status()
        self._items.end(_item_status(status))
        details = {"reason": "max_output_tokens"} if status == "incomplete" else None
        ending: dict[str, Any] = {"output": self._items.items, "incomplete_details": details, "usage": self._usage()}
        if status == "failed":
            ending["error"] = ABORTED
        ending |= self._request.diagnostics(self._generation.turn) | origin_members(self._generation.finished[0])
        response = response_of(self._head, status, **ending)
        if self._request.is_stored:
            self._store.put(self._stored(response))
        if self._request.conversation and status != "failed":
            added = [*self._request.items, *self._items.items]
            self._store.append(self._request.conversation, self._request.tenant, added)
        return response

    def _stored(self, response: dict[str, Any]) -> StoredResponse:
        turns = [*self._request.turns, self._items.turn()]
        return StoredResponse(self._request.tenant, response, turns, self._request.session)

    def _status(self) -> str:
        return _STATUSES[finish_reason(self._generation.finished[0])]

    def _usage(self) -> dict[str, object]:
        usage = self._generation.usage
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {
                "cached_tokens": usage.cached_tokens,
                "cache_write_tokens": usage.cache_write_tokens,
                **cache_miss(usage),
            },
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }


class CompactAnswer(ResponseAnswer):
    """Shapes a compaction: the user's messages, and a summary of the conversation as the model wrote it."""

    def body(self) -> Iterator[bytes]:
        """Return the whole JSON response. Raises ``Unavailable`` if the generation was aborted."""
        response = self.complete()
        if response["status"] == "failed":
            raise Unavailable(ABORTED["message"])
        texts = [item["content"][0]["text"] for item in response["output"] if item["type"] == "message"]
        name = self._request.response_id.removeprefix("resp_")
        answer = {
            "id": self._request.response_id,
            "object": "response.compaction",
            "created_at": self._request.created,
            "output": [*self._request.items, compaction(f"cmp_{name}", "".join(texts))],
            "usage": response["usage"],
        }
        yield encode_json(answer)


class McpAnswer(ResponseAnswer):
    """Shapes a response of several rounds."""

    def __init__(
        self, generation: RunningGeneration, request: ResponseRequest, run: McpRun, store: ResponseStore
    ) -> None:
        self._generation = generation
        self._request = request
        self._store = store
        self._run = run
        self._items = run.items
        self._head = head_of(request)

    def events(self, delta: Delta) -> bytes:
        """Return the events of some output, or of a step between two rounds."""
        if isinstance(delta, Step):
            return delta.make()
        reader = self._run.reader
        assert reader is not None
        events = self._items.add(reader.feed(delta.text, ends=delta.finished is not None))
        if delta.finished is None:
            return events
        # The last call of a round is to be run only if it is complete.
        return events + self._items.end(_item_status(_STATUSES[finish_reason(delta.finished)]))

    def add(self, delta: Delta) -> None:
        """Keep some output for :meth:`body`."""
        self.events(delta)

    def _stored(self, response: dict[str, Any]) -> StoredResponse:
        run = self._run
        ended = run.num_in_turns == len(run.items.items)
        turns = run.turns if ended else [*run.turns, run.items.turn(run.num_in_turns)]
        listed = run.listed | {tool.label for tool in run.tools}
        return StoredResponse(self._request.tenant, response, turns, self._request.session, listed=listed)


def _item_status(status: str) -> str:
    """Return the status of the last item of a response that has ended."""
    return "completed" if status == "completed" else "incomplete"


def head_of(request: ResponseRequest) -> dict[str, Any]:
    """Return the members of a response that never change."""
    head = {"id": request.response_id, "object": "response", "created_at": request.created}
    return head | {"background": request.is_background, "store": request.is_stored} | dict(request.echo)


def response_of(head: Mapping[str, Any], status: str, **members: Any) -> dict[str, Any]:
    """Return a response in some state."""
    empty: dict[str, Any] = {"error": None, "incomplete_details": None, "output": [], "usage": None}
    return {**head, "status": status, **empty, **members}
