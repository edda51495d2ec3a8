"""Sends a streaming chat request, collects the answer, and shows where its time went."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rich.table import Table

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
    on_reasoning: Callable[[str], None] | None = None,
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
            if thought and on_reasoning is not None:
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


_STEPS = (
    ("tokenizer", "tokenize", "tokenize_ms", "chat template and text to {prompt_tokens} tokens"),
    ("coordinator", "placement", "placement_ms", "selected {engines}"),
    ("engine", "queue", "queued_ms", "waited for a slot in the batch"),
    ("engine", "prefill", "prefill_ms", "{prompt_tokens} prompt tokens, first answer token"),
    ("engine", "KV transfer", "kv_transfer_ms", "{transfer}"),
    ("engine", "decode", "decode_ms", "{completion_tokens} answer tokens, {rate:.0f} a second"),
    ("output processor", "detokenize", "detokenize_ms", "tokens to text"),
)
"""Service, step, key in the timeline, description."""


def timeline_table(answer: Answer) -> Table:
    """Return a row for each step; the rest of the total is spent in the gateway and between the services."""
    timeline = dict(answer.timeline)
    if _is_pair(timeline):  # decode counts from the first token, which comes before the blocks
        timeline["decode_ms"] = max(timeline["decode_ms"] - timeline["kv_transfer_ms"], 0.0)
    decode_seconds = timeline["decode_ms"] / 1e3
    details = {
        **answer.usage,
        **timeline,
        "engines": _engines(timeline),
        "transfer": _transfer(timeline),
        "rate": (answer.usage["completion_tokens"] - 1) / decode_seconds if decode_seconds else 0.0,
    }
    table = Table(title="What each service did", title_justify="left", title_style="bold")
    table.add_column("service")
    table.add_column("step")
    table.add_column("ms", justify="right")
    table.add_column("", style="dim")
    rest = timeline["total_ms"]
    for service, step, key, text in _STEPS:
        rest -= timeline[key]
        table.add_row(service, step, f"{timeline[key]:.1f}", text.format(**details))
        if step == "decode" and (drafts := timeline.get("drafts")) is not None:
            table.add_row(service, "drafts", "", _drafts(drafts))
    table.add_row("gateway", "other", f"{max(rest, 0.0):.1f}", "HTTP, and calls between the services")
    table.add_section()
    first = f"first text after {answer.seconds_to_first_token * 1e3:.0f} ms"
    table.add_row("all", "total", f"{timeline['total_ms']:.1f}", first, style="bold")
    return table


def _engines(timeline: Mapping[str, object]) -> str:
    if _is_pair(timeline):
        return f"{timeline['prefill_engine']} to prefill, {timeline['decode_engine']} to decode"
    return str(timeline["prefill_engine"])


def _transfer(timeline: Mapping[str, object]) -> str:
    if _is_pair(timeline):
        return f"KV blocks of the prompt, {timeline['prefill_engine']} to {timeline['decode_engine']}"
    return "none: one engine did both"


def _drafts(drafts: Mapping[str, int]) -> str:
    right = drafts["num_accepted_tokens"]
    share, per_step = right / max(drafts["num_draft_tokens"], 1), 1 + right / max(drafts["num_drafts"], 1)
    return f"{share:.0%} of {drafts['num_draft_tokens']} drafts right, {per_step:.1f} tokens a step with drafts"


def _is_pair(timeline: Mapping[str, object]) -> bool:
    return timeline["prefill_engine"] != timeline["decode_engine"]
