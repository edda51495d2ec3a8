"""Responses whose model calls tools of MCP servers, with real ones."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.loop_clock import pass_time, settle
from tests.services.gateway.fakes import MODEL, SOON, FakeMesh
from tokenloom.services.gateway.responses import mcp_servers
from tokenloom.v1 import types_pb2

pytest.importorskip("mcp", reason="the extra mcp is not installed")
from tests.services.gateway.responses.mcp_server import ToolServer

LIMITS = types_pb2.ModelLimits(max_model_len=1 << 20, vocab_size=256)


def call(name: str, **arguments: Any) -> str:
    """A call as the model writes it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


ADD = call("calc.add", a=2, b=3)


@asynccontextmanager
async def gateway(directory: Path, *servers: ToolServer, **of_server: Any) -> AsyncIterator[FakeMesh]:
    """A gateway whose operator names servers: calc, calc1 and so on."""
    tables = [{"name": f"calc{number or ''}", "url": server.url, **of_server} for number, server in enumerate(servers)]
    file = directory / "servers.json"
    file.write_text(json.dumps({"server": tables}))
    fake = FakeMesh(directory)
    fake.coordinator.limits = LIMITS
    async with fake.gateway(tool_call_parser="hermes", mcp_servers=file) as mesh:
        yield mesh


@asynccontextmanager
async def tools(directory: Path, number: int = 1, **of_server: Any) -> AsyncIterator[tuple[FakeMesh, list[ToolServer]]]:
    async with AsyncExitStack() as held:
        servers = [await held.enter_async_context(ToolServer().running()) for _ in range(number)]
        mesh = await held.enter_async_context(gateway(directory, *servers, **of_server))
        yield mesh, servers


def tool(server: ToolServer, **members: Any) -> dict[str, Any]:
    return {
        "type": "mcp",
        "server_label": "calc",
        "server_url": server.url,
        "require_approval": "never",
        **members,
    }


async def asked(mesh: FakeMesh, *answers: str | Sequence[str], **body: Any) -> dict[str, Any]:
    """The response, while the model gives these answers, one in each round."""
    async with mesh.http() as http:
        task = asyncio.create_task(http.post("/v1/responses", json={"model": MODEL, "input": "2+3?", **body}))
        for answer in answers:
            pieces = (answer,) if isinstance(answer, str) else answer
            (await mesh.outputs.next_request()).answer(*pieces)
        answered = await asyncio.wait_for(task, SOON)
    assert answered.status_code == 200, answered.text
    return answered.json()  # type: ignore[no-any-return]


def kinds(response: dict[str, Any]) -> list[str]:
    return [item["type"] for item in response["output"]]


def chats(mesh: FakeMesh) -> list[Any]:
    """The conversations that the tokenizers were given, in order."""
    return [json.loads(chat.messages_json) for chat in (*mesh.tokenizer.chats, *mesh.second_tokenizer.chats)]


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(SOON):
        while not holds():
            await settle()


async def test_the_model_calls_a_tool_and_answers(socket_dir: Path) -> None:
    async with tools(socket_dir) as (mesh, (server,)):
        response = await asked(mesh, ("I add. ", ADD[:30], ADD[30:]), "It is 5.", tools=[tool(server)])
    assert (response["status"], kinds(response)) == ("completed", ["mcp_list_tools", "message", "mcp_call", "message"])
    listed, _, ran, said = response["output"]
    assert {each["name"] for each in listed["tools"]} == {"add", "wait", "large", "die", "wrong"}
    assert (listed["server_label"], listed["error"]) == ("calc", None)
    assert (ran["server_label"], ran["name"], ran["status"]) == ("calc", "add", "completed")
    assert (json.loads(ran["arguments"]), ran["output"], ran["error"]) == ({"a": 2, "b": 3}, "5", None)
    assert said["content"][0]["text"] == "It is 5."
    assert server.calls == ["add"]
    first, second = sorted(chats(mesh), key=len)
    assert [turn["role"] for turn in first] == ["user"]
    assert [(turn["role"], turn["content"]) for turn in second[1:]] == [("assistant", "I add."), ("tool", "5")]
    # Both rounds count: 2 prompts, of which the fake has one token in the cache each, and both answers.
    assert response["usage"]["output_tokens"] == len("I add. ") + len(ADD) + len("It is 5.")
    assert response["usage"]["input_tokens_details"]["cached_tokens"] == 2
    assert response["usage"]["input_tokens"] == sum(
        len(json.dumps(chat, separators=(",", ":"))) for chat in chats(mesh)
    )


