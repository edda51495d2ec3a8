"""An OpenAI-like server that streams what a test tells it to, on a free port of this process."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any


class FakeServer:
    """Answers each POST with the next script: a status and pieces of a body, each sent by itself."""

    def __init__(self, scripts: Sequence[tuple[int, Sequence[bytes]]], *, keep_alive: bool = True) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.heads: list[str] = []
        self.connections = 0
        self.in_flight = self.most_in_flight = 0
        self.base_url = ""
        self._scripts = list(scripts)
        self._keep_alive = keep_alive

    @asynccontextmanager
    async def running(self) -> AsyncIterator["FakeServer"]:
        server = await asyncio.start_server(self._connection, "127.0.0.1", 0)
        async with server:
            self.base_url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            yield self

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while await self._request(reader, writer):
                pass
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _request(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = int(next(line.split(":")[1] for line in head.splitlines() if line.startswith("Content-Length")))
        self.heads.append(head)
        self.bodies.append(json.loads(await reader.readexactly(length)))
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        status, pieces = self._scripts.pop(0) if len(self._scripts) > 1 else self._scripts[0]
        kind = "text/event-stream" if status == 200 else "application/json"
        writer.write(f"HTTP/1.1 {status} X\r\nContent-Type: {kind}\r\nTransfer-Encoding: chunked\r\n\r\n".encode())
        for piece in pieces:
            if piece == CUT:
                self.in_flight -= 1
                return False
            writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
            await writer.drain()
            await asyncio.sleep(0)
        self.in_flight -= 1
        writer.write(b"0\r\n\r\n")
        return self._keep_alive


CUT = b"cut"
"""In a script: the connection breaks here."""


def event(**members: Any) -> bytes:
    return b"data: " + json.dumps(members).encode() + b"\n\n"


def text(piece: str) -> bytes:
    return event(choices=[{"index": 0, "text": piece, "finish_reason": None}])


def usage(prompt: int, completion: int) -> bytes:
    return event(choices=[], usage={"prompt_tokens": prompt, "completion_tokens": completion})


DONE = b"data: [DONE]\n\n"
ANSWER = (200, [text("a"), text("b"), text("c"), usage(4, 3), DONE])
