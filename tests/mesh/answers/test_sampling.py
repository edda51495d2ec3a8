"""What a request may ask of sampling, through all five services: the hash worker's log probabilities are exact."""

import json
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.mesh.harness import MODEL, VOCAB_SIZE, Mesh
from tests.mesh.split import SplitMesh
from tests.ready_channel import ready_channel
from tokenloom.v1 import inference_pb2, inference_pb2_grpc, types_pb2

pytestmark = pytest.mark.asyncio(loop_scope="module")

COMMON = {"model": MODEL, "return_token_ids": True, "ignore_eos": True}
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PROMPT = list(range(10, 40))


async def post(http: httpx.AsyncClient, path: str = COMPLETIONS, **fields: Any) -> dict[str, Any]:
    response = await http.post(path, json={**COMMON, **fields})
    assert response.status_code == 200, response.text
    result: dict[str, Any] = response.json()
    return result


async def stream(http: httpx.AsyncClient, path: str = COMPLETIONS, **fields: Any) -> list[dict[str, Any]]:
    body = {**COMMON, "stream": True, **fields}
    async with http.stream("POST", path, json=body) as response:
        assert response.status_code == 200, await response.aread()
        lines = [line.removeprefix("data: ") async for line in response.aiter_lines() if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def prompt_logprobs(mesh: Mesh, prompt: list[int]) -> list[float | None]:
    """What the hash worker tells of each token of a prompt."""
    best = [mesh.expected(prompt[:position], 1)[0] for position in range(1, len(prompt))]
    return [None, *(-((taken - each) % VOCAB_SIZE + 1) / 8 for taken, each in zip(prompt[1:], best, strict=True))]


def token_texts(mesh: Mesh, ids: list[int]) -> str:
    text: str = mesh.tokenizer.decode(ids, skip_special_tokens=False)
    return text


async def test_completion_logprobs(mesh: Mesh, http: httpx.AsyncClient) -> None:
    body = await post(http, prompt=PROMPT, max_tokens=12, logprobs=2)
    (choice,) = body["choices"]
    told = choice["logprobs"]
    assert choice["token_ids"] == mesh.expected(PROMPT, 12)
    assert told["token_logprobs"] == [-1 / 8] * 12
    assert [sorted(top.values()) for top in told["top_logprobs"]] == [[-2 / 8, -1 / 8]] * 12
    for token, at in zip(told["tokens"], told["text_offset"], strict=True):
        assert "\ufffd" in token or choice["text"][at : at + len(token)] == token
    as_ids = await post(http, prompt=PROMPT, max_tokens=12, logprobs=0, return_tokens_as_token_ids=True)
    assert as_ids["choices"][0]["logprobs"]["tokens"] == [f"token_id:{i}" for i in choice["token_ids"]]
    assert as_ids["choices"][0]["logprobs"]["text_offset"] == told["text_offset"]
    assert as_ids["choices"][0]["logprobs"]["top_logprobs"][0] == {f"token_id:{choice['token_ids'][0]}": -1 / 8}


async def test_chat_logprobs_streamed_and_not(mesh: Mesh, http: httpx.AsyncClient) -> None:
    fields: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 10}
    fields |= {"logprobs": True, "top_logprobs": 3}
    (choice,) = (await post(http, CHAT, **fields))["choices"]
    content = choice["logprobs"]["content"]
    assert [entry["logprob"] for entry in content] == [-1 / 8] * 10
    assert [[each["logprob"] for each in entry["top_logprobs"]] for entry in content] == [[-1 / 8, -2 / 8, -3 / 8]] * 10
    joined = b"".join(bytes(entry["bytes"]) for entry in content)
    assert joined.decode(errors="replace") == token_texts(mesh, choice["token_ids"])
    events = await stream(http, CHAT, **fields)
    told = [entry for event in events for entry in (event["choices"][0]["logprobs"] or {"content": []})["content"]]
    assert told == content
    without = (await post(http, CHAT, **(fields | {"logprobs": False, "top_logprobs": 0})))["choices"][0]
    assert without["logprobs"] is None


async def test_the_token_that_ends_a_chats_text_has_no_logprobs(mesh: Mesh, http: httpx.AsyncClient) -> None:
    fields: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 10, "logprobs": True}
    (choice,) = (await post(http, CHAT, **fields))["choices"]
    end = choice["token_ids"].index(choice["token_ids"][5])
    fields |= {"stop_token_ids": [choice["token_ids"][5]]}
    for interval in (None, 100):
        (ended,) = (await post(http, CHAT, **fields, stream_interval=interval))["choices"]
        assert ended["token_ids"] == choice["token_ids"][: end + 1]
        assert ended["logprobs"]["content"] == choice["logprobs"]["content"][:end]
        events = await stream(http, CHAT, **fields, stream_interval=interval)
        entries = [each for event in events for each in (event["choices"][0]["logprobs"] or {"content": []})["content"]]
        assert entries == ended["logprobs"]["content"]
    (shown,) = (await post(http, CHAT, **fields, include_stop_str_in_output=True))["choices"]
    assert shown["logprobs"]["content"] == choice["logprobs"]["content"][: end + 1]


