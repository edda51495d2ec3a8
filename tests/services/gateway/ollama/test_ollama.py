"""Ollama's API over HTTP: lines and objects, tools, thinking, options, formats and errors."""

import asyncio
import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.services.gateway.fakes import LIMITS, MODEL, WEIGHT_BYTES, FakeMesh
from tokenloom.request import errors
from tokenloom.request.tool_format import FORMATS
from tokenloom.services.gateway.ollama.ollama import number_calls
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


@pytest.mark.parametrize(
    ("reason", "arguments"),
    [(types_pb2.FINISH_REASON_STOP, {"INVALID_JSON": '{"city"'}), (types_pb2.FINISH_REASON_LENGTH, {})],
)
async def test_a_stop_string_within_arguments_leaves_no_empty_input(
    socket_dir: Path, reason: types_pb2.FinishReason, arguments: dict[str, Any]
) -> None:
    async with FakeMesh(socket_dir).gateway(tool_call_parser="hermes") as mesh, mesh.http() as http:
        body = {**BODY, "tools": TOOLS, "stream": False, "options": {"stop": [":"]}}
        task = asyncio.create_task(http.post("/api/chat", json=body))
        stop = ":" if reason == types_pb2.FINISH_REASON_STOP else ""
        (await mesh.outputs.next_request()).answer(*CALL[:3], reason=reason, stop_reason=stop)
        (call,) = (await task).json()["message"]["tool_calls"]
        assert call["function"]["arguments"] == arguments


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
        called = answers[-2 if stream else -1]["message"]["tool_calls"]
        assert answers[-1]["done"]
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
    assert (tag["name"], tag["model"], tag["size"]) == (MODEL, MODEL, WEIGHT_BYTES)
    assert len(bytes.fromhex(tag["digest"])) == 32
    assert abs(datetime.now(UTC) - datetime.fromisoformat(tag["modified_at"])) < timedelta(days=1)
    (running,) = (await http.get("/api/ps")).json()["models"]
    assert running.items() >= {name: tag[name] for name in ("name", "model", "size", "digest", "details")}.items()
    assert running["context_length"] == LIMITS.max_model_len
    shown = (await http.post("/api/show", json={"model": f"{MODEL}:latest"})).json()
    assert shown["capabilities"] == ["completion"]
    assert shown["model_info"]["tokenloom.context_length"] == LIMITS.max_model_len
    version = (await http.get("/api/version")).json()["version"]
    assert tuple(map(int, version.split("."))) >= (0, 6, 4)  # what Copilot asks for


async def test_a_body_is_read_whatever_its_type(mesh: FakeMesh, http: httpx.AsyncClient) -> None:
    mesh.outputs.auto = ["Hello"]
    for kind in ("application/x-www-form-urlencoded", "text/plain", None):
        headers = {} if kind is None else {"content-type": kind}
        response = await http.post("/api/chat", content=json.dumps(BODY), headers=headers)
        assert response.status_code == 200, kind
        refused = await http.post("/v1/chat/completions", content=json.dumps(BODY), headers=headers)
        assert refused.status_code == 415, kind
        foreign = await http.post("/api/chat", content=json.dumps(BODY), headers={"origin": "http://evil", **headers})
        assert foreign.status_code == 403, kind


@pytest.mark.parametrize(
    ("path", "fields", "reason"),
    [
        ("/api/chat", {"messages": []}, "load"),
        ("/api/chat", {"messages": [], "keep_alive": 0}, "unload"),
        ("/api/generate", {}, "load"),
        ("/api/generate", {"prompt": "", "keep_alive": "5m"}, "load"),
        ("/api/generate", {"keep_alive": "0s"}, "unload"),
    ],
)
async def test_a_request_without_a_prompt_loads_or_unloads(
    http: httpx.AsyncClient, path: str, fields: dict[str, Any], reason: str
) -> None:
    answer = (await http.post(path, json={"model": MODEL, **fields})).json()
    assert (answer["done"], answer["done_reason"], answer["model"]) == (True, reason, MODEL)
    assert (answer["message"]["content"] if path == "/api/chat" else answer["response"]) == ""


