"""Sends a streaming chat request and collects the answer."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..failures import RequestFailed
from ..server import Server, objects


@dataclass
class Answer:
    """Holds the answer to a chat request."""

    text: str = ""
    finish_reason: str | None = None
    seconds_to_first_token: float = 0.0
    seconds: float = 0.0
    usage: dict[str, int] = field(default_factory=dict)
    timeline: dict[str, Any] = field(default_factory=dict)


def stream_chat(
    server: Server,
    body: Mapping[str, Any],
    on_text: Callable[[str], None],
    on_reasoning: Callable[[str], None] = lambda text: None,
) -> Answer:
    """Send a chat request; pass pieces of the answer to `on_text` and pieces of the reasoning to `on_reasoning`.

    Blocks. Raises `RequestFailed`.
    """
    started = time.monotonic()
    answer = Answer()
    streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
    for event in server.stream("/v1/chat/completions", streamed):
        for choice in objects(event.get("choices")):
            delta = choice.get("delta")
            delta = delta if isinstance(delta, dict) else {}
            answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
            text, thought = delta.get("content"), delta.get("reasoning") or delta.get("reasoning_content")
            if not isinstance(text, str | None) or not isinstance(thought, str | None):
                raise RequestFailed("the server's answer holds a text that is none")
            if text or thought:
                answer.seconds_to_first_token = answer.seconds_to_first_token or time.monotonic() - started
            if thought:
                on_reasoning(thought)
            if text:
                answer.text += text
                on_text(text)
        answer.usage = event.get("usage") or answer.usage
        answer.timeline = event.get("timeline") or answer.timeline
    if answer.finish_reason is None:
        raise RequestFailed("the answer is incomplete: the connection ended early")
    answer.seconds = time.monotonic() - started
    return answer