async def test_logprobs_end_where_a_stop_string_does(mesh: Mesh, http: httpx.AsyncClient) -> None:
    text = (await post(http, prompt=PROMPT, max_tokens=40))["choices"][0]["text"]
    stop = text[len(text) // 2 :][:3]
    for interval in (None, 7):
        body = await post(http, prompt=PROMPT, max_tokens=40, logprobs=0, stop=stop, stream_interval=interval)
        (choice,) = body["choices"]
        assert choice["finish_reason"] == "stop"
        assert len(choice["logprobs"]["tokens"]) == len(choice["token_ids"]) < 40


async def test_a_prompt_is_scored_as_lm_eval_asks(mesh: Mesh, http: httpx.AsyncClient) -> None:
    """Batches of token ids with echo, logprobs and one token, twice: the second time the prefix cache knows them."""
    prompts = [PROMPT, [7] * 40, [3, 4]]
    for max_tokens in (1, 1, 0):
        body = await post(http, prompt=prompts, max_tokens=max_tokens, echo=True, logprobs=1, temperature=0)
        for prompt, choice in zip(prompts, body["choices"], strict=True):
            told = choice["logprobs"]
            expected = prompt_logprobs(mesh, prompt)
            assert told["token_logprobs"] == expected + [-1 / 8] * max_tokens
            assert told["top_logprobs"][0] is None
            assert len(told["tokens"]) == len(told["text_offset"]) == len(prompt) + max_tokens
            output = mesh.expected(prompt, 1)[:max_tokens]
            assert choice["text"] == mesh.tokenizer.decode(prompt) + mesh.tokenizer.decode(output)
        assert body["usage"]["completion_tokens"] == 3 * max_tokens


async def test_echo_streams_the_prompt_first(mesh: Mesh, http: httpx.AsyncClient) -> None:
    events = await stream(http, prompt="Once upon a time", max_tokens=6, echo=True, logprobs=0, n=3)
    ids = mesh.encode("Once upon a time")
    for index in range(3):
        mine = [event["choices"][0] for event in events if event["choices"][0]["index"] == index]
        text = "".join(choice["text"] for choice in mine)
        assert text == "Once upon a time" + mesh.tokenizer.decode(mesh.expected(ids, 6))
        told = [value for choice in mine for value in choice["logprobs"]["token_logprobs"]]
        assert told == prompt_logprobs(mesh, ids) + [-1 / 8] * 6
        offsets = [value for choice in mine for value in choice["logprobs"]["text_offset"]]
        assert offsets == sorted(offsets)


async def test_prompt_logprobs_as_vllm_has_them(mesh: Mesh, http: httpx.AsyncClient) -> None:
    (choice,) = (await post(http, prompt=PROMPT, max_tokens=2, prompt_logprobs=1))["choices"]
    first, *rest = choice["prompt_logprobs"]
    assert first is None
    assert [told[str(i)]["logprob"] for told, i in zip(rest, PROMPT[1:], strict=True)] == prompt_logprobs(mesh, PROMPT)[
        1:
    ]
    best = [mesh.expected(PROMPT[:n], 1)[0] for n in range(1, len(PROMPT))]
    assert [told[str(i)]["rank"] for told, i in zip(rest, best, strict=True)] == [1] * len(best)
    chat = await post(http, CHAT, messages=[{"role": "user", "content": "hi"}], max_tokens=2, prompt_logprobs=0)
    assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]