async def test_the_stream_as_openais_client_reads_it(socket_dir: Path) -> None:
    async with tools(socket_dir) as (mesh, (server,)):
        client = openai.AsyncOpenAI(base_url=f"http://{mesh.http_address}/v1", api_key="k", max_retries=0)
        mesh.outputs.auto = [ADD]

        async def read() -> tuple[list[Any], Any]:
            async with client.responses.stream(model=MODEL, input="2+3?", tools=[tool(server)]) as stream:  # type: ignore[list-item]
                events = []
                async for event in stream:
                    events.append(event)
                    if event.type == "response.mcp_call.in_progress":
                        mesh.outputs.auto = ["5."]
                return events, await stream.get_final_response()

        events, response = await asyncio.wait_for(read(), SOON)
        await client.close()
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type.removeprefix("response.") for event in events] == [
        *("created", "in_progress"),
        *("output_item.added", "mcp_list_tools.in_progress", "mcp_list_tools.completed", "output_item.done"),
        *("output_item.added", "mcp_call.in_progress", "mcp_call_arguments.delta", "mcp_call_arguments.done"),
        *("mcp_call.completed", "output_item.done"),
        *("output_item.added", "content_part.added", "output_text.delta", "output_text.done", "content_part.done"),
        *("output_item.done", "completed"),
    ]
    assert response.output_text == "5."
    assert [item.type for item in response.output] == ["mcp_list_tools", "mcp_call", "message"]


async def test_servers_that_the_operator_does_not_name_are_ignored_by_name(socket_dir: Path) -> None:
    async with tools(socket_dir) as (mesh, (server,)):
        mesh.outputs.auto = ["Hi."]
        other = {**tool(server), "server_url": server.url + "/other"}
        labelled = {"type": "mcp", "server_label": "other"}
        async with mesh.http() as http:
            for named in (other, labelled):
                answer = await http.post("/v1/responses", json={"model": MODEL, "input": "hi", "tools": [named]})
                assert answer.headers["x-tokenloom-ignored"] == "tools[].mcp"
                assert kinds(answer.json()) == ["message"]
    assert not server.headers


async def test_a_server_is_named_by_the_operators_name_too(socket_dir: Path) -> None:
    async with tools(socket_dir) as (mesh, _):
        named = {"type": "mcp", "server_label": "calc", "require_approval": "never"}
        response = await asked(mesh, ADD, "5", tools=[named])
    assert response["output"][1]["output"] == "5"


@pytest.mark.parametrize(
    ("filters", "names"),
    [
        ({"allowed_tools": ["add", "none"]}, {"add"}),
        ({"allowed_tools": {"tool_names": ["wrong"]}}, {"wrong"}),
        ({"allowed_tools": {"read_only": True}}, {"add"}),
    ],
)
async def test_the_client_allows_some_tools(socket_dir: Path, filters: dict[str, Any], names: set[str]) -> None:
    async with tools(socket_dir) as (mesh, (server,)):
        response = await asked(mesh, "Hi.", tools=[tool(server, **filters)])
        assert {each["name"] for each in response["output"][0]["tools"]} == names
        (chat,) = [*mesh.tokenizer.chats, *mesh.second_tokenizer.chats]
        assert {each["function"]["name"] for each in json.loads(chat.tools_json)} == {f"calc.{name}" for name in names}


