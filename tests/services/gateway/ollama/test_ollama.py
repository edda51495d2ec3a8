"""Ollama's API over HTTP: lines and objects, tools, thinking, options, formats and errors."""

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.services.gateway.fakes import LIMITS, MODEL, FakeMesh
from tokenloom.request import errors
from tokenloom.v1 import types_pb2

BODY: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}}]
CALL = ("I ask.\n", '<tool_call>\n{"name": "get_', 'weather", "arguments": {"city"', ': "Oslo"}}\n</tool_call>')


def lines(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in response.text.splitlines()]


def last_chat(mesh: FakeMesh) -> Any:
    """The only conversation that a tokenizer was given since the last call."""
    (chat,) = [*mesh.tokenizer.chats, *mesh.second_tokenizer.chats]
    mesh.tokenizer.chats.clear()
    mesh.second_tokenizer.chats.clear()
    return chat


async def test_a_chat_is_streamed_in_lines(mesh: FakeMesh, http: httpx.AsyncClient) -> None:
    mesh.outputs.auto = ["Hel", "lo"]
    *parts, last = lines(await http.post("/api/chat", json=BODY))
    assert "".join(part["message"]["content"] for part in parts) == "Hello"
    assert not any(part["done"] for part in parts)
    assert (last["done"], last["done_reason"], last["eval_count"], last["model"]) == (True, "stop", 5, MODEL)
    assert last["prompt_eval_count"] > 0
    assert last["total_duration"] > 0


@pytest.mark.parametrize(
    ("reason", "named"), [(types_pb2.FINISH_REASON_LENGTH, "length"), (types_pb2.FINISH_REASON_ABORT, "abort")]
)
async def test_a_whole_chat_that_is_cut_off(
    mesh: FakeMesh, http: httpx.AsyncClient, reason: types_pb2.FinishReason, named: str
) -> None:
    task = asyncio.create_task(http.post("/api/chat", json={**BODY, "stream": False}))
    (await mesh.outputs.next_request()).answer("Hel", "lo", reason=reason)
    answer = (await task).json()
    assert answer["message"] == {"role": "assistant", "content": "Hello"}
    assert (answer["done"], answer["done_reason"]) == (True, named)


async def test_a_prompt_is_answered(mesh: FakeMesh, http: httpx.AsyncClient) -> None:
    mesh.outputs.auto = ["Hello"]
    body = {"model": MODEL, "prompt": "hi", "system": "Be brief."}
    *parts, last = lines(await http.post("/api/generate", json=body))
    assert "".join(part["response"] for part in parts) == "Hello"
    assert last["done"]
    system, user = json.loads(last_chat(mesh).messages_json)
    assert (system["content"], user["content"]) == ("Be brief.", "hi")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_and_its_result(socket_dir: Path, stream: bool) -> None:
    async with FakeMesh(socket_dir).gateway(tool_call_parser="hermes") as mesh, mesh.http() as http:
        mesh.outputs.auto = CALL
        response = await http.post("/api/chat", json={**BODY, "tools": TOOLS, "stream": stream})
        answers = lines(response) if stream else [response.json()]
        called = answers[-1]["message"]["tool_calls"]
        assert len(json.loads(last_chat(mesh).messages_json)) == 1
        assert called == [{"function": {"name": "get_weather", "arguments": {"city": "Oslo"}}}]
        turns = [*BODY["messages"], {"role": "assistant", "content": "", "tool_calls": called}]
        turns.append({"role": "tool", "tool_name": "get_weather", "content": "rain"})
        assert (await http.post("/api/chat", json={**BODY, "messages": turns})).status_code == 200
        _, calling, result = json.loads(last_chat(mesh).messages_json)
        assert calling["tool_calls"][0]["function"]["arguments"] == {"city": "Oslo"}
        assert (result["role"], result["name"], result["content"]) == ("tool", "get_weather", "rain")


