"""An HTTP server whose every response a test has written."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

STREAM = b"HTTP/1.1 200 OK\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunk(data: str) -> bytes:
    return f"{len(data):x}\r\n{data}\r\n".encode()


def event(text: str, number: int | None = None) -> bytes:
    """An event with one token, whose id is the length of the text so far."""
    name = "" if number is None else f"id: {number}\n"
    body = f'{{"choices": [{{"index": 0, "text": "{text}", "token_ids": [1]}}]}}'
    return chunk(f"{name}data: {body}\n\n")


END = chunk("data: [DONE]\n\n") + b"0\r\n\r\n"


@asynccontextmanager
async def answering(responses: Sequence[bytes], requests: list[str]) -> AsyncIterator[str]:
    """Yield the address of a server that gives these responses in turn, each on a connection of its own, which it then
    closes; ``requests`` receives the heads."""
    left = list(responses)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = next(int(line.split(":")[1]) for line in head.split("\r\n") if line.startswith("Content-Length"))
        await reader.readexactly(length)
        requests.append(head)
        writer.write(left.pop(0))
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        host, port = server.sockets[0].getsockname()[:2]
        yield f"{host}:{port}"
