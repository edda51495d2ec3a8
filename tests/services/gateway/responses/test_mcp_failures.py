"""Tools of MCP servers that fail, hang or are away, and responses that end before their calls have."""

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.loop_clock import pass_time
from tests.services.gateway.fakes import MODEL, SOON
from tests.services.gateway.responses.test_mcp_rounds import ADD, asked, call, chats, gateway, kinds, tool, tools, until
from tokenloom.services.gateway.responses import mcp_servers
from tokenloom.v1 import types_pb2

pytest.importorskip("mcp", reason="the extra mcp is not installed")
from tests.services.gateway.responses.mcp_server import ToolServer


async def test_what_fails_is_an_error_of_its_item(socket_dir: Path) -> None:
    async with tools(socket_dir) as (mesh, (server,)):
        wrong = [
            call("calc.wrong"),
            call("calc.add", a="x"),
            '<tool_call>{"name": "calc.add", "arguments": 3}</tool_call>',
        ]
        response = await asked(mesh, "".join(wrong), "I see.", tools=[tool(server)])
    assert response["status"] == "completed"
    calls = response["output"][1:4]
    assert [item["status"] for item in calls] == ["failed"] * 3
    assert [item["error"]["type"] for item in calls] == ["mcp_tool_execution_error"] * 2 + ["mcp_protocol_error"]
    assert "no such city" in json.dumps(calls[0]["error"]["content"])
    results = [turn["content"] for turn in max(chats(mesh), key=len) if turn["role"] == "tool"]
    assert "no such city" in results[0]
    assert results[2] == "Error: the arguments are no JSON object"


async def test_a_result_of_20_mb_is_an_error(socket_dir: Path) -> None:
    async with tools(socket_dir) as (mesh, (server,)):
        response = await asked(mesh, call("calc.large") + ADD, "I see.", tools=[tool(server)])
    large, added = response["output"][1:3]
    assert (large["status"], large["error"]["type"]) == ("failed", "mcp_protocol_error")
    assert "262144" in large["error"]["message"]
    assert added["output"] == "5"


async def test_a_server_that_hangs_ends_its_call_only(socket_dir: Path) -> None:
    async with tools(socket_dir, timeout=5) as (mesh, (server,)):
        task = asyncio.create_task(asked(mesh, call("calc.wait"), "I see.", tools=[tool(server)]))
        await asyncio.wait_for(server.begun.wait(), SOON)
        pass_time(6.0)
        response = await task
    (ran,) = [item for item in response["output"] if item["type"] == "mcp_call"]
    assert ran["error"]["message"] == "the server did not answer within 5 s"
    assert response["status"] == "completed"


async def test_a_server_that_dies_ends_its_call_only(socket_dir: Path) -> None:
    async with tools(socket_dir) as (mesh, (server,)):
        response = await asked(mesh, call("calc.die"), ADD, "I see.", tools=[tool(server)])
    died, added = [item for item in response["output"] if item["type"] == "mcp_call"]
    assert (died["status"], added["status"], response["status"]) == ("failed", "failed", "completed")
    assert server.calls == ["die"]


async def test_a_server_that_is_away_lists_no_tools(socket_dir: Path) -> None:
    server = ToolServer()
    async with server.running():
        pass
    async with gateway(socket_dir, server) as mesh:
        response = await asked(mesh, "Hi.", tools=[tool(server)], tool_choice="required")
    assert (kinds(response), response["status"]) == (["mcp_list_tools", "message"], "completed")
    assert response["output"][0]["error"]


async def _ended(http: httpx.AsyncClient, response_id: str) -> dict[str, Any]:
    while True:
        found = (await http.get(f"/v1/responses/{response_id}")).json()
        if found["status"] not in ("queued", "in_progress"):
            return found  # type: ignore[no-any-return]


async def test_in_the_background(socket_dir: Path) -> None:
    async with tools(socket_dir) as (mesh, (server,)), mesh.http() as http:
        begun = await asked(mesh, tools=[tool(server)], background=True)
        (await mesh.outputs.next_request()).answer(ADD)
        (await mesh.outputs.next_request()).answer("5.")
        found = await asyncio.wait_for(_ended(http, begun["id"]), SOON)
    assert (found["status"], kinds(found)) == ("completed", ["mcp_list_tools", "mcp_call", "message"])


@pytest.mark.parametrize("background", [False, True])
async def test_a_cancelled_response_leaves_nothing(socket_dir: Path, background: bool) -> None:
    async with tools(socket_dir) as (mesh, (server,)), mesh.http() as http:
        body = {"model": MODEL, "input": "2+3?", "tools": [tool(server)], "background": background}
        task = asyncio.create_task(http.post("/v1/responses", json=body))
        (await mesh.outputs.next_request()).answer(call("calc.wait"))
        await asyncio.wait_for(server.begun.wait(), SOON)
        if background:
            cancelled = await http.post(f"/v1/responses/{(await task).json()['id']}/cancel")
            assert cancelled.json()["status"] == "cancelled"
        else:
            task.cancel()
            await asyncio.wait({task})
        await until(lambda: not _connections())
        assert mesh.outputs.requests.empty()


def _connections() -> list[asyncio.Task[Any]]:
    return [task for task in asyncio.all_tasks() if task.get_name() == "connection to an MCP server"]


async def test_a_key_cannot_repeat_it(socket_dir: Path) -> None:
    async with tools(socket_dir) as (mesh, (server,)), mesh.http() as http:
        body = {"model": MODEL, "input": "2+3?", "tools": [tool(server)]}
        answer = await http.post("/v1/responses", json=body, headers={"Idempotency-Key": "one"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tools")


async def test_a_call_that_is_cut_off_is_not_run(socket_dir: Path) -> None:
    async with tools(socket_dir) as (mesh, (server,)), mesh.http() as http:
        body = {"model": MODEL, "input": "2+3?", "tools": [tool(server)]}
        task = asyncio.create_task(http.post("/v1/responses", json=body))
        (await mesh.outputs.next_request()).answer(ADD[:-20], reason=types_pb2.FINISH_REASON_LENGTH)
        response = (await task).json()
    assert (response["status"], response["output"][-1]["status"]) == ("incomplete", "incomplete")
    assert not server.calls


async def test_results_count_among_the_bytes_that_are_held(socket_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mcp_servers, "MAX_BYTES", 100)
    async with tools(socket_dir) as (mesh, (server,)):
        wrong = call("calc.wrong")
        response = await asked(mesh, wrong, wrong, wrong, ADD, "Done.", tools=[tool(server)])
    messages = [str(item["error"]) for item in response["output"] if item["type"] == "mcp_call"]
    assert [message.count("too many bytes") for message in messages] == [0, 1, 1, 0], messages
