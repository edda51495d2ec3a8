"""The operator's file of MCP servers, and which server a tool names. Needs no library of MCP."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tokenloom.request import errors
from tokenloom.request.errors import InvalidArgument
from tokenloom.services.gateway.openapi.request_schemas import ResponsesRequest
from tokenloom.services.gateway.responses import mcp_servers
from tokenloom.services.gateway.responses.mcp_servers import McpServer, McpServers, read_headers
from tokenloom.services.gateway.responses.mcp_tools import Listing, McpTool

URL = "https://tools.example/mcp"


@pytest.fixture(autouse=True)
def found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mcp_servers.util, "find_spec", lambda name: object())


def load(directory: Path, *tables: dict[str, Any], **top: Any) -> McpServers | None:
    file = directory / "servers.json"
    file.write_text(json.dumps({"server": list(tables), **top}))
    return McpServers.load(file, is_shared=False)


def named(servers: McpServers | None, *tools: dict[str, Any], tenant: str = "a") -> dict[int, str]:
    assert servers is not None
    fields = ResponsesRequest(input="hi", tools=[{"type": "mcp", **tool} for tool in tools])
    return {index: tool.server for index, tool in servers.tools_of(fields, tenant).items()}


def test_without_a_file_there_are_none() -> None:
    assert McpServers.load(None, is_shared=False) is None


def test_a_server_is_found_by_url_or_by_its_name(tmp_path: Path) -> None:
    servers = load(tmp_path, {"name": "one", "url": URL}, {"name": "two", "url": "http://10.0.0.1:80/mcp/"})
    by_url = {"server_label": "mine", "server_url": URL + "/"}
    assert named(servers, by_url, {"server_label": "two"}) == {0: "one", 1: "two"}
    elsewhere = {"server_label": "one", "server_url": "https://other.example/mcp"}
    connector = {"server_label": "drive", "connector_id": "connector_googledrive"}
    assert named(servers, elsewhere, connector, {"server_label": "three"}) == {}


def test_a_tenant_sees_only_its_servers(tmp_path: Path) -> None:
    servers = load(tmp_path, {"name": "one", "url": URL, "tenants": ["a"]})
    assert named(servers, {"server_label": "one"}, tenant="a") == {0: "one"}
    assert named(servers, {"server_label": "one", "server_url": URL}, tenant="b") == {}


def test_two_tools_with_one_label_are_refused(tmp_path: Path) -> None:
    servers = load(tmp_path, {"name": "one", "url": URL})
    with pytest.raises(InvalidArgument, match="the same server_label"):
        named(servers, {"server_label": "one"}, {"server_label": "one"})


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ([], "tables"),
        ([{"name": "one"}], "url"),
        ([{"name": "one", "url": "file:///etc/passwd"}], "http"),
        ([{"name": "one", "url": "https://user:secret@host/"}], "without a user"),
        ([{"name": "one", "url": URL, "timeout": 0}], "timeout"),
        ([{"name": "one", "url": URL, "token": "x"}], "unknown field"),
        ([{"name": "one", "url": URL, "headers-file": "none"}], "cannot be read"),
        ([{"name": "one", "url": URL}, {"name": "one", "url": URL}], "given twice"),
    ],
)
def test_a_wrong_file_is_refused_at_the_start(tmp_path: Path, tables: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(InvalidArgument, match=f"--mcp-servers: .*{message}"):
        load(tmp_path, *tables)


def test_the_library_must_be_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mcp_servers.util, "find_spec", lambda name: None)
    with pytest.raises(InvalidArgument, match=r"tokenloom\[mcp\]"):
        load(tmp_path, {"name": "one", "url": URL})


def test_a_file_of_headers(tmp_path: Path) -> None:
    file = tmp_path / "headers"
    file.write_text("# for the server\nAuthorization: Bearer a:b\n\nX-Team: blue\n")
    assert read_headers(file) == {"authorization": "Bearer a:b", "x-team": "blue"}
    file.write_text("secret without a name\n")
    with pytest.raises(InvalidArgument, match="line 1") as caught:
        read_headers(file)
    assert "secret" not in caught.value.message
    file.write_text("X-A: hidden\x01\n")
    with pytest.raises(InvalidArgument) as caught:
        read_headers(file)
    assert "hidden" not in caught.value.message


def tool(**headers: str) -> McpTool:
    server = McpServer(name="one", url=URL, client_headers=True)
    fields = ResponsesRequest(input="", tools=[{"type": "mcp", "server_label": "one", "headers": headers}])
    return McpServers([server], is_shared=False).tools_of(fields, "a")[0]


async def test_lists_are_kept_apart_by_the_clients_headers() -> None:
    servers = McpServers([McpServer(name="one", url=URL, client_headers=True)], is_shared=True)
    mine, other = Listing([{"name": "mine"}]), Listing([{"name": "other"}])
    servers.keep(tool(), "a", mine)
    assert servers.kept(tool(), "b") is mine  # the operator's headers alone
    servers.keep(tool(key="1"), "a", other)
    assert servers.kept(tool(key="1"), "a") is other
    assert servers.kept(tool(key="1"), "b") is None
    assert servers.kept(tool(key="2"), "a") is None


async def test_the_lists_that_are_kept_are_bounded() -> None:
    servers = McpServers([McpServer(name="one", url=URL, client_headers=True)], is_shared=True)
    for number in range(mcp_servers.MAX_KEPT + 1):
        servers.keep(tool(key=str(number)), "a", Listing())
    assert servers.kept(tool(key="0"), "a") is None
    assert servers.kept(tool(key="1"), "a") is not None


async def test_a_tenant_leaves_places_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mcp_servers, "MAX_OPEN", 4)
    servers = McpServers([McpServer(name="one", url=URL)], is_shared=True)

    async def opened(tenant: str) -> Callable[[], Any]:
        manager = servers.sessions([], tenant)
        await manager.__aenter__()
        return lambda: manager.__aexit__(None, None, None)

    held = [await opened("a"), await opened("a")]
    with pytest.raises(errors.ResourceExhausted):
        await opened("a")
    held.append(await opened("b"))
    for close in held:
        await close()
    assert servers._places.taken == 0
    assert not servers._open


async def test_the_bytes_of_conversations_are_bounded() -> None:
    servers = McpServers([McpServer(name="one", url=URL)], is_shared=True)
    async with servers.sessions([], "a", mcp_servers.MAX_BYTES // 2):
        with pytest.raises(errors.ResourceExhausted, match="bytes"):
            async with servers.sessions([], "a", mcp_servers.MAX_BYTES // 4):
                pass
        async with servers.sessions([], "b", mcp_servers.MAX_BYTES // 4):
            pass
    assert (servers._bytes.taken, servers._places.taken) == (0, 0)
    assert not servers._held