async def test_thinking_stands_in_its_own_member(socket_dir: Path) -> None:
    async with FakeMesh(socket_dir).gateway(reasoning_parser="qwen3") as mesh, mesh.http() as http:
        mesh.outputs.auto = ["<think>Hm.</think>Yes."]
        body = {**BODY, "think": True, "stream": False}
        message = (await http.post("/api/chat", json=body)).json()["message"]
        assert (message["thinking"], message["content"]) == ("Hm.", "Yes.")
        assert json.loads(last_chat(mesh).template_kwargs_json) == {"enable_thinking": True}
        assert "thinking" not in (await http.post("/api/chat", json={**body, "think": False})).json()["message"]
        assert json.loads(last_chat(mesh).template_kwargs_json) == {"enable_thinking": False}
        await http.post("/api/chat", json={**body, "think": "low"})
        assert json.loads(last_chat(mesh).template_kwargs_json) == {"reasoning_effort": "low"}


async def test_options_and_formats_become_sampling_parameters(mesh: FakeMesh, http: httpx.AsyncClient) -> None:
    options = {"temperature": 0.5, "num_predict": 7, "repeat_penalty": 1.5, "stop": ["END"], "num_ctx": 64}
    body = {**BODY, "options": options, "format": SCHEMA, "keep_alive": "5m"}
    task = asyncio.create_task(http.post("/api/chat", json=body))
    request = await mesh.outputs.next_request()
    params = request.submit.sampling_params
    assert (params.temperature, params.max_tokens, params.repetition_penalty) == (0.5, 7, 1.5)
    assert json.loads(params.structured_outputs.json) == SCHEMA
    assert list(request.submit.text.stop) == ["END"]
    request.answer("{}")
    assert (await task).headers["x-tokenloom-ignored"] == "keep_alive, options.num_ctx"
    task = asyncio.create_task(http.post("/api/chat", json={**BODY, "options": {"num_predict": -1}, "format": "json"}))
    request = await mesh.outputs.next_request()
    assert request.submit.sampling_params.structured_outputs.json_object
    assert request.submit.sampling_params.max_tokens > 16
    request.answer("{}")
    await task


async def test_the_model_is_described(mesh: FakeMesh, http: httpx.AsyncClient) -> None:
    (tag,) = (await http.get("/api/tags")).json()["models"]
    assert (tag["name"], tag["model"]) == (MODEL, MODEL)
    shown = (await http.post("/api/show", json={"model": MODEL})).json()
    assert shown["capabilities"] == ["completion"]
    assert shown["model_info"]["tokenloom.context_length"] == LIMITS.max_model_len
    assert (await http.get("/api/version")).json()["version"]


@pytest.mark.parametrize(
    ("path", "fields", "status", "word"),
    [
        ("/api/chat", {"model": "other"}, 404, "other"),
        ("/api/chat", {"messages": []}, 400, "messages"),
        ("/api/chat", {"messages": [{"role": "user", "content": "a", "images": ["AA=="]}]}, 400, "images"),
        ("/api/chat", {"format": "xml"}, 400, "format"),
        ("/api/generate", {"prompt": "a", "raw": True}, 400, "raw"),
        ("/api/generate", {"prompt": "a", "images": ["AA=="]}, 400, "images"),
    ],
)
async def test_errors_have_ollamas_form(
    http: httpx.AsyncClient, path: str, fields: dict[str, Any], status: int, word: str
) -> None:
    response = await http.post(path, json={**BODY, **fields})
    assert response.status_code == status
    assert word in response.json()["error"]


async def test_an_error_within_a_stream_is_a_line(mesh: FakeMesh, http: httpx.AsyncClient) -> None:
    task = asyncio.create_task(http.post("/api/chat", json=BODY))
    request = await mesh.outputs.next_request()
    request.send("a", [97])
    request.fail(errors.Unavailable("the engine was lost"))
    assert lines(await task)[-1] == {"error": "the engine was lost"}
