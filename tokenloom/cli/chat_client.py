"""A streaming chat request over HTTP, as any client would send it."""

import http.client
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

_TIMEOUT_SECONDS = 120.0


class ChatFailed(Exception):
    """The answer was an error, or did not come to its end."""


@dataclass
class Answer:
    """What came back beside the text."""

    text: str = ""
    finish_reason: str | None = None
    seconds_to_first_token: float = 0.0
    seconds: float = 0.0
    usage: dict[str, int] = field(default_factory=dict)
    timeline: dict[str, Any] = field(default_factory=dict)


def stream_chat(address: str, model: str, prompt: str, max_tokens: int, on_text: Callable[[str], None]) -> Answer:
    """Asks `prompt` greedily and hands each piece of the answer to `on_text`. Blocks; raises `ChatFailed`."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": prompt}],
        "temperature": 0,
        "max_tokens": max_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_timeline": True,
    }
    connection = http.client.HTTPConnection(address, timeout=_TIMEOUT_SECONDS)
    started = time.monotonic()
    answer = Answer()
    try:
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
        for event in _events(connection.getresponse()):
            _take(answer, event, on_text, time.monotonic() - started)
    except (OSError, http.client.HTTPException) as error:
        raise ChatFailed(f"the connection to the gateway broke ({type(error).__name__})") from error
    finally:
        connection.close()
    if answer.finish_reason is None:
        raise ChatFailed("the answer broke off")
    answer.seconds = time.monotonic() - started
    return answer


def _events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """The JSON of each server-sent event."""
    if response.status != 200:
        raise ChatFailed(f"HTTP {response.status}: {_message(json.loads(response.read() or b'{}'))}")
    for line in response:
        data = line.removeprefix(b"data:").strip()
        if line.startswith(b"data:") and data != b"[DONE]":
            yield json.loads(data)


def _take(answer: Answer, event: dict[str, Any], on_text: Callable[[str], None], seconds: float) -> None:
    if "error" in event:
        raise ChatFailed(_message(event))
    for choice in event.get("choices", ()):
        answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
        if text := choice.get("delta", {}).get("content"):
            answer.seconds_to_first_token = answer.seconds_to_first_token or seconds
            answer.text += text
            on_text(text)
    answer.usage = event.get("usage") or answer.usage
    answer.timeline = event.get("timeline") or answer.timeline


def _message(body: dict[str, Any]) -> str:
    return str(body.get("error", {}).get("message", "no reason was given"))
