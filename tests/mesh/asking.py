"""A client of the gateway that asks with token ids and sees the answer's tokens as they come."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.mesh.harness import MODEL


@dataclass
class Answer:
    """What came, so far or in all."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    """Of the tokens, if the request asks for some."""
    finish_reason: str | None = None
    error: dict[str, Any] | None = None
    timeline: dict[str, Any] = field(default_factory=dict)
    usage: dict[str, Any] = field(default_factory=dict)
    weights_version: str = ""
    begun: asyncio.Event = field(default_factory=asyncio.Event)
    """Set with the first token."""


async def ask(
    http: httpx.AsyncClient, prompt: Sequence[int], max_tokens: int, answer: Answer | None = None, **fields: Any
) -> Answer:
    """Streams one completion into ``answer``; cancelling it is a client that goes away."""
    answer = answer or Answer()
    body = {
        "model": MODEL,
        "prompt": list(prompt),
        "max_tokens": max_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
        "return_timeline": True,
        "ignore_eos": True,
        "temperature": 0,
        **fields,
    }
    async with http.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code != 200:
            answer.error = json.loads(await response.aread())["error"]
            return answer
        async for line in _lines(response):
            if line.startswith("data: {"):
                _take(answer, json.loads(line.removeprefix("data: ")))
    return answer


async def _lines(response: httpx.Response) -> AsyncIterator[str]:
    """Yield the lines of a stream of events. httpx would also end lines at characters of texts, such as U+2028."""
    rest = b""
    async for piece in response.aiter_bytes():
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            yield line.decode()


def _take(answer: Answer, event: dict[str, Any]) -> None:
    answer.error = event.get("error", answer.error)
    for choice in event.get("choices", ()):
        answer.token_ids += choice.get("token_ids") or []
        answer.logprobs += (choice.get("logprobs") or {}).get("token_logprobs", [])
        answer.finish_reason = choice["finish_reason"] or answer.finish_reason
        answer.weights_version = choice.get("weights_version", answer.weights_version)
    answer.timeline = event.get("timeline") or answer.timeline
    answer.usage = event.get("usage") or answer.usage
    if answer.token_ids:
        answer.begun.set()