async def test_the_operator_allows_some_tools(socket_dir: Path) -> None:
    async with tools(socket_dir, allowed_tools=["wrong"]) as (mesh, (server,)):
        # The model calls what it was not shown: its text holds no call of a function that it has.
        response = await asked(mesh, call("calc.wrong"), ADD, tools=[tool(server)])
    assert [each["name"] for each in response["output"][0]["tools"]] == ["wrong"]
    assert server.calls == ["wrong"]


async def test_an_approval_is_asked_for_and_given(socket_dir: Path) -> None:
    async with tools(socket_dir) as (mesh, (server,)):
        asking = tool(server, require_approval="always")
        first = await asked(mesh, ADD, tools=[asking])
        assert (first["status"], kinds(first)) == ("completed", ["mcp_list_tools", "mcp_approval_request"])
        request = first["output"][1]
        assert (request["name"], json.loads(request["arguments"])) == ("add", {"a": 2, "b": 3})
        assert not server.calls
        answer = {"type": "mcp_approval_response", "approval_request_id": request["id"], "approve": True}
        body: dict[str, Any] = {"input": [answer], "previous_response_id": first["id"], "tools": [asking]}
        second = await asked(mesh, "5.", **body)
        assert (kinds(second), server.calls) == (["mcp_call", "message"], ["add"])
        assert second["output"][0]["approval_request_id"] == request["id"]
        last = max(chats(mesh), key=len)
        assert [(turn["role"], turn["content"]) for turn in last] == [
            ("user", "2+3?"),
            ("assistant", ""),
            ("tool", "5"),
        ]
        # The same approval cannot run the call twice.
        async with mesh.http() as http:
            again = await http.post(
                "/v1/responses", json={"model": MODEL, **body, "previous_response_id": second["id"]}
            )
        assert (again.status_code, again.json()["error"]["param"]) == (400, "input[0].approval_request_id")
    assert server.calls == ["add"]


async def test_an_approval_without_a_stored_response(socket_dir: Path) -> None:
    """The client sends the items back."""
    async with tools(socket_dir) as (mesh, (server,)):
        asking = tool(server, require_approval={"never": {"tool_names": ["wrong"]}})
        user = {"role": "user", "content": "2+3?"}
        first = await asked(mesh, ADD, tools=[asking], input=[user], store=False)
        request = first["output"][1]
        answer = {"type": "mcp_approval_response", "approval_request_id": request["id"], "approve": True}
        second = await asked(mesh, "5.", tools=[asking], input=[user, *first["output"], answer], store=False)
        assert (kinds(second), server.calls, server.lists) == (["mcp_call", "message"], ["add"], 0)
        third = await asked(
            mesh, "Bye.", tools=[asking], input=[user, *first["output"][:1], *second["output"], user], store=False
        )
        assert kinds(third) == ["message"]
        last = max(chats(mesh), key=len)
        assert [turn["content"] for turn in last if turn["role"] == "tool"] == ["5"]


async def test_an_approval_that_is_not_given(socket_dir: Path) -> None:
    async with tools(socket_dir) as (mesh, (server,)):
        asking = tool(server, require_approval=None)
        first = await asked(mesh, ADD, tools=[asking])
        answer = {
            "type": "mcp_approval_response",
            "approval_request_id": first["output"][1]["id"],
            "approve": False,
            "reason": "Not now.",
        }
        second = await asked(mesh, "Well.", input=[answer], previous_response_id=first["id"], tools=[asking])
        assert (kinds(second), server.calls) == (["message"], [])
        assert max(chats(mesh), key=len)[-1]["content"] == "The user did not approve this call. Not now."


