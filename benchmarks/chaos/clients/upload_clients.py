"""Uploads files: the lines of a batch, and sounds that are transcribed."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any

from . import failure
from .answer import Progress, Sample
from .exchange import Exchange
from .http_request import ConnectionLost, ConnectionRefused, Response, send
from .mix import Case
from .openai_answer import EventReader
from .openai_clients import refusal, send_json
from .other_calls import constant

_POLL_SECONDS = 0.2
_BOUNDARY = "chaos"
FORM = {"Content-Type": f"multipart/form-data; boundary={_BOUNDARY}"}
"""The header of what :func:`form_of` returns."""
_URL = "/v1/completions"
_ENDED = ("completed", "failed", "expired", "cancelled")


class BatchClient:
    """Uploads a file, waits for its batch and reads the results. The gateway keeps the batch on its disk, so that this
    client calls again after the loss of a connection until the gateway is back."""

    name = "batch"
    transport = "batch"
    resumes = True
    moves = False
    is_special = True

    def __init__(self, gateways: Sequence[str], model: str) -> None:
        """``gateways``: their HTTP addresses, ``host:port``."""
        self._gateways = gateways
        self._model = model

    async def send(self, exchange: Exchange) -> None:
        """Keep one text with all results, in the order of the lines, as the answer."""
        call = _Calls(self._gateways[exchange.gateway], exchange)
        file = await call.upload(self._file(exchange.case.options["lines"]))
        fields = {"input_file_id": file["id"], "endpoint": _URL, "completion_window": "24h"}
        batch = _batch(await call.ask("POST", "/v1/batches", fields))
        while batch["status"] not in _ENDED:
            await asyncio.sleep(_POLL_SECONDS)
            batch = _batch(await call.ask("GET", f"/v1/batches/{batch['id']}"))
        if batch["status"] != "completed" or batch["error_file_id"] is not None:
            raise failure.typed(f"batch {batch['status']}", json.dumps(batch))
        results = await call.raw("GET", f"/v1/files/{batch['output_file_id']}/content")
        lines = sorted((json.loads(line) for line in results.splitlines()), key=lambda line: str(line["custom_id"]))
        exchange.answer.sample(0).text = json.dumps([constant(line) for line in lines], sort_keys=True)
        for stored in (file["id"], batch["output_file_id"]):
            await call.ask("DELETE", f"/v1/files/{stored}")

    async def close(self) -> None:
        """Do nothing: no connection stays open."""

    def _file(self, bodies: Sequence[Mapping[str, Any]]) -> bytes:
        lines = [
            {
                "custom_id": str(number),
                "method": "POST",
                "url": "/v1/completions",
                "body": {"model": self._model, **body},
            }
            for number, body in enumerate(bodies)
        ]
        data = "".join(json.dumps(line) + "\n" for line in lines).encode()
        return form_of({"purpose": "batch"}, "lines.jsonl", data)


def _batch(answer: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return an answer that is a batch. Raises ``RequestFailed`` for any other."""
    if answer.get("object") != "batch":
        raise failure.typed("no batch", json.dumps(answer))
    return answer


class TranscriptClient:
    """Uploads a sound, and uploads it again, to each gateway in turns, where its connection is lost before the answer
    is whole, as OpenAI's clients do."""

    name = "transcripts"
    transport = "transcripts"
    resumes = True
    moves = False
    is_special = True

    def __init__(self, gateways: Sequence[str], model: str) -> None:
        """``gateways``: their HTTP addresses, ``host:port``."""
        self._gateways = gateways
        self._model = model

    async def send(self, exchange: Exchange) -> None:
        """Keep the text of the answer: JSON, subtitles, or what the last event of a stream says."""
        case, at = exchange.case, exchange.gateway
        assert case.call is not None
        body = form_of({"model": self._model, **case.options["fields"]}, "sound.wav", case.options["file"])
        while True:
            address = self._gateways[at % len(self._gateways)]
            try:
                async with send("POST", address, case.call.split(" ")[1], body, FORM) as response:
                    exchange.answer.samples[0] = _sample(case, await _transcript(response, exchange))
                    return
            except ConnectionRefused:
                exchange.refused += 1
            except ConnectionLost:
                pass
            at += 1
            exchange.resumed += 1
            await asyncio.sleep(_POLL_SECONDS)

    async def close(self) -> None:
        """Do nothing: no connection stays open."""


def form_of(fields: Mapping[str, str], name: str, data: bytes) -> bytes:
    """Return the body of a form with fields and one file."""
    parts = [
        f'--{_BOUNDARY}\r\nContent-Disposition: form-data; name="{field}"\r\n\r\n{value}\r\n'
        for field, value in fields.items()
    ]
    file = f'--{_BOUNDARY}\r\nContent-Disposition: form-data; name="file"; filename="{name}"\r\n\r\n'
    return "".join([*parts, file]).encode() + data + f"\r\n--{_BOUNDARY}--\r\n".encode()


async def _transcript(response: Response, exchange: Exchange) -> str:
    if response.status != 200:
        raise refusal(response.status, await response.body())
    if exchange.case.streamed:
        return await _streamed(response, exchange.progress)
    return (await response.body()).decode()


def _sample(case: Case, text: str) -> Sample:
    """Return an answer without the figures that a step with other neighbours rounds differently, which are compared as
    log probabilities are."""
    if case.streamed or not case.options["fields"].get("response_format", "json").endswith("json"):
        return Sample(text=text)  # whatever it begins with
    answer = json.loads(text)
    figures = [part.pop(name) for part in answer.get("segments", ()) for name in ("avg_logprob", "no_speech_prob")]
    return Sample(text=json.dumps(answer, sort_keys=True), logprobs=figures)


async def _streamed(response: Response, progress: Progress) -> str:
    """Return the text of a stream's last event. Raises ``RequestFailed`` if it is not that of the others, or for an
    error event."""
    events, loop, text = EventReader(), asyncio.get_running_loop(), ""
    async for piece in response:
        for data in events.feed(piece):
            event = json.loads(data)
            progress.output(loop.time())
            if "error" in event:
                raise failure.typed(str(event["error"].get("code")), f"in the stream: {event['error']}")
            if event["type"] == "transcript.text.done":
                if event["text"] != text:
                    raise failure.typed("pieces", f"the pieces are {text!r}, the whole is {event['text']!r}")
                return text
            text += event["delta"]
    raise ConnectionLost("the stream ended before its last event")


class _Calls:
    """Makes calls of one gateway, again while it is away."""

    def __init__(self, address: str, exchange: Exchange) -> None:
        self._address = address
        self._exchange = exchange

    async def ask(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        while True:
            try:
                return await send_json(self._address, method, path, body)
            except (ConnectionRefused, ConnectionLost) as error:
                await self._wait(error)
            except failure.RequestFailed as error:
                if method != "DELETE" or not error.kind.startswith("404"):
                    raise
                return None  # an earlier call has removed it

    async def raw(self, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None) -> bytes:
        while True:
            try:
                async with send(method, self._address, path, body, headers or {}) as response:
                    answer = await response.body()
                    if response.status != 200:
                        raise failure.typed(str(response.status), answer[:200].decode(errors="replace"))
                    return answer
            except (ConnectionRefused, ConnectionLost) as error:
                await self._wait(error)

    async def upload(self, form: bytes) -> Any:
        """Upload again if the answer is lost: the file that may have arrived is not used."""
        return json.loads(await self.raw("POST", "/v1/files", form, FORM))

    async def _wait(self, error: Exception) -> None:
        self._exchange.resumed += 1
        await asyncio.sleep(_POLL_SECONDS)
