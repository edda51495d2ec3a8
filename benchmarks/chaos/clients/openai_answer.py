"""Reads the answers of OpenAI's API, whole or as server-sent events, into the common form."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from .answer import Answer, Sample


class ErrorEvent(Exception):
    """Raised for an error event within a stream; the message is the error's code and text."""


def error_text(body: bytes) -> str | None:
    """Return code and message of OpenAI's error body, or the text of Ollama's; None: the body is neither."""
    try:
        error = json.loads(body)["error"]
        if isinstance(error, str):
            return error
        return f"{error.get('code') or error['type']}: {error['message']}"
    except (ValueError, KeyError, TypeError):
        return None


class EventReader:
    """Splits an event stream. Attributes: last_id: id of the last event, empty if events have none."""

    def __init__(self) -> None:
        self.last_id = ""
        self._rest = b""
        self._id = ""

    def begin(self) -> None:
        """Forget the unfinished event of a lost connection."""
        self._rest, self._id = b"", ""

    def feed(self, data: bytes) -> Iterator[str]:
        """Yield the data of each complete event. The id of an event counts once its data was yielded."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            name, _, value = line.decode().partition(":")
            if name == "id":
                self._id = value.strip()
            elif name == "data":
                self.last_id = self._id or self.last_id
                yield value.strip()


def take_event(answer: Answer, data: str) -> bool:
    """Add an event to the answer and return whether it holds output. Raises ``ErrorEvent``."""
    event = json.loads(data)
    if (error := event.get("error")) is not None:
        raise ErrorEvent(f"{error.get('code') or error.get('type')}: {error.get('message')}")
    _take_usage(answer, event)
    with_output = [_take_choice(answer.sample(choice["index"]), choice) for choice in event.get("choices", ())]
    return any(with_output)


def take_whole(answer: Answer, body: bytes) -> None:
    """Fill the answer from the body of a unary response."""
    whole = json.loads(body)
    _take_usage(answer, whole)
    for choice in whole["choices"]:
        _take_choice(answer.sample(choice["index"]), choice)


def _take_usage(answer: Answer, event: Mapping[str, Any]) -> None:
    if (usage := event.get("usage")) is not None:
        answer.completion_tokens = usage["completion_tokens"]


def _take_choice(sample: Sample, choice: Mapping[str, Any]) -> bool:
    token_ids = choice.get("token_ids") or []
    sample.token_ids += token_ids
    message = choice.get("delta") or choice.get("message") or {}
    sample.text += choice.get("text") or message.get("content") or ""
    for position, call in enumerate(message.get("tool_calls") or ()):
        _take_call(sample, call, call.get("index", position))
    logprobs = choice.get("logprobs") or {}
    sample.logprobs += logprobs.get("token_logprobs") or [each["logprob"] for each in logprobs.get("content") or ()]
    sample.finish_reason = choice.get("finish_reason") or sample.finish_reason
    if choice.get("stop_reason") is not None:
        sample.stop_reason = choice["stop_reason"]
    return bool(token_ids)


def _take_call(sample: Sample, call: Mapping[str, Any], index: int) -> None:
    function = call.get("function", {})
    if index == len(sample.tool_calls):
        sample.tool_calls.append([function.get("name") or "", ""])
    sample.tool_calls[index][1] += function.get("arguments") or ""
