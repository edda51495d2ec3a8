"""A connection to an MCP server: what is wrong with an answer is not what was wrong with the one before."""

import pytest

pytest.importorskip("mcp")

from typing import Any

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
