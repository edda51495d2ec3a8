"""Text in, text out, through all five services: the tokens are those that the prompt's hash chain gives."""

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.mesh.harness import MAX_MODEL_LEN, MODEL, Mesh
from tests.ready_channel import ready_channel
from tokenloom.v1 import inference_pb2, inference_pb2_grpc, types_pb2

pytestmark = pytest.mark.asyncio(loop_scope="module")

COMMON = {"model": MODEL, "return_token_ids": True, "ignore_eos": True}


async def complete(http: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    response = await http.post("/v1/completions", json={**COMMON, **fields})
    assert response.status_code == 200, response.text
    result: dict[str, Any] = response.json()
    return result


async def stream(http: httpx.AsyncClient, path: str, **fields: Any) -> list[dict[str, Any]]:
    body = {**COMMON, "stream": True, "stream_options": {"include_usage": True}, **fields}
    async with http.stream("POST", path, json=body) as response:
        assert response.status_code == 200, await response.aread()
        lines = [line.removeprefix("data: ") async for line in response.aiter_lines() if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


async def test_completion(mesh: Mesh, http: httpx.AsyncClient) -> None:
    body = await complete(http, prompt="Once upon a time", max_tokens=20)
    (choice,) = body["choices"]
    prompt_ids = mesh.encode("Once upon a time")
    assert choice["prompt_token_ids"] == prompt_ids
    assert choice["token_ids"] == mesh.expected(prompt_ids, 20)
    assert choice["text"] == mesh.tokenizer.decode(choice["token_ids"], skip_special_tokens=True)
    assert choice["finish_reason"] == "length"
    assert body["usage"]["completion_tokens"] == 20
    assert body["usage"]["prompt_tokens"] == len(prompt_ids)


async def test_several_prompts_interleave_by_index(mesh: Mesh, http: httpx.AsyncClient) -> None:
    prompts = [[1, 2, 3], list(range(10, 60)), [7] * 20]
    events = await stream(http, "/v1/completions", prompt=prompts, max_tokens=30)
    *outputs, usage = events
    texts, ids = ["", "", ""], [list[int]() for _ in prompts]
    finished = set()
    for event in outputs:
        (choice,) = event["choices"]
        assert choice["index"] not in finished
        texts[choice["index"]] += choice["text"]
        ids[choice["index"]] += choice["token_ids"]
        if choice["finish_reason"]:
            finished.add(choice["index"])
    assert finished == {0, 1, 2}
    assert ids == [mesh.expected(prompt, 30) for prompt in prompts]
    assert texts == [mesh.tokenizer.decode(output, skip_special_tokens=True) for output in ids]
    assert usage["usage"] == {
        "prompt_tokens": 73,
        "completion_tokens": 90,
        "total_tokens": 163,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    # The whole answer is the same.
    whole = await complete(http, prompt=prompts, max_tokens=30)
    assert [choice["text"] for choice in whole["choices"]] == texts
    assert whole["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


async def test_chat_streams_the_whole_answers_text(http: httpx.AsyncClient) -> None:
    messages = [{"role": "user", "content": "Tell me a story."}]
    fields: dict[str, Any] = {"messages": messages, "max_tokens": 40, "return_timeline": True}
    first, *deltas, finish, usage = await stream(http, "/v1/chat/completions", **fields)
    whole = (await http.post("/v1/chat/completions", json={**COMMON, **fields})).json()
    (choice,) = whole["choices"]
    assert first["choices"][0]["delta"]["role"] == "assistant"
    assert "".join(event["choices"][0]["delta"]["content"] for event in deltas) == choice["message"]["content"]
    assert [i for event in deltas for i in event["choices"][0]["token_ids"]] == choice["token_ids"]
    assert finish["choices"][0]["finish_reason"] == "length"
    assert usage["usage"]["completion_tokens"] == 40 == whole["usage"]["completion_tokens"]
    times = usage["timeline"]
    assert times["prefill_engine"] == "engine-0"
    assert times["total_ms"] >= times["prefill_ms"] + times["decode_ms"]
    assert times["tokenize_ms"] > 0


async def test_stop_string_ends_the_answer(mesh: Mesh, http: httpx.AsyncClient) -> None:
    text = (await complete(http, prompt=[5, 6, 7], max_tokens=60))["choices"][0]["text"]
    stop = text[len(text) // 2 :][:4]
    body = await complete(http, prompt=[5, 6, 7], max_tokens=60, stop=["never there", stop])
    (choice,) = body["choices"]
    assert choice["text"] == text[: text.index(stop)]
    assert choice["finish_reason"] == "stop"
    assert choice["stop_reason"] == stop
    assert choice["token_ids"] == mesh.expected([5, 6, 7], len(choice["token_ids"]))
    assert body["usage"]["completion_tokens"] == len(choice["token_ids"]) < 60
    kept = await complete(http, prompt=[5, 6, 7], max_tokens=60, stop=stop, include_stop_str_in_output=True)
    assert kept["choices"][0]["text"] == text[: text.index(stop)] + stop
    await mesh.until_idle()


async def test_stop_token_ends_the_answer(mesh: Mesh, http: httpx.AsyncClient) -> None:
    tokens = mesh.expected([5, 6, 7], 30)
    body = await complete(http, prompt=[5, 6, 7], max_tokens=30, stop_token_ids=[tokens[9]])
    (choice,) = body["choices"]
    end = tokens.index(tokens[9]) + 1
    assert choice["token_ids"] == tokens[:end]
    assert choice["finish_reason"] == "stop"
    assert choice["stop_reason"] == tokens[9]


async def test_openai_client(mesh: Mesh) -> None:
    async with openai.AsyncOpenAI(base_url=f"{mesh.url}/v1", api_key="none") as client:
        models = await client.models.list()
        assert [model.id for model in models.data] == [MODEL]
        chat = await client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "hi"}], max_completion_tokens=9, seed=1
        )
        assert chat.usage is not None
        assert chat.usage.completion_tokens <= 9
        pieces = await client.completions.create(model=MODEL, prompt="hi", max_tokens=9, stream=True)
        finish = [piece.choices[0].finish_reason async for piece in pieces]
        assert finish[-1] in ("stop", "length")


async def test_grpc_gives_the_same(mesh: Mesh, http: httpx.AsyncClient) -> None:
    whole = (await complete(http, prompt="Once upon", max_tokens=25))["choices"][0]
    params = types_pb2.SamplingParams(max_tokens=25)
    request = inference_pb2.GenerateRequest(
        model=MODEL, text="Once upon", sampling_params=params, ignore_eos=True, return_timeline=True
    )
    async with ready_channel(mesh.gateway.settings.listen) as channel:
        responses = [r async for r in inference_pb2_grpc.InferenceStub(channel).Generate(request)]
    assert "".join(response.text for response in responses) == whole["text"]
    assert [i for response in responses for i in response.token_ids] == whole["token_ids"]
    assert responses[-1].finish_reason == types_pb2.FINISH_REASON_LENGTH
    assert responses[-1].usage.completion_tokens == 25
    assert responses[-1].timeline.decode_engine == "engine-0"


async def test_64_streams_over_two_of_each(socket_dir: Path) -> None:
    mesh = Mesh(socket_dir, engines=2, tokenizers=2, output_processors=2, engine={"max_num_seqs": 24})
    prompts = [[i + 1, *range(2, 3 + i * 2)] for i in range(64)]
    lengths = [1 + (i * 7) % 100 for i in range(64)]
    limits = httpx.Limits(max_connections=100)
    async with mesh.running(), mesh.http(limits=limits) as http:
        answers = await asyncio.gather(
            *(
                stream(http, "/v1/completions", prompt=prompt, max_tokens=length)
                for prompt, length in zip(prompts, lengths, strict=True)
            )
        )
        await mesh.until_idle()
    for prompt, length, (*outputs, usage) in zip(prompts, lengths, answers, strict=True):
        ids = [i for event in outputs for i in event["choices"][0]["token_ids"]]
        assert ids == mesh.expected(prompt, length)
        assert usage["usage"]["completion_tokens"] == length


async def test_whole_context_is_usable(mesh: Mesh, http: httpx.AsyncClient) -> None:
    prompt = [3] * (MAX_MODEL_LEN - 1)
    body = await complete(http, prompt=prompt, max_tokens=1)
    assert body["choices"][0]["token_ids"] == mesh.expected(prompt, 1)
    body = await complete(http, prompt=prompt[:-3])  # 16 by default, but no more than fit
    assert body["usage"]["completion_tokens"] == 4
