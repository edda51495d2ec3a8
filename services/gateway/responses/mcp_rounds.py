"""Runs a response whose model may call tools of MCP servers: it generates, runs the calls, gives the results to the
model, and goes on until the model answers."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

from tokenloom.request import errors
from tokenloom.request.errors import InvalidArgument
from tokenloom.services.runtime.telemetry.tracing import NO_HEADERS, Headers
from tokenloom.v1 import inference_pb2, output_processor_pb2

from ..assistant.message_plans import OutputReader
from ..encoding.sse import encode_json
from ..generation.generator import Generator
from ..generation.open_turn import OpenTurn
from ..generation.running_generation import RunningGeneration
from ..http.request_body import BodyParser
from ..mesh.collector import Delta, Outlet
from ..mesh.mesh_view import MeshLoad
from ..openai.body_reader import AnswerOptions
from ..records.generate_request import GenerateRequest
from ..records.request_ids import NEW, ResumeToken
from .mcp_servers import ServerSessions
from .mcp_tools import CallOutcome, Listing, McpFunction, McpTool, chosen, loosened, protocol_error
from .output_items import call_id_of
from .response_answer import McpRun, Step

MAX_ROUNDS = 32
"""After so many rounds with calls the model must answer without further ones."""
_CALLS_AT_ONCE = 8
_INVALID_PARAMS = -32602
_NOT_RUN = -32000

ReadRound = Callable[[dict[str, Any]], tuple[GenerateRequest, AnswerOptions]]


@dataclass(frozen=True, slots=True)
class McpGenerator:
    """Opens generations of several rounds; the endpoints use it as a :class:`Generator`.

    Attributes:
        read: Reads the chat of a round.
        parser: Its thread reads the chats, which may be long.
    """

    generator: Generator
    run: McpRun
    read: ReadRound
    parser: BodyParser

    @property
    def mesh_load(self) -> MeshLoad:
        """As :attr:`Generator.mesh_load`."""
        return self.generator.mesh_load

    @property
    def knows_engines(self) -> bool:
        """As :attr:`Generator.knows_engines`."""
        return self.generator.knows_engines

    def cancel(self, request_id: str, tenant: str) -> None:
        """As :meth:`Generator.cancel`."""
        self.generator.cancel(request_id, tenant)

    @asynccontextmanager
    async def open(
        self,
        request: GenerateRequest,
        trace_headers: Headers = NO_HEADERS,
        token: ResumeToken = NEW,
        *,
        outlives_call: bool = True,
    ) -> AsyncIterator[RunningGeneration]:
        """Run the rounds for the length of the ``async with``. Raises as :meth:`Generator.open`.

        ``outlives_call``: False for a response in the background, a repeat of which is known by its token already.
        """
        if token.fingerprint and outlives_call:  # a repeat would run the tools again, which may have effects
            message = "a response with tools of MCP servers can be neither resumed nor repeated by a key"
            raise InvalidArgument(f"{message}: its tools may have effects", "tools")
        seconds, num_bytes = self.generator.default_timeout, len(encode_json(self.run.turns))
        request = replace(request, prompts=())
        try:
            async with (
                asyncio.timeout(seconds),
                self.run.servers.sessions(self.run.tools, request.tenant.name, num_bytes) as sessions,
                AsyncExitStack() as held,
            ):
                # Answers read of a generation what `McpRounds` has, and nothing else.
                yield cast(RunningGeneration, McpRounds(self, sessions, request, trace_headers, held))
        except TimeoutError:
            raise errors.DeadlineExceeded(f"the request took longer than {seconds:g} s") from None


class McpRounds:
    """Generates round by round, in the place of one generation. Between two rounds it holds no place of requests."""

    num_outputs = 1
    """As :class:`RunningGeneration` has it."""

    def __init__(
        self,
        opener: McpGenerator,
        sessions: ServerSessions,
        request: GenerateRequest,
        trace_headers: Headers,
        held: AsyncExitStack,
    ) -> None:
        """``request``: what every round has of the first one's. ``held``: holds the present round."""
        self.request_id = opener.run.response_id
        self.turn: OpenTurn | None = None  # of the first round, which continues what the client has
        self._opener = opener
        self._run = opener.run
        self._sessions = sessions
        self._request = request
        self._trace_headers = trace_headers
        self._held = held
        self._round: RunningGeneration | None = None
        self._steps: AsyncIterator[Step] | None = None
        self._definitions: list[Mapping[str, Any]] = []
        self._num_rounds = self._num_calls = 0
        self._used = inference_pb2.Usage()  # by the rounds that have ended
        self._is_over = False

    @property
    def done(self) -> bool:
        """Whether the model has answered, and the answer was taken."""
        has_ended = self._round is not None and self._round.done and self._steps is None
        return self._is_over or (has_ended and not self._run.items.to_run)

    @property
    def finished(self) -> dict[int, output_processor_pb2.RequestFinished]:
        """How the last round ended."""
        assert self._round is not None
        return self._round.finished

    @property
    def usage(self) -> inference_pb2.Usage:
        """The tokens of all rounds."""
        return _sum(self._used, self._round.usage) if self._round is not None else self._used

    def count(self, delta: Delta) -> None:
        """As :meth:`RunningGeneration.count`."""
        assert self._round is not None
        self._round.count(delta)

    async def take(self, outlet: Outlet | None = None) -> Sequence[Delta]:
        """Return what comes next: output, or a step between two rounds. Raises what ended a round early."""
        while self._round is None or self._round.done:
            if self._steps is None:
                self._steps = self._begin() if self._round is None else self._go_on()
            if (step := await anext(self._steps, None)) is not None:
                return [step]
            self._steps = None
            if self._is_over:
                return []
        return await self._round.take(outlet)

    async def _begin(self) -> AsyncIterator[Step]:
        """List the tools, run what the client has approved, and open the first round."""
        run = self._run
        for tool, listing in zip(run.tools, await self._list_all(), strict=True):
            functions = self._offer(tool, listing)
            if tool.label not in run.listed or listing.error is not None:
                yield Step(0, 0, make=partial(run.items.list_tools, tool.label))
                names = {function.tool for function in functions}
                seen = [each for each in listing.tools if each["name"] in names]
                yield Step(0, 0, make=partial(run.items.end_list, listing, seen))
        for approval in run.approvals:
            if approval.is_given:
                function = run.items.hosted.get(approval.name) or McpFunction.of_name(approval.name)
                begin = partial(run.items.add_approved, approval.call_id, function, approval.arguments)
                yield Step(0, 0, make=begin)
            else:
                approval.turn["content"] = f"The user did not approve this call. {approval.reason}".rstrip()
        results = {approval.call_id: approval.turn for approval in run.approvals}
        async for step, call_id, outcome in self._run_calls():
            results[call_id]["content"] = outcome.text
            yield step
        await self._open_round()

    def _offer(self, tool: McpTool, listing: Listing) -> list[McpFunction]:
        """Let the model call a server's tools, and return them. Of those with one name in the chat it has the client's
        own function, or the first: a call of one must not run another, for which no approval is needed."""
        hosted, functions = self._run.items.hosted, list[McpFunction]()
        own = {each["function"]["name"] for each in self._run.functions}
        for function, definition in tool.functions(listing):
            if function.name not in hosted and function.name not in own:
                hosted[function.name] = function
                functions.append(function)
                self._definitions.append(definition)
        return functions

    async def _go_on(self) -> AsyncIterator[Step]:
        """Run the calls of a round; open the next one, unless the client has to act first."""
        run, first = self._run, self._run.num_in_turns
        run.turns.append(run.items.turn(first))
        waits = any(item["type"] in ("function_call", "mcp_approval_request") for item in run.items.items[first:])
        async for step, call_id, outcome in self._run_calls():
            run.turns.append({"role": "tool", "tool_call_id": call_id, "content": outcome.text})
            yield step
        run.num_in_turns = len(run.items.items)
        if waits:
            self._is_over = True
        else:
            await self._open_round()

    async def _list_all(self) -> Sequence[Listing]:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._sessions.list_tools(tool.label)) for tool in self._run.tools]
        return [task.result() for task in tasks]

    async def _run_calls(self) -> AsyncIterator[tuple[Step, str, CallOutcome]]:
        """Run the calls that have no result yet, some at a time; yield each with its result, in order."""
        items = tuple(self._run.items.to_run)
        at_once = asyncio.Semaphore(_CALLS_AT_ONCE)

        async def outcome_of(item: Mapping[str, Any], *, is_allowed: bool) -> CallOutcome:
            async with at_once:
                return await self._call(item, is_allowed=is_allowed)

        async with asyncio.TaskGroup() as group:
            tasks = []
            for item in items:
                self._num_calls += 1
                is_allowed = self._num_calls <= self._run.most_calls
                tasks.append(group.create_task(outcome_of(item, is_allowed=is_allowed)))
        for item, task in zip(items, tasks, strict=True):
            outcome = task.result()
            yield Step(0, 0, make=partial(self._run.items.end_call, item, outcome)), call_id_of(item), outcome

    async def _call(self, item: Mapping[str, Any], *, is_allowed: bool) -> CallOutcome:
        if not is_allowed:
            return CallOutcome(
                error=protocol_error(_NOT_RUN, f"more than {self._run.most_calls} calls; it was not run")
            )
        label, name = item["server_label"], item["name"]
        if McpFunction(label, name).name not in self._run.items.hosted:
            return CallOutcome(error=protocol_error(_INVALID_PARAMS, f"the server offers no tool {name[:64]!r}"))
        try:
            arguments = json.loads(item["arguments"] or "{}")
        except ValueError:
            arguments = None
        if not isinstance(arguments, dict):
            return CallOutcome(error=protocol_error(_INVALID_PARAMS, "the arguments are no JSON object"))
        return await self._sessions.call(label, name, arguments)

    async def _open_round(self) -> None:
        """Open the generation of the next round, after the present one has given back what it holds."""
        run, opener = self._run, self._opener
        if self._round is not None:
            self._used = _sum(self._used, self._round.usage)
            self._round = None
            await self._held.aclose()
        self._num_rounds += 1
        run.num_in_turns = len(run.items.items)
        read, options = await opener.parser.run(partial(opener.read, {**run.chat_with_turns(), **self._tools()}))
        first = self._request
        left = first.most_tokens and max(first.most_tokens - self._used.completion_tokens, 1)
        request = replace(
            read,
            adapter=first.adapter,
            is_sheddable=first.is_sheddable,
            data_parallel_rank=first.data_parallel_rank,
            most_tokens=left,
            session=first.session,
            keep_seconds=first.keep_seconds,
            answer=first.answer,
            compared=first.compared if self.turn is None else None,
        )
        opened = opener.generator.open(request, self._trace_headers, outlives_call=False)
        generation = self._round = await self._held.enter_async_context(opened)
        self.turn = self.turn or generation.turn
        is_open, may_reason = generation.opens_reasoning, generation.may_reason
        run.reader = OutputReader(options.plan, reasoning_is_open=is_open, may_reason=may_reason)

    def _tools(self) -> dict[str, Any]:
        """Return the fields of a chat about tools."""
        run = self._run
        if not (tools := [*run.functions, *self._definitions]):
            return {}
        choice = chosen(run.choice, run.items.hosted.values())
        if self._num_rounds > MAX_ROUNDS or self._num_calls >= run.most_calls:
            choice = "none"
        elif self._num_rounds > 1:
            choice = loosened(choice)  # a choice that forces a call would force one in every round
        return {"tools": tools, "tool_choice": choice, "parallel_tool_calls": run.parallel}


def _sum(one: inference_pb2.Usage, other: inference_pb2.Usage) -> inference_pb2.Usage:
    return inference_pb2.Usage(
        prompt_tokens=one.prompt_tokens + other.prompt_tokens,
        cached_tokens=one.cached_tokens + other.cached_tokens,
        cache_write_tokens=one.cache_write_tokens + other.cache_write_tokens,
        completion_tokens=one.completion_tokens + other.completion_tokens,
        reasoning_tokens=one.reasoning_tokens + other.reasoning_tokens,
    )
