"""Fields of chats that reach the template, the cache or the tools; and fields that have no effect, which are named."""

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.services.gateway.fakes import FakeMesh
from tests.services.gateway.openai.test_chat import post
from tokenloom.services.gateway.http.http_exchange import IGNORED_HEADER

IGNORED = IGNORED_HEADER.decode()
TOOLS: list[Any] = [{"type": "function", "function": {"name": name}} for name in ("get_weather", "get_time")]


def last_chat(mesh: FakeMesh) -> Any:
    (chat,) = [*mesh.tokenizer.chats, *mesh.second_tokenizer.chats]
    return chat


@pytest.mark.parametrize(
    ("fields", "variables"),
    [
        ({"reasoning_effort": "low"}, {"reasoning_effort": "low"}),
        ({"reasoning_effort": "none"}, {"reasoning_effort": "none", "enable_thinking": False}),
        ({"reasoning": {"effort": "high"}}, {"reasoning_effort": "high"}),
        ({"reasoning": {"enabled": False}}, {"enable_thinking": False}),
        ({"thinking": {"type": "disabled"}}, {"enable_thinking": False}),
        ({"thinking": {"type": "enabled"}}, {"enable_thinking": True}),
        ({"documents": [{"title": "t", "text": "x"}]}, {"documents": [{"title": "t", "text": "x"}]}),
        (
            {"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "mine"}},
            {"reasoning_effort": "mine"},
        ),
    ],
)
async def test_fields_become_variables_of_the_template(
    mesh: FakeMesh, http: httpx.AsyncClient, fields: dict[str, Any], variables: dict[str, Any]
) -> None:
    mesh.outputs.auto = ["x"]
    response = await post(http, **fields)
    assert response.status_code == 200
    assert IGNORED not in response.headers
    assert json.loads(last_chat(mesh).template_kwargs_json) == variables


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"reasoning": {"effort": 3}}, "reasoning.effort"),
        ({"reasoning": {"enabled": "yes"}}, "reasoning.enabled"),
        ({"thinking": {"type": "deep"}}, "thinking.type"),
        ({"documents": "text"}, "documents"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"cache_salt": 5}, "cache_salt"),
        ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
    ],
)
async def test_wrong_values_are_refused(http: httpx.AsyncClient, fields: dict[str, Any], param: str) -> None:
    response = await post(http, **fields)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


async def test_the_last_message_is_continued(mesh: FakeMesh, http: httpx.AsyncClient) -> None:
    mesh.outputs.auto = ["x"]
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Well,"}]
    assert (await post(http, messages=messages, continue_final_message=True)).status_code == 200
    chat = last_chat(mesh)
    assert (chat.continue_final_message, chat.add_generation_prompt) == (True, False)


async def test_a_refusal_is_text_of_a_past_turn(mesh: FakeMesh, http: httpx.AsyncClient) -> None:
    mesh.outputs.auto = ["x"]
    refused = {"role": "assistant", "content": [{"type": "refusal", "refusal": "I will not."}]}
    user = {"role": "user", "content": "hi"}
    assert (await post(http, messages=[user, refused, user])).status_code == 200
    assert json.loads(last_chat(mesh).messages_json)[1] == {"role": "assistant", "content": "I will not."}


@pytest.mark.parametrize("mode", ["auto", "required"])
async def test_only_the_allowed_tools_may_be_called(socket_dir: Path, mode: str) -> None:
    async with FakeMesh(socket_dir).gateway(tool_call_parser="hermes") as mesh, mesh.http() as http:
        allowed = {"mode": mode, "tools": [{"type": "function", "function": {"name": "get_time"}}]}
        choice = {"type": "allowed_tools", "allowed_tools": allowed}
        task = asyncio.create_task(post(http, tools=TOOLS, tool_choice=choice))
        request = await mesh.outputs.next_request()
        assert request.submit.sampling_params.HasField("structured_outputs") == (mode == "required")
        assert [tool["function"]["name"] for tool in json.loads(last_chat(mesh).tools_json)] == ["get_time"]
        request.answer("x")
        await task


async def test_fields_without_effect_are_named(mesh: FakeMesh, http: httpx.AsyncClient) -> None:
    mesh.outputs.auto = ["x"]
    fields = {"user": "me", "verbosity": "low", "metadata": None, "media_io_kwargs": {}, "größe": 1}
    response = await post(http, **fields)
    assert response.headers[IGNORED] == "user, verbosity, media_io_kwargs"
    streamed = await post(http, stream=True, web_search_options={})
    assert streamed.headers[IGNORED] == "web_search_options"
    text = await http.post("/v1/completions", json={"prompt": "a", "documents": [{}]})
    assert text.headers[IGNORED] == "documents"


async def test_a_response_and_a_message_name_them_too(mesh: FakeMesh, http: httpx.AsyncClient) -> None:
    mesh.outputs.auto = ["x"]
    body = {"input": "hi", "include": ["x"], "text": {"verbosity": "low"}, "user": "me"}
    response = await http.post("/v1/responses", json=body)
    assert response.headers[IGNORED] == "include, text.verbosity, user"
    message = {
        "max_tokens": 5,
        "messages": [{"role": "user", "content": "hi"}],
        "metadata": {"user_id": "me", "team": "a"},
    }
    assert (await http.post("/v1/messages", json=message)).headers[IGNORED] == "metadata.team"
