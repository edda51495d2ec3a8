"""Chat over HTTP: what a client gets, streamed and not."""

import asyncio
import json
from typing import Any

import httpx

from tests.services.gateway.fakes import EOS, MODEL, FakeMesh
from tokenloom.v1 import types_pb2

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}


async def post(http: httpx.AsyncClient, **fields: Any) -> httpx.Response:
    return await http.post("/v1/chat/completions", json={**CHAT, **fields})


def events(response: httpx.Response) -> list[dict[str, Any]]:
    *lines, done = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert done == "[DONE]"
    return [json.loads(line) for line in lines]


async def test_whole_answer(mesh: FakeMesh, http: httpx.AsyncClient) -> None:
    mesh.outputs.auto = ["Hel", "lo"]
    response = await post(http)
    body = response.json()
    assert response.status_code == 200
    assert body["object"] == "chat.completion"
    assert body["model"] == MODEL
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Hello"},
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
        }
    ]
    prompt_tokens = (
        len(mesh.tokenizer.chats[-1].messages_json)
        if mesh.tokenizer.chats
        else len(mesh.second_tokenizer.chats[-1].messages_json)
    )
    assert body["usage"] == {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": 5,
        "total_tokens": prompt_tokens + 5,
        "prompt_tokens_details": {"cached_tokens": 1},
    }
    assert "timeline" not in body


async def test_submit_carries_defaults_seed_and_end_tokens(mesh: FakeMesh, http: httpx.AsyncClient) -> None:
    task = asyncio.create_task(post(http, temperature=0, stop=["END"], stop_token_ids=[9]))
    request = await mesh.outputs.next_request()
    params = request.submit.sampling_params
    assert params.temperature == 0
    assert params.HasField("seed")
    assert params.top_k == 7  # of generation_config.json
    assert list(params.stop_token_ids) == [9, EOS]
    prompt_tokens = len(request.submit.prompt.token_ids)
    assert params.max_tokens == 512 - prompt_tokens
    assert list(request.submit.text.stop) == ["END"]
    assert 590 < request.submit.timeout.seconds <= 600
    request.answer("x", stop_reason="9")
    assert (await task).json()["choices"][0]["stop_reason"] == 9


async def test_ignore_eos_and_top_k_off(mesh: FakeMesh, http: httpx.AsyncClient) -> None:
    task = asyncio.create_task(post(http, ignore_eos=True, top_k=-1, seed=-1, max_completion_tokens=5))
    request = await mesh.outputs.next_request()
    params = request.submit.sampling_params
    assert list(params.stop_token_ids) == []
    assert params.top_k == 0
    assert params.seed == 2**64 - 1
    assert params.max_tokens == 5
    request.answer("x", reason=types_pb2.FINISH_REASON_LENGTH)
    assert (await task).json()["choices"][0]["finish_reason"] == "length"


async def test_stream_in_openais_order(mesh: FakeMesh, http: httpx.AsyncClient) -> None:
    mesh.outputs.auto = ['say "', "é\n"]
    response = await post(http, stream=True, stream_options={"include_usage": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    first, *deltas, finish, usage = events(response)
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(event["choices"][0]["delta"]["content"] for event in deltas) == 'say "é\n'
    assert finish["choices"][0]["delta"] == {}
    assert finish["choices"][0]["finish_reason"] == "stop"
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 7
    assert all(event["usage"] is None for event in [first, *deltas, finish])
    assert {event["id"] for event in [first, *deltas, finish, usage]} == {first["id"]}
    assert all(event["object"] == "chat.completion.chunk" for event in deltas)


async def test_stream_sends_text_as_it_arrives(mesh: FakeMesh, http: httpx.AsyncClient) -> None:
    body = {**CHAT, "stream": True}
    submitted = asyncio.create_task(mesh.outputs.next_request())
    async with asyncio.TaskGroup() as group:
        group.create_task(_feed_first(submitted))
        async with http.stream("POST", "/v1/chat/completions", json=body) as response:
            lines = response.aiter_lines()
            async for line in lines:
                if '"content":"first"' in line:
                    break
            request = await submitted
            request.answer("second")
            rest = [line async for line in lines]
    assert any('"content":"second"' in line for line in rest)


async def _feed_first(submitted: "asyncio.Task[Any]") -> None:
    (await submitted).send("first", [1])


async def test_stream_extras(mesh: FakeMesh, http: httpx.AsyncClient) -> None:
    mesh.outputs.auto = ["ab"]
    options = {"include_usage": True, "continuous_usage_stats": True}
    response = await post(http, stream=True, stream_options=options, return_token_ids=True, return_timeline=True)
    first, delta, finish, usage = events(response)
    assert len(first["prompt_token_ids"]) == first["usage"]["prompt_tokens"]
    assert delta["choices"][0]["token_ids"] == [97, 98]
    assert delta["usage"]["completion_tokens"] == 2
    assert "timeline" not in finish
    assert usage["timeline"]["queued_ms"] == 2.0
    assert usage["timeline"]["prefill_engine"] == "engine-0"
    assert usage["timeline"]["total_ms"] > 0


async def test_content_parts_are_joined(mesh: FakeMesh, http: httpx.AsyncClient) -> None:
    mesh.outputs.auto = ["x"]
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    response = await post(http, messages=[{"role": "user", "content": parts}])
    assert response.status_code == 200
    (chat,) = mesh.tokenizer.chats + mesh.second_tokenizer.chats
    assert json.loads(chat.messages_json) == [{"role": "user", "content": "one\ntwo"}]