async def test_a_limit_beyond_the_context_is_cut(mesh: FakeMesh, http: httpx.AsyncClient) -> None:
    for limit in (100_000, 0, -1, -2):
        task = asyncio.create_task(http.post("/api/chat", json={**BODY, "options": {"num_predict": limit}}))
        request = await mesh.outputs.next_request()
        left = LIMITS.max_model_len - len(request.submit.prompt.token_ids)
        assert request.submit.sampling_params.max_tokens == left
        request.answer("x")
        assert (await task).status_code == 200


async def test_a_raw_prompt_is_not_rendered(mesh: FakeMesh, http: httpx.AsyncClient) -> None:
    body = {"model": MODEL, "prompt": "[INST] hi", "raw": True, "stream": False, "options": {"seed": 3}}
    task = asyncio.create_task(http.post("/api/generate", json=body))
    request = await mesh.outputs.next_request()
    assert bytes(request.submit.prompt.token_ids) == b"[INST] hi"
    assert request.submit.sampling_params.seed == 3
    assert request.submit.sampling_params.max_tokens == LIMITS.max_model_len - len("[INST] hi")
    request.answer("<think>a")
    assert (await task).json()["response"] == "<think>a"


async def test_durations_are_those_of_the_prompt_and_of_the_answer(mesh: FakeMesh, http: httpx.AsyncClient) -> None:
    task = asyncio.create_task(http.post("/api/chat", json={**BODY, "stream": False}))
    request = await mesh.outputs.next_request()
    request.send("Hello", [1, 2, 3, 4, 5])
    request.finish(timeline=types_pb2.Timeline(placement_ns=1, queued_ns=2, prefill_ns=30))
    answer = (await task).json()
    assert (answer["prompt_eval_duration"], answer["eval_count"]) == (30, 5)
    assert answer["load_duration"] >= 3
    parts = answer["load_duration"] + answer["prompt_eval_duration"] + answer["eval_duration"]
    assert parts == answer["total_duration"]


async def test_a_served_model_need_not_be_pulled(http: httpx.AsyncClient) -> None:
    whole = await http.post("/api/pull", json={"model": MODEL, "stream": False})
    assert whole.json() == {"status": "success"}
    assert lines(await http.post("/api/pull", json={"name": f"{MODEL}:latest"}))[-1] == {"status": "success"}


@pytest.mark.parametrize(
    ("path", "fields", "status", "word"),
    [
        ("/api/chat", {"model": "other"}, 404, "other"),
        ("/api/chat", {"messages": [{"role": "user", "content": "a", "images": ["AA=="]}]}, 400, "images"),
        ("/api/chat", {"format": "xml"}, 400, "format"),
        ("/api/chat", {"raw": True}, 400, "raw"),
        ("/api/chat", {"options": {"num_predict": "x"}}, 400, "options.num_predict"),
        ("/api/chat", {"options": {"temperature": -1}}, 400, "temperature"),
        ("/api/generate", {"prompt": "a", "suffix": "b"}, 400, "suffix"),
        ("/api/show", {"model": "other"}, 404, "other"),
        ("/api/pull", {"model": "other"}, 404, "other"),
        ("/api/create", {"model": "other"}, 400, "operator"),
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


def test_calls_and_results_get_the_ids_that_a_template_needs() -> None:
    functions = [{"function": {"name": name, "arguments": {}}} for name in ("read", "list", "read")]
    turns: list[dict[str, Any]] = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "", "tool_calls": functions},
        *({"role": "tool", "content": "x", "name": name} for name in ("list", "read", "other")),
        {"role": "assistant", "content": "", "tool_calls": [{**functions[0], "id": "mine"}, 3, {"function": 4}]},
        {"role": "tool", "content": "x"},
        {"role": "tool", "content": "of no call"},
    ]
    number_calls(turns, FORMATS["kimi_k2"])
    ids = ["functions.read:0", "functions.list:1", "functions.read:2"]
    assert [call["id"] for call in turns[1]["tool_calls"]] == ids
    assert [turn.get("tool_call_id") for turn in turns if turn["role"] == "tool"] == [
        ids[1],
        ids[0],
        ids[2],
        "mine",
        None,
    ]
    assert "id" not in functions[0], "the client's own body stays"
    number_calls(again := [{"role": "assistant", "tool_calls": functions}], FORMATS["mistral"])
    assert [call["id"] for call in again[0]["tool_calls"]] == ["000000000", "000000001", "000000002"]  # type: ignore[attr-defined]
