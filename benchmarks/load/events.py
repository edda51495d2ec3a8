"""Reads one streamed answer as a client does: server-sent events go in, times and counts come out."""

from dataclasses import dataclass, field
from typing import Any

import msgspec


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[msgspec.Raw] | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None


class _CacheMiss(msgspec.Struct):
    cause: str = ""


class _Cached(msgspec.Struct):
    cached_tokens: int = 0
    cache_miss: _CacheMiss | None = None


class _Usage(msgspec.Struct):
    """Holds what any of the APIs counts."""

    prompt_tokens: int = 0
    completion_tokens: int | None = 0
    prompt_tokens_details: _Cached | None = None
    input_tokens: int = 0
    output_tokens: int = 0
    input_tokens_details: _Cached | None = None
    cache_read_input_tokens: int | None = None
    cache_creation_input_tokens: int | None = None
    cache_miss: _CacheMiss | None = None

    def read_into(self, outcome: "Outcome") -> None:
        outcome.output_tokens = self.completion_tokens or self.output_tokens
        outcome.input_tokens = self.prompt_tokens or self.input_tokens
        details = self.prompt_tokens_details or self.input_tokens_details
        if details is not None:
            outcome.cached_tokens = details.cached_tokens
        elif self.cache_read_input_tokens is not None:  # Anthropic counts cached tokens beside the others
            outcome.cached_tokens = self.cache_read_input_tokens
            outcome.input_tokens += self.cache_read_input_tokens + (self.cache_creation_input_tokens or 0)
        miss = self.cache_miss if details is None else details.cache_miss
        outcome.miss_cause = "" if miss is None else miss.cause


class _Error(msgspec.Struct):
    message: str = "no reason was given"


class _Response(msgspec.Struct):
    """The state of a response, in the events of OpenAI's Responses API."""

    usage: _Usage | None = None
    error: _Error | None = None


class _Event(msgspec.Struct):
    """Names the fields of an event that are read; msgspec skips the others without making objects."""

    choices: list[_Choice] = []
    type: str = ""
    """The kind of an event, in the APIs that name it."""
    usage: _Usage | None = None
    response: _Response | None = None
    timeline: dict[str, Any] | None = None
    error: _Error | None = None


_decode = msgspec.json.Decoder(_Event).decode
_NO_RESPONSE = _Response()
_GROWTH = ("content_block_delta", ".delta")
"""How kinds of events end that stand for tokens, of Anthropic's messages and OpenAI's responses."""


@dataclass
class Outcome:
    """Holds the outcome of one request, in seconds; ``start`` counts from the beginning of the run."""

    start: float
    kind: str = ""
    input_tokens: int = 0
    output_tokens: int = 0
    ttft: float = 0.0
    """Time from sending to the first output."""
    latency: float = 0.0
    """Time from sending to the last output."""
    itl: list[float] = field(default_factory=list)
    """Times between consecutive outputs; an output may carry more than one token."""
    timeline: dict[str, Any] = field(default_factory=dict)
    """The server's own breakdown of the time, in ms, if it was asked for one and has it."""
    error: str = ""
    """Empty: the request succeeded."""
    refused: bool = False
    """Whether the server refused it for lack of capacity (503) or for a quota (429)."""
    cached_tokens: int = 0
    """Tokens of the prompt that were found in a cache."""
    miss_cause: str = ""
    """Why tokens that the session had sent before were computed again, as the server says; empty: it says nothing."""

    @property
    def tpot(self) -> float | None:
        """Return the mean time per token after the first; None for a single token."""
        return (self.latency - self.ttft) / (self.output_tokens - 1) if self.output_tokens > 1 else None


class AnswerReader:
    """Parses the bytes of an event stream as they arrive; ``now`` and ``sent`` are on one clock."""

    def __init__(self, outcome: Outcome, sent: float) -> None:
        self.outcome = outcome
        self.done = False
        self._sent = sent
        self._last = 0.0
        self._num_outputs = 0
        self._rest = b""

    def feed(self, data: bytes, now: float) -> None:
        """Parse what arrived at ``now``."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                self._take(line[5:].strip(), now)

    def end(self) -> None:
        """Return the outcome of the complete response."""
        outcome = self.outcome
        if not outcome.error and not self._num_outputs:
            outcome.error = "the stream ended without an output"
        outcome.output_tokens = outcome.output_tokens or self._num_outputs
        outcome.latency = self._last - self._sent if self._num_outputs else 0.0

    def _take(self, payload: bytes, now: float) -> None:
        if payload == b"[DONE]":
            self.done = True
            return
        event = _decode(payload)
        response = event.response or _NO_RESPONSE
        if (error := event.error or response.error) is not None:
            self.outcome.error = error.message
        if any(_has_output(choice) for choice in event.choices) or event.type.endswith(_GROWTH):
            self._output(now)
        usage = event.usage or response.usage
        if usage is not None and (usage.completion_tokens or usage.output_tokens):
            usage.read_into(self.outcome)
        if event.timeline is not None:
            self.outcome.timeline = event.timeline

    def _output(self, now: float) -> None:
        if self._num_outputs:
            self.outcome.itl.append(now - self._last)
        else:
            self.outcome.ttft = now - self._sent
        self._last = now
        self._num_outputs += 1


def _has_output(choice: _Choice) -> bool:
    """Return whether an event stands for tokens. A completion's always does; a chat's may only name the role."""
    if choice.delta is None:
        return choice.text is not None
    return bool(choice.delta.content or choice.delta.reasoning_content or choice.delta.tool_calls)
