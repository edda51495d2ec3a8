"""Writes large responses in pieces, between which the event loop runs."""

import asyncio
from collections.abc import Iterator

from .http_exchange import JSON, HttpExchange
from .response_writer import Headers

PIECE_BYTES = 256 << 10
"""Bytes of an answer that are shaped or written in one turn of the event loop."""
_BLOCKS_PER_TURN = 32
"""A small block may take long to make too."""


async def respond_in_pieces(exchange: HttpExchange, body: Iterator[bytes], headers: Headers = ()) -> None:
    """Send a JSON response whose body is made in small blocks. The response begins after its last block was made, so an
    error that is raised meanwhile has a status of its own."""
    pieces: list[bytes] = []
    blocks, size = [], 0
    for number, block in enumerate(body, 1):
        blocks.append(block)
        if not number % _BLOCKS_PER_TURN:
            await asyncio.sleep(0)
        size += len(block)
        if size > PIECE_BYTES:
            pieces.append(b"".join(blocks))
            blocks, size = [], 0
            await asyncio.sleep(0)
    if not pieces:
        await exchange.respond(200, b"".join(blocks), headers=headers)
        return
    pieces.append(b"".join(blocks))
    length = str(sum(map(len, pieces))).encode()
    await exchange.start(200, [(b"content-type", JSON), (b"content-length", length), *headers])
    pieces.reverse()  # what was written is dropped
    while pieces:
        await exchange.write(pieces.pop())
        await asyncio.sleep(0)
    await exchange.finish()
