"""One connection to an MCP server, for the length of one response. Imported only where the operator names a server."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from typing import Any, TypeVar

import httpx2
import mcp
import mcp_types
from mcp.client.streamable_http import streamable_http_client

from ..encoding.sse import encode_json
from .mcp_tools import CallOutcome, Listing, protocol_error

log = logging.getLogger(__name__)
# The libraries log whole URLs, and what a server has sent that cannot be read; what matters of it is in the answer.
logging.getLogger("mcp").setLevel(logging.CRITICAL)
logging.getLogger("httpx2").setLevel(logging.WARNING)

CLOSE_SECONDS = 1.0
"""A server that does not take leave within this time is left without."""
MAX_TOOLS = 128
"""Tools of one server, and pages of its list: a server that has more is asked for no further page."""
_MAX_MESSAGE = 500
_LOST = -32000
"""JSON-RPC's code for a connection that has ended."""
T = TypeVar("T")


class McpSession:
    """Asks one server. The connection is made by the first question, and again after it was lost."""

    def __init__(self, url: str, headers: Mapping[str, str], *, timeout: float, max_bytes: int) -> None:
        """``headers``: sent with every request to this server, and to no other. ``timeout``: seconds for one question,
        the connection included. ``max_bytes``: of one answer, and of the text made of it."""
        self._url = url
        self._headers = headers
        self._timeout = timeout
        self._max_bytes = max_bytes
        self._status = 0  # of the last HTTP response, if that was an error
        self._task: asyncio.Task[None] | None = None
        self._closing = asyncio.Event()
        self._client: asyncio.Future[mcp.Client] | None = None

    async def list_tools(self) -> Listing:
        """Return the server's tools, or why there are none. Raises nothing of the server's."""
        try:
            return Listing([_described(tool) for tool in await self._ask(_all_tools)])
        except Exception as error:
            return Listing(error=self._failure(error)["message"])

    async def call(self, name: str, arguments: dict[str, Any]) -> CallOutcome:
        """Run a tool and return its result as text, or its error. Raises nothing of the server's."""
        try:
            result = await self._ask(lambda client: client.call_tool(name, arguments))
        except Exception as error:
            return CallOutcome(error=self._failure(error))
        if result.is_error:
            content = [block.model_dump(mode="json", by_alias=True, exclude_none=True) for block in result.content]
            return CallOutcome(_text_of(result), {"type": "mcp_tool_execution_error", "content": content})
        text = _text_of(result)
        if len(text.encode()) > self._max_bytes:
            return CallOutcome(error=protocol_error(_LOST, f"the result has more than {self._max_bytes} bytes"))
        return CallOutcome(text)

    async def close(self) -> None:
        """End the connection, if there is one."""
        self._closing.set()
        if self._task is not None:
            await asyncio.wait({self._task}, timeout=CLOSE_SECONDS)
            self._task.cancel()
            await asyncio.wait({self._task}, timeout=CLOSE_SECONDS)

    async def _ask(self, question: Callable[[mcp.Client], Awaitable[T]]) -> T:
        """Return the server's answer. Raises what the library raises, and ``TimeoutError``."""
        async with asyncio.timeout(self._timeout):
            if self._task is None or self._task.done():
                self._status = 0
                self._client = asyncio.get_running_loop().create_future()
                self._task = asyncio.create_task(self._hold(self._client), name="connection to an MCP server")
            assert self._client is not None
            client, connection = await asyncio.shield(self._client), self._task
            asked = asyncio.ensure_future(question(client))
            try:
                # A server that dies ends the connection, whose questions the library would leave without an answer.
                await asyncio.wait({asked, connection}, return_when=asyncio.FIRST_COMPLETED)
                if not asked.done():
                    raise ConnectionError("the server ended the connection")
                return asked.result()
            finally:
                asked.cancel()

    async def _hold(self, client: "asyncio.Future[mcp.Client]") -> None:
        """Keep the connection until it is to be closed. A task of its own: the library cancels the task in which a
        connection is lost, and that must not be the response's."""
        try:
            async with AsyncExitStack() as stack:
                http = await stack.enter_async_context(self._http())
                streams = streamable_http_client(self._url, http_client=http, max_sse_event_size=self._max_bytes)
                opened = mcp.Client(streams, read_timeout_seconds=self._timeout, cache=None)
                client.set_result(await stack.enter_async_context(opened))
                await self._closing.wait()
        except Exception as error:
            if not client.done():
                client.set_exception(error)
                client.exception()  # the caller may have given up
            else:
                log.info("an MCP server ended a connection: %s", _first(error))
        finally:
            if not client.done():  # cancelled: a question would wait for as long as it may take
                client.set_exception(ConnectionError("the connection was not made"))
                client.exception()

    def _http(self) -> httpx2.AsyncClient:
        async def look(response: httpx2.Response) -> None:
            self._status = response.status_code if response.status_code >= 400 else 0
            if response.headers.get("content-encoding", "identity") != "identity":
                raise httpx2.DecodingError("the answer is compressed, though that was not asked for")
            assert isinstance(response.stream, httpx2.AsyncByteStream)
            response.stream = _BoundedStream(response.stream, self._max_bytes)

        # No variables of the environment: a proxy named there would see the headers. The size of compressed bodies is
        # not known before they are read.
        return httpx2.AsyncClient(
            headers={**self._headers, "accept-encoding": "identity"},
            timeout=httpx2.Timeout(self._timeout),
            trust_env=False,
            event_hooks={"response": [look]},
        )

    def _failure(self, error: Exception) -> dict[str, Any]:
        """Return an error as OpenAI's API types it."""
        if isinstance(error, TimeoutError):
            return protocol_error(_LOST, f"the server did not answer within {self._timeout:g} s")
        found = _first(error)
        message = str(found)[:_MAX_MESSAGE] or type(found).__name__
        if self._status:
            return {"type": "http_error", "code": self._status, "message": message}
        return protocol_error(found.code if isinstance(found, mcp.MCPError) else _LOST, message)


