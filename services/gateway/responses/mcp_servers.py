"""The MCP servers that the operator names: reads their file, finds the server that a tool names, and keeps the lists of
their tools for a while."""

import asyncio
import hashlib
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from importlib import util
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta, Struct

from tokenloom.request import errors
from tokenloom.request.errors import InvalidArgument
from tokenloom.request.limits import DividedLimit, Reservation
from tokenloom.services.runtime.host.options import read_file

from ..encoding.sse import encode_json
from ..openapi.request_schemas import ResponsesRequest
from .mcp_tools import CallOutcome, Listing, McpTool, ToolFilter, check_headers, protocol_error, read_mcp_tool

if TYPE_CHECKING:
    from .mcp_session import McpSession

MAX_OPEN = 256
"""Responses of one gateway that may have tools of servers at the same time, which its tenants divide. Between two
rounds they hold none of the places of requests."""
MAX_BYTES = 64 << 20
"""Bytes of the conversations of these responses, which tenants divide too: they live as long as the response."""
MAX_CALLS = 128
"""Calls of one response that are run; a client may ask for fewer (``max_tool_calls``)."""
KEPT_SECONDS = 300.0
"""For so long a list of tools is used before the server is asked again."""
MAX_KEPT = 256
"""Lists of tools that are kept; the one that was asked for longest ago is dropped."""
_TOO_MANY_BYTES = "the responses that use the tools of servers hold too many bytes"
_Name = Annotated[str, Meta(min_length=1, max_length=64)]


