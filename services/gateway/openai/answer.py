"""Shapes the answers of OpenAI's API: what chats and completions have in common, and the whole of a chat's."""

import base64
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from tokenloom.request.routed_rows import to_npy
from tokenloom.v1 import inference_pb2, output_processor_pb2

from ..assistant.message_plans import CallDelta, MessagePlan, OutputReader, calls_of, reasoning_of, text_of
from ..encoding import sse
from ..encoding.sse import JsonBlocks, joined
from ..generation.running_generation import RunningGeneration
from ..mesh.collector import Delta
from ..metrics.gateway_metrics import FINISH_REASONS
from .body_reader import AnswerOptions
from .event_ids import CONTENT_ENDED, FINISHED, MAX_OUTPUTS, EventIds
from .openai_logprobs import TokenPosition, chat_entry, positions, prompt_entries

VALUES_PER_STEP = 512
"""Log probabilities that are shaped at a time, less than a millisecond."""
MANY_PARTS = 64
"""Log probabilities of more tokens are shaped in steps before the event that holds them."""


class AnswerBase:
    """Reads a generation in OpenAI's spelling; an answer holds one.

    Attributes:
        has_details: Whether an event without text may be worth sending.
        writer: Makes the events of the stream.
        ids: Makes the ids of the events; None: the client did not ask for them.
        resumed: What the client has of the answer, if it resumes it.
    """

    def __init__(
        self, generation: RunningGeneration, options: AnswerOptions, prefix: str, model: str, event_name: str
    ) -> None:
        """Args:
        prefix: Begins the answer's id.
        event_name: The ``object`` of the stream's events.
        """
        self.generation = generation
        self.options = options
        self.has_details = options.return_token_ids or options.continuous_usage or options.num_logprobs is not None
        self._id = f"{prefix}-{generation.request_id}"
        self._model = model
        self.resumed = options.resumed
        self._created = options.created or (int(time.time()) if self.resumed is None else self.resumed.created)
        self.ids: EventIds | None = None
        if options.event_ids and generation.num_outputs <= MAX_OUTPUTS:
            self.ids = EventIds(generation.request_id, self._created, generation.num_outputs)
            for index in () if self.resumed is None else self.resumed.entries:
                self.repeated(index)
        self.writer = sse.EventWriter(self._id, event_name, self._created, model, usage_is_null=options.include_usage)

    def head(self, object_name: str) -> dict[str, object]:
        return {"id": self._id, "object": object_name, "created": self._created, "model": self._model}

    def tail(self) -> dict[str, object]:
        """Return the usage and the last members."""
        members: dict[str, object] = {"usage": sse.usage_object(self.usage)}
        return members | self.last_members()

    def last_events(self) -> bytes:
        """Return the event that holds the usage, when asked for."""
        if not self.options.include_usage or (self.resumed is not None and self.resumed.usage_sent):
            return b""
        line = b"" if self.ids is None else self.ids.last_line()
        return line + self.writer.event(b"", sse.members(self.last_members()), self.usage)

    def repeated(self, index: int) -> None:
        """Take note that output which the client has was shaped once more."""
        if self.ids is not None and self.resumed is not None:
            self.ids.restore(self.resumed, index)

    def has_begun(self, index: int) -> bool:
        """Return whether the client of a resumed answer has an event of an output."""
        return self.resumed is not None and index in self.resumed.entries

    def has_content(self, index: int) -> bool:
        """Return whether the client of a resumed answer has all content of an output."""
        return self.resumed is not None and self.resumed.entries.get(index, "").endswith(CONTENT_ENDED)

    def last_members(self) -> dict[str, object]:
        """Return the timeline when asked for, and that engines of different kinds generated the output, if they did."""
        members: dict[str, object] = {}
        if any(finished.timeline.mixed_numerics for finished in self.generation.finished.values()):
            members["mixed_numerics"] = True
        if self.options.return_timeline:
            timeline = sse.timeline_object(self.generation.timeline, self.generation.total_ns)
            members["timeline"] = timeline | sse.cache_miss(self.generation.usage)
        return members

    @property
    def usage(self) -> inference_pb2.Usage:
        usage = self.generation.usage
        if self.options.echo_only:
            usage.completion_tokens = 0
            usage.ClearField("reasoning_tokens")
        return usage

    def usage_of(self, index: int) -> inference_pb2.Usage | None:
        """Return one output's own usage so far, when every event is to hold it."""
        if not self.options.continuous_usage:
            return None
        reasoning = self.generation.reasoning
        return inference_pb2.Usage(
            prompt_tokens=len(self.generation.prompt_of(index)),
            completion_tokens=self.generation.completion_tokens[index],
            reasoning_tokens=None if reasoning is None else reasoning.num_tokens(index),
        )

    def positions(self, delta: Delta) -> Iterator[TokenPosition]:
        """Return the log probabilities of a delta's tokens."""
        return positions(delta.logprobs, delta.token_ids, delta.token_index, self.options.num_logprobs or 0)

    def prompt_positions(self, index: int) -> Iterator[TokenPosition]:
        """Return the log probabilities of an output's prompt, from its second token on."""
        parts = self.generation.prompt_logprobs[index // self.generation.num_samples]
        top = parts[0].logprobs.top if parts else 0
        return positions(parts, self.generation.prompt_of(index), 0, top)

    def prompt_logprobs(self, index: int) -> Iterator[bytes]:
        """Return the same in vLLM's form as a member, with a comma before it; nothing unless the client asked for
        ``prompt_logprobs``."""
        if self.options.num_prompt_logprobs is not None:
            yield b',"prompt_logprobs":['
            yield from joined(prompt_entries(self.prompt_positions(index)))
            yield b"]"

    @property
    def is_plain(self) -> bool:
        """Whether the whole response has neither log probabilities nor many outputs, and is written at once."""
        options = self.options
        return options.num_logprobs is None and options.num_prompt_logprobs is None and self.generation.num_outputs <= 4

    def plain_body(self, object_name: str, choices: list[dict[str, object]], own: dict[str, object]) -> bytes:
        """Return the whole JSON response. ``own``: members after the choices."""
        return sse.encode_json(self.head(object_name) | {"choices": choices} | own | self.tail())

    def body(self, object_name: str, choices: Iterable[Iterator[bytes]], own: Iterable[bytes]) -> Iterator[bytes]:
        """Return the whole JSON response in blocks. ``own``: members after the choices, with a comma before each."""
        yield sse.encode_json(self.head(object_name))[:-1] + b',"choices":['
        is_first = True
        for blocks in choices:
            if not is_first:
                yield b","
            is_first = False
            yield from blocks
        yield b"]"
        yield from own
        yield sse.members(self.tail()) + b"}"

    def stop_reason(self, finished: output_processor_pb2.RequestFinished) -> str | int | None:
        """Return the client's stop string or stop token id that matched; None at an end of sequence."""
        reason = finished.stop_reason
        if reason in self.options.stop:
            return reason
        return int(reason) if reason.isdecimal() and int(reason) in self.options.stop_token_ids else None


def origin_members(finished: output_processor_pb2.RequestFinished) -> dict[str, object]:
    """Return what computed an output, as members: the version of the weights, whether engines of different kinds did,
    and the experts of its tokens, a ``.npy`` file in base64, if the client asked for them."""
    members: dict[str, object] = {}
    if finished.weights_version:
        members["weights_version"] = finished.weights_version
    if finished.timeline.mixed_numerics:
        members["mixed_numerics"] = True
    if finished.HasField("routed_experts"):
        members["routed_experts"] = base64.b64encode(to_npy(finished.routed_experts)).decode()
    return members


def choice_blocks(choice: dict[str, object], logprobs: Iterator[bytes]) -> Iterator[bytes]:
    """Return the JSON of a choice in blocks, without the closing brace. ``logprobs``: their JSON in blocks."""
    names = list(choice)
    after = names.index("logprobs")
    yield sse.encode_json({name: choice[name] for name in names[:after]})[:-1] + b',"logprobs":'
    yield from logprobs if choice["logprobs"] is not None else (b"null",)
    yield sse.members({name: choice[name] for name in names[after + 1 :]})


def finish_reason(finished: output_processor_pb2.RequestFinished) -> str:
    return FINISH_REASONS[finished.reason]


class ChatAnswer:
    """Shapes a conversation's next turn, in one sample or several."""

    def __init__(self, base: AnswerBase) -> None:
        self._base = base
        self._writer = base.writer
        self._live = base.generation.num_samples
        self._has_details = base.has_details or base.options.plan is not None
        # The token that ends an output is not part of its text, so it has no entry, as in OpenAI's API.
        self._ends: Sequence[int] = () if base.options.shows_stop else base.generation.stop_token_ids
        generation, self._turns = base.generation, list[AssistantTurn]()
        for index in range(self._live):
            ends = self._writer.text_ends(index, b'"delta":{"content":', b"}")
            turn = AssistantTurn(base.options.plan, generation.opens_reasoning, generation.may_reason, ends)
            self._turns.append(turn)

    def first_events(self) -> bytes:
        """Return the events before any output."""
        extra = b""
        if self._base.options.return_token_ids:
            extra = b',"prompt_token_ids":' + sse.encode_json(list(self._base.generation.prompts[0]))
        events = b""
        for index in range(len(self._turns)):
            if self._base.has_begun(index):
                continue
            role = sse.choice(index, b'"delta":{"role":"assistant","content":""}')
            events += self._line(index) + self._writer.event(role, extra, self._base.usage_of(index))
        return events

    def _line(self, index: int, state: str = "") -> bytes:
        """Return the line of an event's id; empty if the client did not ask for ids."""
        return b"" if self._base.ids is None else self._base.ids.line(index, state)

    def events(self, delta: Delta) -> bytes:
        """Return the events of some output; empty when there is nothing to send."""
        turn = self._turns[delta.index]
        if (ids := self._base.ids) is not None:
            ids.advance(delta)
        if delta.finished is None and not self._has_details:
            if not delta.text:
                return b""
            event = b"%b%b%b" % (turn.head, sse.encode_json(delta.text), turn.tail)
            return event if ids is None else ids.line(delta.index) + event
        events = self._content_event(delta, turn)
        if delta.finished is not None:
            if self._base.has_content(delta.index):
                events = b""
            self._live -= 1
            events += self._last_event(delta.index, delta.finished)
        return events

    def keep_alive(self) -> bytes:
        return sse.KEEP_ALIVE

    def repeat(self, delta: Delta) -> None:
        """Shape output that the client of a resumed answer has: what follows depends on it."""
        self.events(delta)
        self._base.repeated(delta.index)

    def last_events(self) -> bytes:
        """Return the events after all output."""
        return self._base.last_events() + sse.DONE

    def is_large(self, delta: Delta) -> bool:
        """Return whether :meth:`shape` should go before :meth:`events`, which would take long otherwise."""
        return len(delta.logprobs) > MANY_PARTS

    def shape(self, delta: Delta) -> Iterator[int]:
        """Shape a delta's log probabilities, step by step; yield how many were shaped in each step."""
        turn, as_ids = self._turns[delta.index], self._base.options.tokens_as_ids
        num_values = 0
        for at in self._base.positions(delta):
            if at.token_id in self._ends:
                continue
            turn.logprobs.add(chat_entry(at, as_ids=as_ids))
            num_values += 1 + len(at.ids)
            if num_values >= VALUES_PER_STEP:
                yield num_values
                num_values = 0
        yield num_values

    def add(self, delta: Delta) -> Iterator[int] | None:
        """Keep some output for :meth:`body`; return the steps of :meth:`shape`, or None without any."""
        turn = self._turns[delta.index]
        turn.feed(delta.text, ends=delta.finished is not None)
        turn.token_ids += delta.token_ids
        return self.shape(delta) if delta.logprobs else None

    def body(self) -> Iterator[bytes]:
        """Return the whole JSON response, in blocks."""
        if not self._base.is_plain:
            choices = (self._blocks(index, turn) for index, turn in enumerate(self._turns))
            return self._base.body("chat.completion", choices, self._own_blocks())
        plain = [self._choice(index, turn) for index, turn in enumerate(self._turns)]
        return iter((self._base.plain_body("chat.completion", plain, self._own_members()),))

    def _own_members(self) -> dict[str, object]:
        if not self._base.options.return_token_ids:
            return {}
        return {"prompt_token_ids": list(self._base.generation.prompts[0])}

    def _own_blocks(self) -> Iterator[bytes]:
        yield from self._base.prompt_logprobs(0)
        yield sse.members(self._own_members())

    def _blocks(self, index: int, turn: "AssistantTurn") -> Iterator[bytes]:
        yield from choice_blocks(self._choice(index, turn), _logprobs(turn.logprobs))
        yield b"}"

    def _content_event(self, delta: Delta, turn: "AssistantTurn") -> bytes:
        """Return the event of a delta's content; empty when it has none to send."""
        added = turn.feed(delta.text, ends=delta.finished is not None)
        if not (any(added.values()) or (self._base.has_details and delta.token_ids)):
            return b""
        ids = sse.token_ids_member(delta.token_ids) if self._base.options.return_token_ids else b""
        logprobs = b"".join(_logprobs(self._content(delta, turn))) if delta.logprobs else b"null"
        choice = sse.choice(delta.index, b'"delta":%b' % sse.encode_json(added), extra=ids, logprobs=logprobs)
        line = self._line(delta.index, "" if delta.finished is None else CONTENT_ENDED)
        return line + self._writer.event(choice, usage=self._base.usage_of(delta.index))

    def _last_event(self, index: int, finished: output_processor_pb2.RequestFinished) -> bytes:
        """Return the event that ends an output."""
        finish = sse.encode_json(self._finish_reason(index, finished))
        stop = b',"stop_reason":' + sse.encode_json(self._base.stop_reason(finished))
        stop += sse.members(origin_members(finished))
        choice = sse.choice(index, b'"delta":{}', finish, stop)
        is_last = self._live == 0 and not self._base.options.include_usage
        timeline = sse.members(self._base.last_members()) if is_last else b""
        return self._line(index, FINISHED) + self._writer.event(choice, timeline, self._base.usage_of(index))

    def _choice(self, index: int, turn: "AssistantTurn") -> dict[str, object]:
        """Return a choice; its log probabilities are only marked."""
        finished = self._base.generation.finished[index]
        choice: dict[str, object] = {
            "index": index,
            "message": turn.message(),
            "logprobs": self._base.options.num_logprobs,
            "finish_reason": self._finish_reason(index, finished),
            "stop_reason": self._base.stop_reason(finished),
        }
        if self._base.options.return_token_ids:
            choice["token_ids"] = turn.token_ids
        return choice | origin_members(finished)

    def _finish_reason(self, index: int, finished: output_processor_pb2.RequestFinished) -> str:
        return self._turns[index].finish_reason(finish_reason(finished), is_stopped=bool(finished.stop_reason))

    def _content(self, delta: Delta, turn: "AssistantTurn") -> JsonBlocks:
        """Return a delta's log probabilities, which may be shaped already."""
        if not turn.logprobs:
            for _ in self.shape(delta):
                pass
        return turn.logprobs


class AssistantTurn:
    """Collects one output of a chat: the assistant's message, and what else the client asked for.

    Attributes:
        head, tail: What stands before and after the text in events that hold only text.
    """

    def __init__(
        self, plan: MessagePlan | None, opens_reasoning: bool, may_reason: bool, ends: tuple[bytes, bytes] = (b"", b"")
    ) -> None:
        """``plan``: how the output is read; None: as text. ``opens_reasoning``, ``may_reason``: as of a generation.
        ``ends``: see the attributes."""
        self.head, self.tail = ends
        self.token_ids: list[int] = []
        self.logprobs = JsonBlocks()
        self.calls: list[dict[str, Any]] = []
        self._reader = OutputReader(plan, reasoning_is_open=opens_reasoning, may_reason=may_reason)
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._arguments: list[list[str]] = []

    def feed(self, text: str, *, ends: bool) -> dict[str, object]:
        """Return what more text adds, as a ``delta``; without values while nothing is certain.

        ``ends``: it is the last text.
        """
        if self._reader.is_plain:
            self._content.append(text)
            return {"content": text}
        delta = self._reader.feed(text, ends=ends)
        if not delta:
            return {}
        added: dict[str, object] = {}
        if content := text_of(delta):
            self._content.append(content)
            added["content"] = content
        if reasoning := reasoning_of(delta):
            self._reasoning.append(reasoning)
            added |= _reasoning(reasoning)
        if calls := calls_of(delta):
            added["tool_calls"] = [self._add_call(call) for call in calls]
        return added

    @property
    def is_within_call(self) -> bool:
        """Return whether the output ends within a call."""
        return self._reader.is_within_call

    def finish_reason(self, reason: str, *, is_stopped: bool) -> str:
        """Return ``tool_calls`` for an output that ended by itself and calls tools; one that the client's stop string
        cut within a call (``is_stopped``) does not."""
        return "tool_calls" if reason == "stop" and self.calls and not (is_stopped and self.is_within_call) else reason

    def message(self) -> dict[str, object]:
        """Return all of it, as a ``message``."""
        content = None if self.calls and not self._content else "".join(self._content)
        message = {"role": "assistant", "content": content} | _reasoning("".join(self._reasoning))
        for call, arguments in zip(self.calls, self._arguments, strict=True):
            call["function"]["arguments"] = "".join(arguments)
        return message | {"tool_calls": self.calls} if self.calls else message

    def _add_call(self, call: CallDelta) -> dict[str, object]:
        """Return a call's delta; only the first one holds its id and name."""
        if not call.call_id:
            self._arguments[call.index].append(call.arguments)
            return {"index": call.index, "function": {"arguments": call.arguments}}
        function = {"name": call.name, "arguments": call.arguments}
        whole = {"id": call.call_id, "type": "function", "function": function}
        self.calls.append(whole)
        self._arguments.append([call.arguments])
        return {"index": call.index, **whole, "function": dict(function)}


def merge_delta(parts: dict[str, Any], added: dict[str, Any]) -> None:
    """Add what :meth:`AssistantTurn.feed` has returned to what it returned before, for one event."""
    for name, value in added.items():
        if not value:
            continue
        if name == "tool_calls":
            calls = parts.setdefault(name, [])
            for call in value:
                if calls and calls[-1]["index"] == call["index"] and "id" not in call:
                    calls[-1]["function"]["arguments"] += call["function"]["arguments"]
                else:
                    calls.append(call)
        else:
            parts[name] = parts.get(name, "") + value


def _reasoning(text: str) -> dict[str, object]:
    """Return reasoning under vLLM's name, and the older name that clients know."""
    return {"reasoning": text, "reasoning_content": text} if text else {}


def _logprobs(content: JsonBlocks) -> Iterator[bytes]:
    yield b'{"content":['
    yield from content.take()
    yield b'],"refusal":null}'
