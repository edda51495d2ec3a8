"""Shapes an answer of Anthropic's Messages API: content blocks, whole or as events."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tokenloom.v1 import inference_pb2, output_processor_pb2
from tokenloom.v1.inference_pb2 import MissCause

from ..assistant.message_plans import CallDelta, MessageDelta, OutputReader, TextDelta
from ..encoding.sse import cache_miss, encode_json
from ..formats.call_arguments import read_arguments
from ..generation.open_turn import OpenTurn
from ..generation.running_generation import RunningGeneration
from ..mesh.collector import Delta
from ..openai.answer import finish_reason, origin_members
from ..openai.body_reader import AnswerOptions
from .context_edits import ContextEdits

_STOP_REASONS = {
    "stop": "end_turn",
    "tool_calls": "tool_use",
    "length": "max_tokens",
    "repetition": "max_tokens",  # the API has no other word for a turn that a limit has ended
    "abort": "pause_turn",  # the client sends the turn back, and the model continues it
}
SHORT_SECONDS = 300
"""The shorter of the two times for which a mark keeps a prompt."""
_UNCACHED = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}


_REASONS: Mapping[MissCause, str] = {
    inference_pb2.MISS_CAUSE_ADAPTER_CHANGED: "model_changed",
    inference_pb2.MISS_CAUSE_TOOLS_CHANGED: "tools_changed",
    inference_pb2.MISS_CAUSE_MESSAGE_CHANGED: "messages_changed",
    inference_pb2.MISS_CAUSE_VOLATILE_LINE: "system_changed",
    inference_pb2.MISS_CAUSE_REASONING_DROPPED: "messages_changed",
    inference_pb2.MISS_CAUSE_BLANKS_CHANGED: "messages_changed",
    inference_pb2.MISS_CAUSE_ARGUMENTS_RESERIALISED: "messages_changed",
}
"""The API's words for what a client changed; others are ``unavailable`` there."""


@dataclass(frozen=True, slots=True)
class MessageReports:
    """Holds what an answer reports of its request.

    Attributes:
        edits: Shorten the conversation; None: the client asks for none.
        previous: As ``GenerateRequest.compared``.
        keep_seconds: For how long each mark of the request wants the prompt kept; None: they differ, or there is none.
    """

    edits: ContextEdits | None = None
    previous: str | None = None
    keep_seconds: int | None = None

    @property
    def context_management(self) -> dict[str, object]:
        """What was cleared, as a member; empty if the client did not ask for it."""
        return {} if self.edits is None else {"context_management": {"applied_edits": self.edits.applied}}

    def cache_creation(self, num_tokens: int) -> dict[str, object]:
        """Return how many tokens were written to the cache for which time, as a member; empty where no time is that of
        all marks."""
        if self.keep_seconds is None:
            return {}
        is_short = self.keep_seconds == SHORT_SECONDS
        by_time = {"ephemeral_5m_input_tokens": 0, "ephemeral_1h_input_tokens": 0}
        by_time[f"ephemeral_{'5m' if is_short else '1h'}_input_tokens"] = num_tokens
        return {"cache_creation": by_time}

    def diagnostics(self, turn: OpenTurn | None) -> dict[str, object]:
        """Return why the cache could not reuse the prompt of an earlier turn, as a member; empty if the client did not
        ask for it."""
        if self.previous is None:
            return {}
        if not self.previous:
            return {"diagnostics": None}
        reason: dict[str, object] = {"type": "unavailable"}
        if turn is not None and not turn.is_compared_with(self.previous):
            reason["type"] = "previous_message_not_found"
        elif turn is not None:
            if (difference := turn.difference()) is None:
                return {"diagnostics": None}
            if (kind := _REASONS.get(difference.cause)) is not None:
                is_system = kind == "messages_changed" and turn.has_other_system
                reason = {"type": "system_changed" if is_system else kind}
                reason["cache_missed_input_tokens"] = difference.missed_tokens
        return {"diagnostics": {"cache_miss_reason": reason}}


