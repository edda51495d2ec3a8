"""Sends requests to OpenAI's API: one client does what a plain one does, the other resumes."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any

from . import failure
from .exchange import Exchange
from .failure import RequestFailed
from .http_post import ConnectionLost, ConnectionRefused, Response, post
from .mix import Case
from .openai_answer import ErrorEvent, EventReader, error_text, take_event, take_whole

SILENCE_SECONDS = 3.0
"""After so much silence beyond the usual a resuming client calls another gateway; doubled after each call without an
output, so that a slow mesh does not get more and more calls."""
_NO_EVENT = "0"
"""Asks for a stream from its beginning whose events have ids."""
_FIRST_WAIT, _LONGEST_WAIT = 0.05, 1.0
"""Seconds between calls of a resuming client, doubled each time."""


class PlainClient:
    """Sends each request once."""

    name = "plain HTTP"
    transport = "http"
    resumes = False
    moves = False

    def __init__(self, gateways: Sequence[str], model: str) -> None:
        """``gateways``: their HTTP addresses, ``host:port``."""
        self._gateways = gateways
        self._model = model

    async def send(self, exchange: Exchange) -> None:
        address = self._gateways[exchange.gateway]
        try:
            await call(address, self._model, exchange, EventReader(), {})
        except ConnectionRefused as error:
            exchange.refused += 1
            raise failure.refused(str(error)) from None
        except ConnectionLost as error:
            raise failure.cut(str(error)) from None

    async def close(self) -> None:
        """Do nothing: no connection stays open."""


class ResumingClient:
    """Sends a request again with its ``Idempotency-Key``, and for a stream its ``Last-Event-ID``, after the loss of a
    connection or some silence, in turns to each gateway. A typed error is final."""

    name = "resuming HTTP"
    transport = "http"
    resumes = True
    moves = True

    def __init__(self, gateways: Sequence[str], model: str, run: str) -> None:
        """``run`` makes the keys of this run unique."""
        self._gateways = gateways
        self._model = model
        self._run = run

    async def send(self, exchange: Exchange) -> None:
        events = EventReader()
        patience = SILENCE_SECONDS + exchange.usual_seconds
        wait, at, silence = _FIRST_WAIT, exchange.gateway, patience
        while True:
            before = exchange.progress.last
            headers = {"Idempotency-Key": f"{self._run}-{exchange.number}"}
            if exchange.case.streamed:
                headers["Last-Event-ID"] = events.last_id or _NO_EVENT
            try:
                return await call(self._gateways[at], self._model, exchange, events, headers, silence)
            except ConnectionRefused:
                exchange.refused += 1
            except (ConnectionLost, TimeoutError) as error:
                if exchange.answer.samples and not events.last_id:
                    raise failure.cut(f"{error or 'silence'}; the events have no id to resume from") from None
            silence = patience if exchange.progress.last > before else 2 * silence
            await asyncio.sleep(wait)
            wait, at = min(2 * wait, _LONGEST_WAIT), (at + 1) % len(self._gateways)
            exchange.resumed += 1

    async def close(self) -> None:
        """Do nothing: no connection stays open."""


async def call(
    address: str,
    model: str,
    exchange: Exchange,
    events: EventReader,
    headers: Mapping[str, str],
    silence: float | None = None,
) -> None:
    """Make one call and add what it returns to the answer.

    Raises ``RequestFailed`` for typed errors, ``ConnectionRefused``, ``ConnectionLost``, and ``TimeoutError`` after
    ``silence`` seconds without a byte.
    """
    events.begin()
    path = "/v1/chat/completions" if exchange.case.is_chat else "/v1/completions"
    body = json.dumps(body_of(exchange.case, model)).encode()
    async with asyncio.timeout(silence) as limit, post(address, path, body, headers) as response:
        if response.status != 200:
            raise _refusal(response.status, await response.body())
        if exchange.case.streamed:
            await _read_stream(response, exchange, events, limit, silence)
        else:
            take_whole(exchange.answer, await response.body())


async def _read_stream(
    response: Response, exchange: Exchange, events: EventReader, limit: asyncio.Timeout, silence: float | None
) -> None:
    loop = asyncio.get_running_loop()
    async for piece in response:
        if silence is not None:
            limit.reschedule(loop.time() + silence)
        for data in events.feed(piece):
            if data == "[DONE]":
                return
            try:
                if take_event(exchange.answer, data):
                    exchange.progress.output(loop.time())
            except ErrorEvent as error:
                raise failure.typed(str(error).partition(":")[0], f"in the stream: {error}") from None
    raise ConnectionLost("the response ended without [DONE]")


def body_of(case: Case, model: str) -> dict[str, Any]:
    """Return the JSON body of a request."""
    body: dict[str, Any] = {"model": model, "stream": case.streamed, "return_token_ids": True, **case.options}
    if case.streamed:
        body["stream_options"] = {"include_usage": True}
    if case.is_chat:
        body["messages"] = [{"role": "user", "content": case.message}]
    else:
        body["prompt"] = case.prompt
    return body


def _refusal(status: int, body: bytes) -> RequestFailed:
    text = error_text(body)
    if text is None:
        return RequestFailed(str(status), body[:200].decode(errors="replace"), is_typed=False)
    return failure.typed(f"{status} {text.partition(':')[0]}", text)