async def test_samples_share_the_prompt_and_its_usage(mesh: Mesh, http: httpx.AsyncClient) -> None:
    fields: dict[str, Any] = {"prompt": [PROMPT, [1, 2, 3]], "n": 4, "best_of": 4, "max_tokens": 9}
    body = await post(http, **fields)
    assert [choice["index"] for choice in body["choices"]] == list(range(8))
    expected = [mesh.expected(PROMPT, 9)] * 4 + [mesh.expected([1, 2, 3], 9)] * 4
    assert [choice["token_ids"] for choice in body["choices"]] == expected
    assert (body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"]) == (33, 72)
    events = await stream(http, CHAT, messages=[{"role": "user", "content": "hi"}], n=3, max_tokens=5)
    by_index = {
        index: [i for event in events for c in event["choices"] if c["index"] == index for i in c.get("token_ids", ())]
        for index in range(3)
    }
    assert by_index[0] == by_index[1] == by_index[2]
    assert len(by_index[0]) == 5
    await mesh.until_idle()


@pytest.mark.parametrize("prompt_tokens", [5, 300])
async def test_prefill_and_decode_apart(socket_dir: Path, prompt_tokens: int) -> None:
    """One lease serves every sample; the prefill leg tells of the prompt, both legs of their tokens."""
    prompt = [i * 7 % VOCAB_SIZE for i in range(prompt_tokens)]
    async with SplitMesh(socket_dir).running() as mesh, mesh.http() as http:
        fields: dict[str, Any] = {"prompt": prompt, "max_tokens": 8, "n": 4, "logprobs": 1, "echo": True}
        body = await post(http, **fields)
        for choice in body["choices"]:
            assert choice["token_ids"] == mesh.expected(prompt, 8)
            assert choice["logprobs"]["token_logprobs"] == prompt_logprobs(mesh, prompt) + [-1 / 8] * 8
        assert body["usage"]["prompt_tokens"] == prompt_tokens
        assert mesh.of_role("decode").stats.kv_blocks_received > 0
        assert not mesh.of_role("decode").recomputes()
        one = await post(http, prompt=prompt, max_tokens=1, n=4)
        assert [choice["token_ids"] for choice in one["choices"]] == [mesh.expected(prompt, 1)] * 4
        await mesh.check_nothing_is_left()


async def test_the_prefill_engine_tells_of_a_long_prompt_whatever_is_cached(socket_dir: Path) -> None:
    """Computed in several steps, the decode engine reading along; then again, with all of it in both caches."""
    prompt = [i * 7 % VOCAB_SIZE for i in range(600)]
    async with SplitMesh(socket_dir).running() as mesh, mesh.http() as http:
        expected = prompt_logprobs(mesh, prompt)
        for _ in range(2):
            (choice,) = (await post(http, prompt=prompt, max_tokens=4, prompt_logprobs=1))["choices"]
            first, *rest = choice["prompt_logprobs"]
            assert first is None
            assert [told[str(i)]["logprob"] for told, i in zip(rest, prompt[1:], strict=True)] == expected[1:]
            assert choice["token_ids"] == mesh.expected(prompt, 4)
        assert mesh.of_role("decode").stats.kv_blocks_received > 0
        await mesh.check_nothing_is_left()


async def test_what_a_prompt_becomes(mesh: Mesh, http: httpx.AsyncClient) -> None:
    whole = mesh.encode("Once upon a time there was")
    cut = (await post(http, prompt="Once upon a time there was", max_tokens=4, truncate_prompt_tokens=3))["choices"][0]
    assert cut["prompt_token_ids"] == whole[-3:]
    assert cut["token_ids"] == mesh.expected(whole[-3:], 4)
    many = (await post(http, prompt=[5] * 1000, max_tokens=6, truncate_prompt_tokens=-1))["choices"][0]
    assert len(many["prompt_token_ids"]) == 256 - 6
    bare = (await post(http, prompt="Once", max_tokens=1, add_special_tokens=False))["choices"][0]
    assert bare["prompt_token_ids"] == mesh.tokenizer.encode("Once", add_special_tokens=False).ids
    silent = (await post(http, prompt=[5, 6], max_tokens=4, detokenize=False))["choices"][0]
    assert (silent["text"], silent["token_ids"]) == ("", mesh.expected([5, 6], 4))


async def test_output_in_larger_pieces(mesh: Mesh, http: httpx.AsyncClient) -> None:
    events = await stream(http, prompt=PROMPT, max_tokens=20, stream_interval=8)
    sizes = [len(event["choices"][0]["token_ids"]) for event in events]
    assert sum(sizes) == 20
    assert all(size >= 8 for size in sizes[1:-1])
    assert len(sizes) <= 4
    assert [i for event in events for i in event["choices"][0]["token_ids"]] == mesh.expected(PROMPT, 20)


async def test_the_openai_client(mesh: Mesh) -> None:
    async with openai.AsyncOpenAI(base_url=f"{mesh.url}/v1", api_key="none") as client:
        chat = await client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "hi"}],
            n=3,
            logprobs=True,
            top_logprobs=2,
            max_completion_tokens=6,
        )
        assert [choice.index for choice in chat.choices] == [0, 1, 2]
        for choice in chat.choices:
            assert choice.logprobs is not None
            assert choice.logprobs.content is not None
            assert {len(entry.top_logprobs) for entry in choice.logprobs.content} == {2}
        completion = await client.completions.create(model=MODEL, prompt=PROMPT, logprobs=2, max_tokens=5, echo=True)
        told = completion.choices[0].logprobs
        assert told is not None
        assert told.tokens is not None
        assert len(told.tokens) == len(PROMPT) + 5


async def test_over_grpc(mesh: Mesh) -> None:
    async with ready_channel(mesh.gateway.settings.listen) as channel:
        request = inference_pb2.GenerateRequest(
            model=MODEL,
            token_ids=types_pb2.TokenIds(ids=PROMPT),
            n=2,
            bad_words=["never"],
            ignore_eos=True,
            sampling_params=types_pb2.SamplingParams(max_tokens=7, logprobs=1, prompt_logprobs=0),
        )
        responses = [each async for each in inference_pb2_grpc.InferenceStub(channel).Generate(request)]
    for index in range(2):
        mine = [each for each in responses if each.index == index]
        assert [i for each in mine for i in each.token_ids] == mesh.expected(PROMPT, 7)
        assert [value for each in mine for value in each.logprobs.sampled] == [-1 / 8] * 7
    prompt = [value for each in responses for value in each.prompt_logprobs.sampled]
    assert prompt == prompt_logprobs(mesh, PROMPT)[1:]
    assert responses[-1].usage == inference_pb2.Usage(prompt_tokens=30, completion_tokens=14)
