"""Shapes an answer of Ollama's API: an object, or lines that each hold a part of it."""

from collections.abc import Iterator
from datetime import UTC, datetime
from functools import partial
from typing import Any

from ..assistant.message_plans import CallDelta, OutputReader, calls_of, reasoning_of, text_of
from ..encoding.sse import encode_json
from ..formats.call_arguments import read_arguments
from ..generation.running_generation import RunningGeneration
from ..mesh.collector import Delta
from ..openai.answer import finish_reason
from ..openai.body_reader import AnswerOptions


class OllamaAnswer:
    """Shapes the assistant's next turn. Calls are sent at the end, when their arguments are complete."""

    def __init__(self, generation: RunningGeneration, options: AnswerOptions, *, is_chat: bool) -> None:
        self._generation, self._model, self._is_chat = generation, generation.model, is_chat
        is_open, may_reason = generation.opens_reasoning, generation.may_reason
        self._reader = OutputReader(options.plan, reasoning_is_open=is_open, may_reason=may_reason)
        self._content: list[str] = []
        self._thoughts: list[str] = []
        self._calls: list[CallDelta] = []

    def first_events(self) -> bytes:
        return b""

    def events(self, delta: Delta) -> bytes:
        """Return the line of some output; empty while nothing is certain."""
        content, thoughts = self._read(delta)
        return self._line(content, thoughts) if content or thoughts else b""

    def last_events(self) -> bytes:
        # Before the last line, whose message Ollama's own clients do not read.
        calls = self._line(calls=self._calls) if self._calls else b""
        return calls + self._line(ends=True)

    def keep_alive(self) -> bytes:
        return self._line()

    def repeat(self, delta: Delta) -> None:
        self._read(delta)

    def is_large(self, delta: Delta) -> bool:
        return False

    def shape(self, delta: Delta) -> Iterator[int]:
        return iter(())

    def add(self, delta: Delta) -> None:
        content, thoughts = self._read(delta)
        self._content.append(content)
        self._thoughts.append(thoughts)

    def body(self) -> Iterator[bytes]:
        yield self._line("".join(self._content), "".join(self._thoughts), self._calls, ends=True)

    def _read(self, delta: Delta) -> tuple[str, str]:
        """Keep the calls of some output, and return its text and its reasoning."""
        added = self._reader.feed(delta.text, ends=delta.finished is not None)
        for call in calls_of(added):
            if call.call_id:
                self._calls.append(call)
            else:
                self._calls[-1].arguments += call.arguments
        return text_of(added), reasoning_of(added)

    def _line(
        self, text: str = "", thoughts: str = "", calls: list[CallDelta] | None = None, ends: bool = False
    ) -> bytes:
        turn: dict[str, Any] = {"thinking": thoughts} if thoughts else {}
        turn["content" if self._is_chat else "response"] = text
        if calls:
            is_cut = finish_reason(self._generation.finished[0]) != "stop"  # which is a stop string's reason as well
            read = partial(read_arguments, is_cut=is_cut)
            functions = ({"name": call.name, "arguments": read(call.arguments)} for call in calls)
            turn["tool_calls"] = [{"function": function} for function in functions]
        line = line_of(self._model, turn, is_chat=self._is_chat, ends=ends)
        return encode_json(line | (self._ending() if ends else {})) + b"\n"

    def _ending(self) -> dict[str, object]:
        """Return why the answer ended, and the counts and nanoseconds of which clients make tokens per second."""
        generation = self._generation
        usage, times, total = generation.usage, generation.timeline, generation.total_ns
        before = times.tokenize_ns + times.placement_ns + times.queued_ns
        # All that follows the prompt, not the time between the arrivals of tokens: a short answer may arrive at once.
        # At least 1, because clients divide by it.
        rest = total - before - times.prefill_ns
        return {
            "done_reason": finish_reason(generation.finished[0]),
            "total_duration": total,
            "load_duration": before,
            "prompt_eval_count": usage.prompt_tokens,
            "prompt_eval_duration": max(times.prefill_ns, 1),
            "eval_count": usage.completion_tokens,
            "eval_duration": max(rest, 1),
        }


def line_of(model: str, turn: dict[str, Any], *, is_chat: bool, ends: bool) -> dict[str, Any]:
    """Return a part of an answer. ``turn``: members of the message, or of the line itself."""
    line: dict[str, Any] = {"model": model, "created_at": datetime.now(UTC).isoformat()}
    line |= {"message": {"role": "assistant", **turn}} if is_chat else turn
    return line | {"done": ends}