class MessageAnswer:
    """Shapes the assistant's next turn."""

    def __init__(self, generation: RunningGeneration, options: AnswerOptions) -> None:
        self._generation = generation
        self._stop = options.stop
        assert isinstance(options.request, MessageReports)
        self._reports = options.request
        self._id = f"msg_{generation.request_id}"
        self._model = generation.model
        self._blocks = ContentBlocks()
        is_open, may_reason = generation.opens_reasoning, generation.may_reason
        self._reader = OutputReader(options.plan, reasoning_is_open=is_open, may_reason=may_reason)

    def first_events(self) -> bytes:
        """Return the events before any output."""
        # How many of the prompt's tokens were cached is known at the end; the usage there replaces this one.
        counts = {"input_tokens": self._generation.usage.prompt_tokens, "output_tokens": 0}
        usage = {**counts, **_UNCACHED, **self._reports.cache_creation(0)}
        message = self._message([], None, None) | {"usage": usage}
        return event("message_start", {"message": message})

    def events(self, delta: Delta) -> bytes:
        """Return the events of some output; empty while nothing is certain."""
        return self._blocks.add(self._reader.feed(delta.text, ends=delta.finished is not None))

    def last_events(self) -> bytes:
        """Return the events after all output."""
        reason, sequence = self._stop_reason()
        ending: dict[str, Any] = {"delta": {"stop_reason": reason, "stop_sequence": sequence}, "usage": self._usage()}
        ending |= self._reports.context_management | origin_members(self._generation.finished[0])
        return self._blocks.end() + event("message_delta", ending) + event("message_stop", {})

    def keep_alive(self) -> bytes:
        return event("ping", {})

    def repeat(self, delta: Delta) -> None:
        """Take note of output that the client has."""
        self.events(delta)

    def is_large(self, delta: Delta) -> bool:
        """Return False: the API has no log probabilities, which alone take long to shape."""
        return False

    def shape(self, delta: Delta) -> Iterator[int]:
        """Return nothing: no delta is large."""
        return iter(())

    def add(self, delta: Delta) -> None:
        """Keep some output for :meth:`body`."""
        self._blocks.add(self._reader.feed(delta.text, ends=delta.finished is not None))

    def body(self) -> Iterator[bytes]:
        """Return the whole JSON response."""
        reason, sequence = self._stop_reason()
        message = self._message(self._blocks.blocks(is_cut=reason != "tool_use"), reason, sequence)
        ending = {"usage": self._usage()} | self._reports.context_management
        yield encode_json(message | ending | origin_members(self._generation.finished[0]))

    def _message(
        self, content: list[dict[str, Any]], stop_reason: str | None, stop_sequence: str | None
    ) -> dict[str, object]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            "stop_reason": stop_reason,
            "stop_sequence": stop_sequence,
            **self._reports.diagnostics(self._generation.turn),
        }

    def _stop_reason(self) -> tuple[str, str | None]:
        """Return why the output ended, and which of the client's stop sequences ended it."""
        finished: output_processor_pb2.RequestFinished = self._generation.finished[0]
        if finished.stop_reason in self._stop:
            return "stop_sequence", finished.stop_reason
        reason = finish_reason(finished)
        if reason == "stop" and self._blocks.num_calls:
            reason = "tool_calls"
        return _STOP_REASONS[reason], None

    def _usage(self) -> dict[str, object]:
        """Return the tokens; those of the prompt that were cached, or that a mark has let be cached, are counted
        separately, as in Anthropic's API."""
        usage = self._generation.usage
        return {
            "input_tokens": usage.prompt_tokens - usage.cached_tokens - usage.cache_write_tokens,
            "cache_creation_input_tokens": usage.cache_write_tokens,
            **self._reports.cache_creation(usage.cache_write_tokens),
            "cache_read_input_tokens": usage.cached_tokens,
            "output_tokens": usage.completion_tokens,
            **cache_miss(usage),
        }


class ContentBlocks:
    """Divides a turn into content blocks, of which one is open at a time.

    Attributes:
        num_calls: Calls that have begun.
    """

    def __init__(self) -> None:
        self.num_calls = 0
        self._blocks: list[tuple[dict[str, Any], list[str]]] = []
        self._open = ""  # the type of the open block; empty: none

    def add(self, delta: MessageDelta) -> bytes:
        """Return the events of what a turn grew by."""
        events = b""
        for part in delta:
            if isinstance(part, CallDelta):
                events += self._add_call(part)
            elif isinstance(part, TextDelta):
                events += self._begin("text", {"text": ""}) + self._delta("text_delta", "text", part.text)
            else:
                events += self._begin("thinking", {"thinking": "", "signature": ""})
                events += self._delta("thinking_delta", "thinking", part.text)
        return events

    def end(self) -> bytes:
        """Return the event that closes the open block, if any."""
        if not self._open:
            return b""
        self._open = ""
        return event("content_block_stop", {"index": len(self._blocks) - 1})

    def blocks(self, *, is_cut: bool) -> list[dict[str, Any]]:
        """Return all blocks, complete. ``is_cut``: the stop reason says that the output was cut."""
        return [_whole(block, "".join(pieces), is_cut) for block, pieces in self._blocks]

    def _add_call(self, call: CallDelta) -> bytes:
        events = b""
        if call.call_id:
            self.num_calls += 1
            events = self.end() + self._begin("tool_use", {"id": call.call_id, "name": call.name, "input": {}})
        if call.arguments:
            events += self._delta("input_json_delta", "partial_json", call.arguments)
        return events

    def _begin(self, kind: str, members: dict[str, Any]) -> bytes:
        """Return the events that open a block of this kind; none if one is open."""
        if self._open == kind:
            return b""
        ended = self.end()
        self._open = kind
        block = {"type": kind, **members}
        self._blocks.append((block, []))
        return ended + event("content_block_start", {"index": len(self._blocks) - 1, "content_block": block})

    def _delta(self, kind: str, member: str, text: str) -> bytes:
        """Return the event of more text of the open block."""
        self._blocks[-1][1].append(text)
        return event("content_block_delta", {"index": len(self._blocks) - 1, "delta": {"type": kind, member: text}})


def event(kind: str, members: dict[str, Any]) -> bytes:
    """Return a server-sent event, whose name stands in its data too."""
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), encode_json({"type": kind, **members}))


def _whole(block: dict[str, Any], text: str, is_cut: bool) -> dict[str, Any]:
    if block["type"] != "tool_use":
        return block | {block["type"]: text}
    return block | {"input": read_arguments(text, is_cut=is_cut)}
