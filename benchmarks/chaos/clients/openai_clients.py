"""Sends requests to OpenAI's API: one client does what a plain one does, the other resumes."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from . import failure, gateway_probe
from .exchange import Exchange
from .failure import RequestFailed
from .http_request import ConnectionLost, ConnectionRefused, Response, send
from .mix import Case
from .openai_answer import ErrorEvent, EventReader, error_text, take_event, take_whole
from .other_calls import answer_of

_NO_EVENT = "0"
"""Asks for a stream from its beginning whose events have ids."""
_FIRST_WAIT, _LONGEST_WAIT = 0.05, 1.0
"""Seconds between calls of a resuming client, doubled each time."""


class PlainClient:
    """Sends each request once, and knows nothing of what a gateway's end means.

    Attributes:
        resumes: Whether the gateways hold its connections, so that it survives the loss of one all the same.
    """

    name = "plain HTTP"
    transport = "http"
    moves = False
    is_special = False

    def __init__(self, gateways: Sequence[str], model: str, *, is_held: bool = False) -> None:
        """``gateways``: their HTTP addresses, ``host:port``."""
        self.resumes = is_held
        self._gateways = gateways
        self._model = model

    async def send(self, exchange: Exchange) -> None:
        address = self._gateways[exchange.gateway]
        try:
            if exchange.case.call is not None:
                text = await answer_of(partial(send_json, address), exchange.case, self._model)
                exchange.answer.sample(0).text = text
                return
            await call(address, self._model, exchange, EventReader(), {})
        except ConnectionRefused as error:
            exchange.refused += 1
            raise failure.refused(str(error)) from None
        except ConnectionLost as error:
            raise failure.cut(str(error)) from None

    async def close(self) -> None:
        """Do nothing: no connection stays open."""


class _Silent(ConnectionLost):
    """Raised when the gateway does not answer its health check."""


class ResumingClient:
    """Sends a request again with its ``Idempotency-Key``, and for a stream its ``Last-Event-ID``, after the loss of a
    connection or when a gateway does not answer its health check, in turns to each gateway. Gateways that are all
    slower than it waits for them are not lost: each time without any output it waits twice as long.

    A typed error is final, with one exception: where an earlier call of this client was delayed on its way and has
    taken the answer, the client takes it back.
    """

    name = "resuming HTTP"
    transport = "http"
    resumes = True
    moves = True
    is_special = False

    def __init__(self, gateways: Sequence[str], model: str, run: str) -> None:
        """``run`` makes the keys of this run unique."""
        self._gateways = gateways
        self._model = model
        self._run = run

    async def send(self, exchange: Exchange) -> None:
        events = EventReader()
        wait, at, patience = _FIRST_WAIT, exchange.gateway, gateway_probe.TIMEOUT_SECONDS
        while True:
            last_output = exchange.progress.last
            headers = {"Idempotency-Key": f"{self._run}-{exchange.number}"}
            if exchange.case.streamed:
                headers["Last-Event-ID"] = events.last_id or _NO_EVENT
            try:
                address = self._gateways[at % len(self._gateways)]
                return await self._call(address, exchange, events, headers, patience)
            except ConnectionRefused:
                exchange.refused += 1
                at += 1
            except ConnectionLost as error:
                if exchange.answer.samples and not events.last_id:
                    raise failure.cut(f"{error}; the events have no id to resume from") from None
                at += 1
                # On a machine at load 10 to 50 its clients left every gateway after 2.5 s, for the end of the queue at
                # the next one: 70 of 4,600 answers had no end after 90 s, where plain clients had theirs.
                if exchange.progress.last > last_output:
                    patience = gateway_probe.TIMEOUT_SECONDS
                elif isinstance(error, _Silent):
                    patience *= 2
            except RequestFailed as error:
                if not error.kind.endswith(failure.ABORTED):
                    raise
            await asyncio.sleep(wait)
            wait = min(2 * wait, _LONGEST_WAIT)
            exchange.resumed += 1

    async def _call(
        self, address: str, exchange: Exchange, events: EventReader, headers: Mapping[str, str], patience: float
    ) -> None:
        """Make a call. Raises as :func:`call`; a gateway that does not answer its health check within ``patience``
        seconds is a lost connection."""
        calling = asyncio.create_task(call(address, self._model, exchange, events, headers))
        probing = asyncio.create_task(gateway_probe.until_lost(address, patience))
        try:
            await asyncio.wait((calling, probing), return_when=asyncio.FIRST_COMPLETED)
            if not calling.done():
                raise _Silent("the gateway does not answer its health check")
            calling.result()
        finally:
            calling.cancel()
            probing.cancel()
            await asyncio.wait((calling, probing))

    async def close(self) -> None:
        """Do nothing: no connection stays open."""


async def call(
    address: str,
    model: str,
    exchange: Exchange,
    events: EventReader,
    headers: Mapping[str, str],
) -> None:
    """Make one call and add what it returns to the answer.

    Raises ``RequestFailed`` for typed errors, ``ConnectionRefused`` and ``ConnectionLost``.
    """
    events.begin()
    path = "/v1/chat/completions" if exchange.case.is_chat else "/v1/completions"
    body = json.dumps(body_of(exchange.case, model)).encode()
    async with send("POST", address, path, body, headers) as response:
        if response.status != 200:
            raise refusal(response.status, await response.body())
        if exchange.case.streamed:
            await _read_stream(response, exchange, events)
        else:
            take_whole(exchange.answer, await response.body())


async def send_json(address: str, method: str, path: str, body: Mapping[str, Any] | None) -> Any:
    """Make a call and return the JSON of its answer. Raises as :func:`call`."""
    data = b"" if body is None else json.dumps(body).encode()
    async with send(method, address, path, data) as response:
        answer = await response.body()
        if response.status != 200:
            raise refusal(response.status, answer)
        return json.loads(answer)


async def _read_stream(response: Response, exchange: Exchange, events: EventReader) -> None:
    loop = asyncio.get_running_loop()
    async for piece in response:
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
        body["messages"] = list(case.messages)
    else:
        body["prompt"] = case.prompt
    return body


def refusal(status: int, body: bytes) -> RequestFailed:
    """Return what a response of another status than 200 means."""
    text = error_text(body)
    if text is None:
        return RequestFailed(str(status), body[:200].decode(errors="replace"), is_typed=False)
    return failure.typed(f"{status} {text.partition(':')[0]}", text)
