"""Has the lines of a file answered as a batch."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any

from . import failure
from .exchange import Exchange
from .http_request import ConnectionLost, ConnectionRefused, send
from .openai_clients import send_json
from .other_calls import constant

_POLL_SECONDS = 0.2
_BOUNDARY = "chaos"
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
        batch = await call.ask("POST", "/v1/batches", fields)
        while batch["status"] not in _ENDED:
            await asyncio.sleep(_POLL_SECONDS)
            batch = await call.ask("GET", f"/v1/batches/{batch['id']}")
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
        head = (
            f'--{_BOUNDARY}\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
            f'--{_BOUNDARY}\r\nContent-Disposition: form-data; name="file"; filename="lines.jsonl"\r\n\r\n'
        )
        return "".join([head, *(json.dumps(line) + "\n" for line in lines), f"\r\n--{_BOUNDARY}--\r\n"]).encode()


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
        headers = {"Content-Type": f"multipart/form-data; boundary={_BOUNDARY}"}
        return json.loads(await self.raw("POST", "/v1/files", form, headers))

    async def _wait(self, error: Exception) -> None:
        self._exchange.resumed += 1
        await asyncio.sleep(_POLL_SECONDS)