async def test_a_conversation_goes_on_after_calls(socket_dir: Path) -> None:
    async with tools(socket_dir) as (mesh, (server,)):
        first = await asked(mesh, ADD, "5.", tools=[tool(server)])
        second = await asked(mesh, "Bye.", input="Bye", previous_response_id=first["id"], tools=[tool(server)])
        assert kinds(second) == ["message"]  # the conversation lists the tools already
        last = max(chats(mesh), key=len)
        assert [turn["content"] for turn in last] == ["2+3?", "", "5", "5.", "Bye"]


async def test_calls_of_the_client_end_the_response(socket_dir: Path) -> None:
    own = {"type": "function", "name": "get_weather", "parameters": {"type": "object", "properties": {}}}
    async with tools(socket_dir) as (mesh, (server,)):
        first = await asked(mesh, ADD + call("get_weather"), tools=[own, tool(server)])
        assert kinds(first) == ["mcp_list_tools", "mcp_call", "function_call"]
        assert first["output"][1]["output"] == "5"
        result = {"type": "function_call_output", "call_id": first["output"][2]["call_id"], "output": "rain"}
        tools_ = [own, tool(server)]
        await asked(mesh, "Both.", input=[result], previous_response_id=first["id"], tools=tools_)
        last = max(chats(mesh), key=len)
        assert [turn["content"] for turn in last[1:]] == ["", "5", "rain"]
        assert len(last[1]["tool_calls"]) == 2


async def test_calls_run_side_by_side(socket_dir: Path) -> None:
    async with tools(socket_dir) as (mesh, (server,)):
        task = asyncio.create_task(asked(mesh, call("calc.wait") + ADD, "Done.", tools=[tool(server)]))
        await asyncio.wait_for(server.begun.wait(), SOON)
        await until(lambda: server.calls == ["wait", "add"])
        server.goes_on.set()
        response = await task
    assert [item["output"] for item in response["output"][1:3]] == ["waited", "5"]


async def test_lists_are_kept_for_a_while(socket_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mcp_servers, "KEPT_SECONDS", 5.0)
    async with tools(socket_dir) as (mesh, (server,)):
        await asked(mesh, "Hi.", tools=[tool(server)])
        seen = len(server.headers)
        await asked(mesh, "Hi.", tools=[tool(server)])
        assert len(server.headers) == seen
        pass_time(6.0)
        await asked(mesh, "Hi.", tools=[tool(server)])
        assert len(server.headers) > seen


async def test_a_forced_call_is_forced_once(socket_dir: Path) -> None:
    async with tools(socket_dir) as (mesh, (server,)):
        named = {"type": "mcp", "server_label": "calc", "name": "add"}
        async with mesh.http() as http:
            body = {"model": MODEL, "input": "2+3?", "tools": [tool(server)], "tool_choice": named}
            task = asyncio.create_task(http.post("/v1/responses", json=body))
            first = await mesh.outputs.next_request()
            assert first.submit.sampling_params.HasField("structured_outputs")
            first.answer(ADD)
            second = await mesh.outputs.next_request()
            assert not second.submit.sampling_params.HasField("structured_outputs")
            second.answer("5.")
            response = (await task).json()
    assert response["output"][1]["output"] == "5"


async def test_the_limit_of_calls(socket_dir: Path) -> None:
    async with tools(socket_dir) as (mesh, (server,)):
        response = await asked(mesh, ADD + ADD, "5.", tools=[tool(server)], max_tool_calls=1)
        last = max(chats(mesh), key=len)
    assert [item["status"] for item in response["output"][1:3]] == ["completed", "failed"]
    assert server.calls == ["add"]
    assert "not run" in last[-1]["content"]


