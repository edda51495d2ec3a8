"""A server with the part of ``vllm serve`` 0.32 that an engine of ours uses. It continues a prompt as the hash worker
does, so that tokens show whether a request was continued where another engine had left it."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Self

from tokenloom.engine_core.fake_workers.hash_worker import expected_tokens
from tokenloom.model_files.model_path import DEMO_MODEL

VOCAB_SIZE: int = json.loads((DEMO_MODEL / "config.json").read_text())["vocab_size"]
# The fields of vLLM's SamplingParams that a body may have; it refuses others.
KNOWN = frozenset(
    (
        *("n", "presence_penalty", "frequency_penalty", "repetition_penalty", "temperature", "top_p", "top_k", "min_p"),
        *("seed", "stop_token_ids", "ignore_eos", "max_tokens", "min_tokens", "logprobs", "prompt_logprobs"),
        *("detokenize", "logit_bias", "allowed_token_ids", "skip_reading_prefix_cache", "repetition_detection"),
        "structured_outputs",
    )
)


class FakeVLLM:
    """Runs while it is entered.

    Attributes:
        bodies: Of the requests to generate.
        num_open: Streams that have not ended.
        num_left: Streams whose client closed the connection before their end.
        after: Tokens of a stream before it waits for ``go``; None: none waits.
        failing: Requests ("GET /metrics") that are answered with status 503.
        change: Changes an event before it is sent, in tests of what no server may send.
    """

    def __init__(self, *, key: str = "", is_enabled: bool = True, version: str = "0.32.0", root: str = "") -> None:
        self.bodies: list[dict[str, Any]] = []
        self.num_open = self.num_left = 0
        self.after: int | None = None
        self.go = asyncio.Event()
        self.change: Callable[[dict[str, Any]], object] = lambda event: event
        self.is_well = True
        self.failing: set[str] = set()
        self.max_model_len = 256
        self.version = version
        self.port = 0
        self._key = key
        self._is_enabled = is_enabled
        self._root = root or str(DEMO_MODEL)
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.kill()

    async def start(self) -> None:
        """Listen, at the same port as before."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def kill(self) -> None:
        """Break all connections and refuse new ones, as a process that is killed does."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for writer in list(self._writers):
            writer.transport.abort()
        while self._writers:  # noqa: ASYNC110  # their tasks end in a few turns
            await asyncio.sleep(0)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            lines = head.split("\r\n")
            headers = dict(line.lower().split(": ", 1) for line in lines[1:] if line)
            body = await reader.readexactly(int(headers.get("content-length", 0)))
            await self._answer(lines[0].rsplit(" ", 1)[0], headers, body, reader, writer)
        self._writers.discard(writer)
        writer.close()

    async def _answer(
        self,
        request: str,
        headers: dict[str, str],
        body: bytes,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        is_allowed = not self._key or headers.get("authorization") == f"bearer {self._key.lower()}"
        match request:
            case _ if request in self.failing:
                _respond(writer, 503, b"busy")
            case "GET /health":
                _respond(writer, 200 if self.is_well else 503, b"")
            case "GET /version":
                _respond(writer, 200, json.dumps({"version": self.version}).encode())
            case "GET /metrics":
                page = b'vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="512"} 1.0\n'
                _respond(writer, 200, b"# HELP\n" + page)
            case _ if not is_allowed:
                _respond(writer, 401, b'{"error":"Unauthorized"}')
            case "GET /v1/models":
                models = [{"id": "served", "root": self._root, "parent": None, "max_model_len": self.max_model_len}]
                _respond(writer, 200, json.dumps({"object": "list", "data": models}).encode())
            case "POST /inference/v1/generate":
                await self._generate(json.loads(body), reader, writer)
            case _:
                _respond(writer, 404, b'{"detail":"Not Found"}')

    async def _generate(self, body: dict[str, Any], reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not self._is_enabled:
            _respond(writer, 403, b'{"error":{"message":"Scale-out endpoints are disabled.","code":403}}')
            return
        if not body:
            _respond(writer, 400, b'{"error":{"message":"token_ids: Field required","code":400}}')
            return
        if unknown := body["sampling_params"].keys() - KNOWN:
            _respond(writer, 400, json.dumps({"error": {"message": f"unknown: {sorted(unknown)}"}}).encode())
            return
        self.bodies.append(body)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        async with self._open(reader, writer) as gone:
            async for event in self._events(body, gone):
                if gone.done():
                    self.num_left += 1
                    return
                _chunk(writer, b"data: " + json.dumps(self.change(event)).encode() + b"\n\n")
                await writer.drain()
                await asyncio.sleep(0)
            _chunk(writer, b"data: [DONE]\n\n")
            _chunk(writer, b"")

    @asynccontextmanager
    async def _open(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> AsyncIterator["asyncio.Task[bytes]"]:
        """Yield what is done when the client has closed its connection."""
        self.num_open += 1
        gone = asyncio.ensure_future(reader.read(1))
        try:
            yield gone
        finally:
            self.num_open -= 1
            gone.cancel()
            with contextlib.suppress(asyncio.CancelledError, ConnectionError):
                await gone

    async def _events(self, body: dict[str, Any], gone: "asyncio.Task[bytes]") -> AsyncIterator[dict[str, Any]]:
        params = body["sampling_params"]
        most = params["max_tokens"]
        for index, token_id in enumerate(expected_tokens(body["token_ids"], most, VOCAB_SIZE)):
            if index == self.after:
                go = asyncio.ensure_future(self.go.wait())
                await asyncio.wait([go, gone], return_when=asyncio.FIRST_COMPLETED)
                go.cancel()
            is_stopped = token_id in params["stop_token_ids"] and index + 1 >= params["min_tokens"]
            finish = "stop" if is_stopped else "length" if index + 1 == most else None
            logprobs = None
            if "logprobs" in params:
                ranks = [{"token_id": each, "logprob": -1.0 - each, "rank": each + 1} for each in range(20)]
                sampled = {"token_id": token_id, "logprob": -0.5, "rank": token_id + 1}
                others = [each for each in ranks if each["token_id"] != token_id]
                top = [sampled, *others][: params["logprobs"]]
                logprobs = {"content": [{**sampled, "top_logprobs": top}]}
            choice = {
                "index": 0,
                "token_ids": [token_id],
                "finish_reason": finish,
                "stop_reason": token_id if is_stopped else None,
                "logprobs": logprobs,
            }
            yield {"request_id": "r", "output_mode": "tokens", "choices": [choice], "usage": None}
            if is_stopped:
                return


def _respond(writer: asyncio.StreamWriter, status: int, body: bytes) -> None:
    writer.write(b"HTTP/1.1 %d Status\r\ncontent-length: %d\r\n\r\n%b" % (status, len(body), body))


def _chunk(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(b"%x\r\n%b\r\n" % (len(data), data))
