"""A real MCP server on loopback, made with the library that users make theirs with."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import uvicorn
from mcp.server.mcpserver import Context, MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp_types import ToolAnnotations

LARGE_BYTES = 20_000_000


class ToolServer:
    """Has a few tools, and says what it was asked.

    Attributes:
        calls: The names of tools that were called, in order.
        headers: Those of the requests, in order.
        begun: Set once a tool is called that waits.
        goes_on: Lets it go on.
    """

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.lists = 0
        self.headers: list[dict[str, str]] = []
        self.begun = asyncio.Event()
        self.goes_on = asyncio.Event()
        self.url = ""
        self._http: uvicorn.Server | None = None
        self._mcp = MCPServer("tools")
        read_only = ToolAnnotations(read_only_hint=True)
        for tool in (self.add, self.wait, self.large, self.die, self.wrong):
            self._mcp.add_tool(tool, annotations=read_only if tool == self.add else None)

    async def add(self, a: int, b: int) -> str:
        """Adds two numbers."""
        self.calls.append("add")
        return str(a + b)

    async def wait(self, ctx: Context) -> str:
        """Answers when the test lets it."""
        self.calls.append("wait")
        self.begun.set()
        await self.goes_on.wait()
        return "waited"

    async def large(self) -> str:
        """Answers with more than anybody reads."""
        self.calls.append("large")
        return "x" * LARGE_BYTES

    async def wrong(self) -> str:
        """Fails."""
        self.calls.append("wrong")
        raise ToolError("no such city")

    async def die(self) -> str:
        """Ends every connection, and accepts no other."""
        self.calls.append("die")
        assert self._http is not None
        for server in self._http.servers:
            server.close()
        for connection in list(self._http.server_state.connections):
            connection.transport.abort()  # type: ignore[union-attr]
        return ""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """The application: notes the headers of each request."""
        if scope["type"] == "http":
            self.headers.append({name.decode(): value.decode() for name, value in scope["headers"]})
        await self._app(scope, receive, send)

    @asynccontextmanager
    async def running(self, **options: Any) -> AsyncIterator["ToolServer"]:
        """Serve for the length of the block. ``options``: of the library's application."""
        self._app = self._mcp.streamable_http_app(**options)
        config = uvicorn.Config(self, port=0, log_config=None, timeout_graceful_shutdown=1)
        config.lifespan = "on"
        self._http = uvicorn.Server(config)
        self._http.config.load()
        self._http.lifespan = config.lifespan_class(config)
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
        await self._http.startup()
        port = self._http.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{port}/mcp"
        try:
            yield self
        finally:
            self.goes_on.set()
            await self._http.shutdown()