class McpServer(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Describes a server as a table ``[[server]]`` of the file does."""

    name: _Name
    url: str
    headers_file: str | None = None
    """File of lines ``Name: value``, sent with every request; read for each connection, so that a token can change."""
    allowed_tools: tuple[str, ...] | None = None
    """The only tools that clients may have; None: all."""
    tenants: tuple[str, ...] | None = None
    """The only tenants that may use the server; None: all."""
    client_headers: bool = False
    """Whether the headers and the authorization that a client sends for this server are passed on to it."""
    timeout: Annotated[float, Meta(gt=0, le=3600)] = 60.0
    """Seconds for one list or call."""
    max_result_bytes: Annotated[int, Meta(ge=1)] = 256 << 10
    """Bytes of one result."""


class McpServers:
    """Knows the servers."""

    def __init__(self, servers: Sequence[McpServer], *, is_shared: bool) -> None:
        """``is_shared``: several tenants share the gateway."""
        self._servers = {server.name: server for server in servers}
        self._kept: OrderedDict[tuple[str, str], tuple[float, Listing]] = OrderedDict()
        self._places = DividedLimit(MAX_OPEN, is_divided=is_shared)
        self._bytes = DividedLimit(MAX_BYTES, is_divided=is_shared)
        self._open: Counter[str] = Counter()
        self._held: Counter[str] = Counter()  # bytes, by tenant

    @classmethod
    def load(cls, path: Path | None, *, is_shared: bool) -> "McpServers | None":
        """Return the servers of the operator's file; None without one. Raises ``InvalidArgument``."""
        if path is None:
            return None
        if util.find_spec("mcp") is None:
            raise _wrong("the package mcp is missing: pip install 'tokenloom[mcp]'")
        try:
            servers = [_checked(server, path.parent) for server in _read(path)]
        except ValueError as error:  # msgspec's errors too
            raise _wrong(f"{path.name}: {error}") from None
        names = Counter(server.name for server in servers)
        if twice := [name for name, number in names.items() if number > 1]:
            raise _wrong(f"{path.name}: the name {twice[0]!r} is given twice")
        return cls(servers, is_shared=is_shared)

    def tools_of(self, fields: ResponsesRequest, tenant: str) -> Mapping[int, McpTool]:
        """Return the tools whose server is named and open to the tenant, by their index. Raises ``InvalidArgument``.

        The client names a server by its URL, or without one by the operator's name, which is then the label.
        """
        found = {}
        for index, tool in enumerate(fields.tools or ()):
            if tool.get("type") == "mcp" and (server := self._find(tool, tenant)) is not None:
                takes = server.client_headers
                found[index] = read_mcp_tool(f"tools[{index}]", tool, server.name, takes_headers=takes)
        if len({tool.label for tool in found.values()}) < len(found):
            raise InvalidArgument("two servers in tools have the same server_label", "tools")
        return found

    @asynccontextmanager
    async def sessions(
        self, tools: Sequence[McpTool], tenant: str, num_bytes: int = 0
    ) -> "AsyncIterator[ServerSessions]":
        """Hold the connections of one response, whose conversation has so many bytes. Raises
        :class:`errors.ResourceExhausted` while too many are open, or hold too many bytes."""
        if (place := self._places.take(1, self._open[tenant])) is None:
            raise errors.ResourceExhausted("too many responses use the tools of servers; retry later")
        if (held := self.hold(tenant, num_bytes)) is None:
            place.release()
            raise errors.ResourceExhausted(f"{_TOO_MANY_BYTES}; retry later")
        self._open[tenant] += 1
        opened = ServerSessions(self, {tool.label: tool for tool in tools}, tenant, held)
        try:
            yield opened
        finally:
            place.release()
            self._open[tenant] -= 1
            self._held[tenant] -= held.amount
            held.release()
            if not self._open[tenant]:
                del self._open[tenant], self._held[tenant]
            await opened.close()

    def hold(self, tenant: str, num_bytes: int) -> Reservation | None:
        """Return so many bytes of a tenant's open response; None: there are none left."""
        if (held := self._bytes.take(num_bytes, self._held[tenant])) is not None:
            self._held[tenant] += num_bytes
        return held

    def server(self, name: str) -> McpServer:
        """Return the server of this name, which a tool was read for."""
        return self._servers[name]

    def kept(self, tool: McpTool, tenant: str) -> Listing | None:
        """Return the list of tools if it was asked for not long ago."""
        until, listing = self._kept.get(_key(tool, tenant), (0.0, None))
        return listing if until > asyncio.get_running_loop().time() else None

    def keep(self, tool: McpTool, tenant: str, listing: Listing) -> None:
        """Keep a list of tools for a while."""
        key = _key(tool, tenant)
        self._kept[key] = asyncio.get_running_loop().time() + KEPT_SECONDS, listing
        self._kept.move_to_end(key)
        while len(self._kept) > MAX_KEPT:
            self._kept.popitem(last=False)

    def _find(self, tool: Mapping[str, Any], tenant: str) -> McpServer | None:
        url, label = tool.get("server_url"), tool.get("server_label")
        for server in self._servers.values():
            is_named = server.name == label if url is None else isinstance(url, str) and _same(server.url, url)
            if is_named and (server.tenants is None or tenant in server.tenants):
                return server
        return None


class ServerSessions:
    """Holds the connections of one response: one for each of its tools, made when it is first needed."""

    def __init__(self, servers: McpServers, tools: Mapping[str, McpTool], tenant: str, held: Reservation) -> None:
        """``tools``: by label. ``held``: the bytes of the response, which grow with the results."""
        self._servers = servers
        self._tools = tools
        self._tenant = tenant
        self._held = held
        self._sessions: dict[str, McpSession] = {}

    async def list_tools(self, label: str) -> Listing:
        """Return the tools of a server that the operator lets clients have."""
        tool = self._tools[label]
        if (listing := self._servers.kept(tool, self._tenant)) is not None:
            return listing
        try:
            listing = await (await self._session(label)).list_tools()
        except InvalidArgument as error:
            return Listing(error=error.message)
        if listing.error is None:
            names = self._servers.server(tool.server).allowed_tools
            allowed = ToolFilter(None if names is None else frozenset(names))
            listing = Listing([each for each in listing.tools if allowed.has(each)])
            self._servers.keep(tool, self._tenant, listing)
        return listing

    async def call(self, label: str, name: str, arguments: dict[str, Any]) -> CallOutcome:
        """Run a tool of a server."""
        try:
            session = await self._session(label)
        except InvalidArgument as error:
            return CallOutcome(error=protocol_error(-32000, error.message))
        outcome = await session.call(name, arguments)
        if (more := self._servers.hold(self._tenant, len(outcome.output))) is None:
            return CallOutcome(error=protocol_error(-32000, f"{_TOO_MANY_BYTES}; the result is left out"))
        self._held.absorb(more)
        return outcome

    async def close(self) -> None:
        """End the connections."""
        await asyncio.gather(*(session.close() for session in self._sessions.values()))

    async def _session(self, label: str) -> "McpSession":
        from .mcp_session import McpSession  # draws the client's library

        if (session := self._sessions.get(label)) is not None:
            return session
        tool = self._tools[label]
        server = self._servers.server(tool.server)
        own = {} if server.headers_file is None else await asyncio.to_thread(read_headers, Path(server.headers_file))
        headers = {**tool.headers, **own}  # the operator's win
        session = McpSession(server.url, headers, timeout=server.timeout, max_bytes=server.max_result_bytes)
        return self._sessions.setdefault(label, session)


def read_headers(path: Path) -> dict[str, str]:
    """Return the headers in a file of lines ``Name: value``. Raises ``InvalidArgument``, whose message has none of the
    values."""
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        raise _wrong(f"the headers file {path.name} cannot be read") from None
    headers: dict[str, str] = {}
    for number, line in enumerate(lines, start=1):
        name, colon, value = line.partition(":")
        if not colon and line.strip() and not line.startswith("#"):
            raise _wrong(f"{path.name}, line {number}: expected `Name: value`")
        if colon and not line.startswith("#"):
            headers[name.strip().lower()] = value.strip()
    check_headers(f"--mcp-servers: {path.name}", headers)
    return headers


def _key(tool: McpTool, tenant: str) -> tuple[str, str]:
    """Return what a list of tools depends on. A server may list other tools for other headers, and what it lists for
    a tenant's own is no other tenant's."""
    if not tool.headers:
        return tool.server, ""
    return tool.server, hashlib.sha256(encode_json([tenant, sorted(tool.headers.items())])).hexdigest()


def _read(path: Path) -> list[McpServer]:
    values = read_file(path)
    tables = values.pop("server", None)
    if values or not isinstance(tables, list) or not tables:
        raise ValueError("must hold tables [[server]] only")
    named = [{str(key).replace("-", "_"): table[key] for key in table} for table in tables if isinstance(table, dict)]
    return [msgspec.convert(table, McpServer) for table in named]


def _checked(server: McpServer, directory: Path) -> McpServer:
    """Return a server whose headers file is found from the directory of the file that names it."""
    parts = urlsplit(server.url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.username or parts.fragment:
        raise ValueError(f"{server.name}: url must be http(s)://host[:port][/path], without a user")
    if server.headers_file is None:
        return server
    path = directory / server.headers_file
    read_headers(path)
    return msgspec.structs.replace(server, headers_file=str(path))


def _same(ours: str, theirs: str) -> bool:
    """Return whether two URLs are equal but for a slash at the end."""
    return ours.rstrip("/") == theirs.rstrip("/")


def _wrong(message: str) -> InvalidArgument:
    return InvalidArgument(f"--mcp-servers: {message}", "mcp_servers")