async def test_the_headers_of_operator_and_client(socket_dir: Path) -> None:
    """The operator's win; a client's go to the server that it names, if the operator lets them through."""
    (socket_dir / "headers").write_text("# a comment\nX-Own: operator\n")
    async with tools(socket_dir, number=2, headers_file="headers", client_headers=True) as (mesh, servers):
        sent = {"headers": {"X-Own": "client", "X-Mine": "m1"}, "authorization": "secret"}
        mine = [tool(servers[0], **sent), {**tool(servers[1]), "server_label": "two"}]
        response = await asked(mesh, ADD, "5.", tools=mine)
    first, second = (server.headers[-1] for server in servers)
    assert (first["x-own"], first["x-mine"], first["authorization"]) == ("operator", "m1", "Bearer secret")
    assert second["x-own"] == "operator"
    assert "x-mine" not in second
    assert "authorization" not in second
    assert "secret" not in json.dumps(response)
    assert "m1" not in json.dumps(response)


async def test_headers_that_are_not_let_through_are_named(socket_dir: Path) -> None:
    async with tools(socket_dir) as (mesh, (server,)):
        mesh.outputs.auto = ["Hi."]
        body = {"model": MODEL, "input": "hi", "tools": [tool(server, authorization="secret")]}
        async with mesh.http() as http:
            answer = await http.post("/v1/responses", json=body)
    assert answer.headers["x-tokenloom-ignored"] == "tools[].authorization"
    assert all("authorization" not in headers for headers in server.headers)


async def test_a_tenant_has_its_own_servers(socket_dir: Path) -> None:
    async with tools(socket_dir, tenants=["other"]) as (mesh, (server,)):
        response = await asked(mesh, "Hi.", tools=[tool(server)])
    assert kinds(response) == ["message"]
    assert not server.headers


async def test_all_rounds_have_one_limit_of_tokens(socket_dir: Path) -> None:
    async with tools(socket_dir) as (mesh, (server,)), mesh.http() as http:
        body = {"model": MODEL, "input": "2+3?", "tools": [tool(server)], "max_output_tokens": 100}
        task = asyncio.create_task(http.post("/v1/responses", json=body))
        first = await mesh.outputs.next_request()
        first.answer(ADD)
        second = await mesh.outputs.next_request()
        second.answer("5.")
        await task
    limits = [request.submit.sampling_params.max_tokens for request in (first, second)]
    assert limits == [100, 100 - len(ADD)]


async def test_of_tools_with_one_name_the_clients_is_called_and_then_the_first(socket_dir: Path) -> None:
    async with tools(socket_dir) as (mesh, (server,)):
        functions = [{"type": "function", "name": "a_b.wrong", "parameters": {"type": "object"}}]
        servers = [tool(server, server_label="a b", require_approval="always"), tool(server, server_label="a_b")]
        both = call("a_b.add", a=2, b=3) + call("a_b.wrong")
        response = await asked(mesh, both, tools=[*functions, *servers])
    assert kinds(response)[-2:] == ["mcp_approval_request", "function_call"]
    assert not server.calls
    (chat,) = [*mesh.tokenizer.chats, *mesh.second_tokenizer.chats]
    names = [each["function"]["name"] for each in json.loads(chat.tools_json)]
    assert len(names) == len(set(names)) == 5


async def test_a_conversation_lists_tools_once(socket_dir: Path) -> None:
    async with tools(socket_dir) as (mesh, (server,)), mesh.http() as http:
        name = (await http.post("/v1/conversations", json={})).json()["id"]
        responses = [await asked(mesh, "Hi.", tools=[tool(server)], conversation=name) for _ in range(2)]
    assert [kinds(response) for response in responses] == [["mcp_list_tools", "message"], ["message"]]


async def test_the_calls_of_a_server_with_json_answers(socket_dir: Path) -> None:
    """Servers answer with events or with JSON, and keep a session or none."""
    running = ToolServer().running(json_response=True, stateless_http=True)
    async with running as server, gateway(socket_dir, server) as mesh:
        response = await asked(mesh, call("calc.large") + ADD, "5.", tools=[tool(server)])
    large, added = response["output"][1:3]
    assert (large["status"], added["output"]) == ("failed", "5")
