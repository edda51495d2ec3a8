"""A connection to an MCP server: what is wrong with an answer is not what was wrong with the one before."""

import asyncio

import pytest

pytest.importorskip("mcp")

from typing import Any

from tests.services.gateway.fakes import SOON
from tests.services.gateway.responses.mcp_server import ToolServer
from tokenloom.services.gateway.responses.mcp_session import McpSession


class Overloaded(ToolServer):
    """Refuses one HTTP request if that is asked of it."""

    refuses = False

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and self.refuses:
            self.refuses = False
            await send({"type": "http.response.start", "status": 503, "headers": []})
            await send({"type": "http.response.body"})
            return
        await super().__call__(scope, receive, send)


async def test_a_connection_that_the_library_ends_while_it_is_made_is_reported_at_once() -> None:
    begun = asyncio.Event()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        begun.set()
        await reader.read()
        writer.close()

    async with await asyncio.start_server(accept, "127.0.0.1", 0) as silent:
        port = silent.sockets[0].getsockname()[1]
        session = McpSession(f"http://127.0.0.1:{port}/mcp", {}, timeout=3600, max_bytes=1000)
        asked = asyncio.create_task(session.list_tools())
        await asyncio.wait_for(begun.wait(), SOON)
        assert session._task is not None
        session._task.cancel()
        assert (await asyncio.wait_for(asked, SOON)).error == "the connection was not made"
        await session.close()


async def test_an_error_of_http_is_named_once() -> None:
    async with Overloaded().running() as server:
        session = McpSession(server.url, {}, timeout=30, max_bytes=100_000)
        assert len((await session.list_tools()).tools) == 5
        server.refuses = True
        outcomes = [await session.call("add", {"a": 1, "b": 2}) for _ in range(2)]
        outcomes.append(await session.call("large", {}))
        await session.close()
    kinds = [None if outcome.error is None else outcome.error["type"] for outcome in outcomes]
    assert kinds == ["http_error", None, "mcp_protocol_error"]