class _BoundedStream(httpx2.AsyncByteStream):
    """Fails once a body is too long: the library would hold whatever a server sends."""

    def __init__(self, stream: httpx2.AsyncByteStream, most: int) -> None:
        self._stream = stream
        self._most = most

    async def __aiter__(self) -> AsyncIterator[bytes]:
        num_bytes = 0
        async for piece in self._stream:
            num_bytes += len(piece)
            if num_bytes > self._most:
                raise httpx2.StreamError(f"the answer has more than {self._most} bytes")
            yield piece

    async def aclose(self) -> None:
        await self._stream.aclose()


async def _all_tools(client: mcp.Client) -> list[mcp_types.Tool]:
    tools: list[mcp_types.Tool] = []
    cursor: str | None = None
    for _ in range(MAX_TOOLS):
        page = await client.list_tools(cursor=cursor)
        tools += page.tools
        cursor = page.next_cursor
        if cursor is None or len(tools) >= MAX_TOOLS:
            break
    return tools[:MAX_TOOLS]


def _described(tool: mcp_types.Tool) -> dict[str, Any]:
    """Return a tool as an item of OpenAI's API lists it."""
    notes = tool.annotations
    return {
        "name": tool.name,
        "description": tool.description,
        "input_schema": tool.input_schema,
        "annotations": None if notes is None else notes.model_dump(mode="json", by_alias=True, exclude_none=True),
    }


def _text_of(result: mcp_types.CallToolResult) -> str:
    """Return a result as the model reads it. What is not text is named: models read text only."""
    texts = [_block_text(block) for block in result.content]
    if not texts and result.structured_content is not None:
        return encode_json(result.structured_content).decode()
    return "\n".join(texts)


def _block_text(block: Any) -> str:
    match block.type:
        case "text":
            return str(block.text)
        case "resource_link":
            return f"[resource {block.uri}]"
        case "resource":
            text = getattr(block.resource, "text", None)
            return f"[resource {block.resource.uri}]" if text is None else str(text)
        case _:
            return f"[{block.type}, which the model cannot read]"


def _first(error: BaseException) -> BaseException:
    """Return the first error of a group, however deep it stands."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
