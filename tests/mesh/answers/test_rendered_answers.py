"""Render, generation in tokens, and derender, taken apart: together they answer what one call answers."""

import json
from collections.abc import AsyncIterator
from typing import Any

import grpc
import httpx
import msgspec
import pytest
import pytest_asyncio

from tests.cpu_time import least_cpu_seconds, usual_cpu_seconds
from tests.mesh.harness import MODEL, SOON, Mesh, Part
from tests.plain_text import PLAIN_TEXT
from tests.ready_channel import ready_channel
from tokenloom.services.gateway.service import GatewayService
from tokenloom.v1.vllm import vllm_engine_pb2 as pb
from tokenloom.v1.vllm.vllm_engine_pb2_grpc import VllmEngineStub

pytestmark = pytest.mark.asyncio(loop_scope="module")

TOOLS = [
    {"type": "function", "function": {"name": "set_alarm", "parameters": {"type": "object", "properties": {}}}},
    {"type": "function", "function": {"name": "stop"}},
]
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "Wake me, please."}], "max_tokens": 48, "seed": 7}
CHATS: dict[str, dict[str, Any]] = {
    "plain": {},
    "greedy": {"temperature": 0},
    "logprobs": {"logprobs": True, "top_logprobs": 3},
    "samples": {"n": 3},
    "reasons": {"thinking_token_budget": 6, "max_tokens": 40},
    "forced call": {"tools": TOOLS, "tool_choice": "required"},
    "named call": {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "stop"}}},
    "schema": {"response_format": {"type": "json_object"}},
    "regex": {"structured_outputs": {"regex": "[ab]{5}x"}, "return_token_ids": True},
    "ignored end": {"ignore_eos": True, "logit_bias": {"11": 2.5}, "top_p": 0.7},
}
_VARIES = ("id", "created", "request_id")
STATE = "stream_state"


@pytest.fixture(scope="module")
def mesh_options() -> dict[str, Any]:
    return {
        "engine": {"max_model_len": 512, "reasoning_parser": "deepseek_r1"},
        "gateway": {"reasoning_parser": "deepseek_r1"},
        "output_processors": 2,
    }


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def other(mesh: Mesh) -> AsyncIterator[httpx.AsyncClient]:
    """Another gateway of the mesh."""
    settings = msgspec.structs.replace(mesh.gateway.settings, instance_id="other", listen=mesh.address("other"))
    part = Part(GatewayService, settings)
    await part.start()
    assert isinstance(part.service, GatewayService)
    try:
        url = f"http://{part.service.http_address}"
        async with httpx.AsyncClient(base_url=url, timeout=SOON, verify=PLAIN_TEXT) as client:
            yield client
    finally:
        await part.stop()


async def post(http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> Any:
    response = await http.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def comparable(answer: dict[str, Any]) -> dict[str, Any]:
    """Return an answer without what differs between any two answers: ids, also those of calls, and what only the whole
    road knows."""
    answer = json.loads(json.dumps(answer))
    for choice in answer["choices"]:
        for call in (choice.get("message") or {}).get("tool_calls") or ():
            call.pop("id")
    usage = {name: answer["usage"][name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")}
    rest = {name: value for name, value in answer.items() if name not in _VARIES and value is not None}
    return rest | {"usage": usage}


@pytest.mark.parametrize("name", CHATS)
async def test_a_chat_in_three_calls_is_a_chat_in_one(http: httpx.AsyncClient, name: str) -> None:
    body = CHAT | CHATS[name]
    whole = await post(http, "/v1/chat/completions", body)
    asked = await post(http, "/v1/chat/completions/render", body)
    tokens = await post(http, "/inference/v1/generate", asked)
    assert tokens["output_mode"] == "tokens"
    assert all("text" not in choice for choice in tokens["choices"])
    sent = {"generate_response": tokens, "chat_request": body, "prompt_token_ids": asked["token_ids"]}
    answer = await post(http, "/v1/chat/completions/derender", sent)
    assert comparable(answer) == comparable(whole)


@pytest.mark.parametrize("kind", ["chat", "completion"])
@pytest.mark.parametrize("streams", [False, True])
async def test_the_way_back_names_what_has_computed_the_tokens(
    http: httpx.AsyncClient, kind: str, streams: bool
) -> None:
    """In each choice, where the answer in tokens has it; and nothing where that has nothing."""
    body = CHAT if kind == "chat" else {"model": MODEL, "prompt": "The moon"}
    path = "/v1/chat/completions/derender" if kind == "chat" else "/v1/completions/derender"
    for origin in ({"weights_version": "0f" * 8, "mixed_numerics": True}, {"weights_version": "a1" * 8}, {}):
        choice = {"index": 0, "token_ids": [300, 301, 302], "finish_reason": "length", **origin}
        response = {"request_id": "r", "choices": [choice]}
        whole = {"generate_response": response} if kind == "chat" else {"generate_responses": [response]}
        sent = {f"{kind}_request": body} | ({"generate_chunk": response} if streams else whole)
        answer = await post(http, path, sent | ({"stream": True, STATE: None} if streams else {}))
        (found,) = (answer["chunk"] if streams else answer)["choices"]
        assert {name: found[name] for name in ("weights_version", "mixed_numerics") if found.get(name)} == origin


async def test_a_completion_of_several_prompts(http: httpx.AsyncClient) -> None:
    body = {"model": MODEL, "prompt": ["The moon", "A lamp"], "n": 2, "seed": 3, "max_tokens": 12, "logprobs": 2}
    whole = await post(http, "/v1/completions", body)
    asked = await post(http, "/v1/completions/render", body)
    tokens = [await post(http, "/inference/v1/generate", each) for each in asked]
    prompts = [each["token_ids"] for each in asked]
    sent = {"generate_responses": tokens, "completion_request": body, "prompt_token_ids": prompts}
    assert comparable(await post(http, "/v1/completions/derender", sent)) == comparable(whole)


async def test_text_of_the_generation_itself_is_that_of_the_way_back(http: httpx.AsyncClient) -> None:
    (asked,) = await post(
        http, "/v1/completions/render", {"model": MODEL, "prompt": "The moon", "max_tokens": 12, "seed": 5}
    )
    whole = await post(http, "/v1/completions", {"model": MODEL, "prompt": "The moon", "max_tokens": 12, "seed": 5})
    answer = await post(http, "/inference/v1/generate", asked | {"output_mode": "text"})
    assert answer["choices"][0]["text"] == whole["choices"][0]["text"]


async def test_what_a_newer_vllm_renders_beside_it_is_named_as_ignored(http: httpx.AsyncClient) -> None:
    body = {"token_ids": [1, 2], "sampling_params": {"max_tokens": 2}, "parse_context": {"tool_choice": "none"}}
    response = await http.post("/inference/v1/generate", json=body)
    assert response.status_code == 200, response.text
    assert response.headers["x-tokenloom-ignored"] == "parse_context"


def chunks_of(token_ids: list[int], size: int, reason: str | None) -> list[dict[str, Any]]:
    """Return the events of a generation that brings so many tokens at a time."""
    parts = [token_ids[start : start + size] for start in range(0, len(token_ids), size)]
    ends = [*[None] * (len(parts) - 1), reason]
    return [
        {"request_id": "r", "choices": [{"index": 0, "token_ids": part, "finish_reason": end}]}
        for part, end in zip(parts, ends, strict=True)
    ]


class Joined:
    """What a client makes of chunks."""

    def __init__(self) -> None:
        self.parts: dict[str, str] = {}
        self.calls: list[dict[str, str]] = []
        self.roles = 0
        self.reason: str | None = None

    def add(self, chunk: dict[str, Any]) -> None:
        for choice in chunk["choices"]:
            delta = choice["delta"]
            self.roles += "role" in delta
            for name in ("content", "reasoning"):
                self.parts[name] = self.parts.get(name, "") + (delta.get(name) or "")
            for call in delta.get("tool_calls", ()):
                if call["index"] == len(self.calls):
                    self.calls.append({"name": call["function"]["name"], "arguments": ""})
                self.calls[call["index"]]["arguments"] += call["function"]["arguments"]
            self.reason = choice["finish_reason"] or self.reason


@pytest.mark.parametrize("name", ["plain", "reasons", "forced call", "schema"])
@pytest.mark.parametrize("size", [1, 5])
async def test_a_stream_of_chunks_is_the_whole_answer(http: httpx.AsyncClient, name: str, size: int) -> None:
    body = CHAT | CHATS[name]
    asked = await post(http, "/v1/chat/completions/render", body)
    tokens = await post(http, "/inference/v1/generate", asked)
    sent = {"chat_request": body, "prompt_token_ids": asked["token_ids"]}
    whole = await post(http, "/v1/chat/completions/derender", sent | {"generate_response": tokens})
    (choice,) = whole["choices"]
    joined, state = Joined(), None
    for chunk in chunks_of(tokens["choices"][0]["token_ids"], size, tokens["choices"][0]["finish_reason"]):
        answer = await post(
            http, "/v1/chat/completions/derender", sent | {"stream": True, "generate_chunk": chunk, STATE: state}
        )
        joined.add(answer["chunk"])
        state = answer[STATE]
    message = choice["message"]
    assert joined.parts.get("content", "") == (message["content"] or "")
    assert joined.parts.get("reasoning", "") == message.get("reasoning", "")
    assert joined.calls == [call["function"] for call in message.get("tool_calls", ())]
    assert (joined.roles, joined.reason) == (1, choice["finish_reason"])


@pytest.mark.parametrize("name", ["plain", "reasons", "forced call"])
@pytest.mark.parametrize("cut", [1, 3, 6])
async def test_a_stream_goes_on_at_another_gateway(
    http: httpx.AsyncClient, other: httpx.AsyncClient, name: str, cut: int
) -> None:
    """The first gateway is gone in the middle of a stream: its answer to the last chunk is lost too."""
    body = CHAT | CHATS[name]
    asked = await post(http, "/v1/chat/completions/render", body)
    tokens = await post(http, "/inference/v1/generate", asked)
    sent = {"chat_request": body, "prompt_token_ids": asked["token_ids"], "stream": True}
    whole = await post(http, "/v1/chat/completions/derender", {**sent, "stream": False, "generate_response": tokens})
    token_ids = tokens["choices"][0]["token_ids"]
    joined, state, num_lost, done = Joined(), None, 0, 0
    for at, chunk in enumerate(chunks_of(token_ids, 4, tokens["choices"][0]["finish_reason"])):
        call = sent | {"generate_chunk": chunk, STATE: state}
        if at == cut:
            await post(http, "/v1/chat/completions/derender", call)  # nobody receives it
        gateway = http if at < cut else other
        response = await gateway.post("/v1/chat/completions/derender", json=call)
        if response.status_code == 404:
            assert response.json()["error"]["code"] == "request_lost"
            num_lost += 1
            call[STATE] = {**(state or {}), "output_token_ids": token_ids[:done]}
            response = await gateway.post("/v1/chat/completions/derender", json=call)
        assert response.status_code == 200, response.text
        joined.add(response.json()["chunk"])
        state = response.json()[STATE]
        done += len(chunk["choices"][0]["token_ids"])
    message = whole["choices"][0]["message"]
    assert joined.parts.get("content", "") == (message["content"] or "")
    assert joined.parts.get("reasoning", "") == message.get("reasoning", "")
    assert joined.calls == [call["function"] for call in message.get("tool_calls", ())]
    assert num_lost == 1


async def test_a_stream_outlives_its_gateway(mesh: Mesh, http: httpx.AsyncClient) -> None:
    """The gateway is killed in the middle; another one goes on, and the text is that of the whole answer."""
    body = CHAT | CHATS["reasons"]
    asked = await post(http, "/v1/chat/completions/render", body)
    (choice,) = (await post(http, "/inference/v1/generate", asked))["choices"]
    sent = {"chat_request": body, "prompt_token_ids": asked["token_ids"]}
    whole = await post(
        http, "/v1/chat/completions/derender", sent | {"generate_response": {"request_id": "r", "choices": [choice]}}
    )
    chunks = chunks_of(choice["token_ids"], 3, choice["finish_reason"])
    settings = msgspec.structs.replace(mesh.gateway.settings, instance_id="short", listen=mesh.address("short"))
    short, joined, state = Part(GatewayService, settings), Joined(), dict[str, Any]()
    await short.start()
    assert isinstance(short.service, GatewayService)
    url = f"http://{short.service.http_address}"
    async with httpx.AsyncClient(base_url=url, timeout=SOON, verify=PLAIN_TEXT) as client:
        for chunk in chunks[:5]:
            call = sent | {"stream": True, "generate_chunk": chunk, STATE: state or None}
            answer = await post(client, "/v1/chat/completions/derender", call)
            joined.add(answer["chunk"])
            state = answer[STATE]
    await short.kill()
    state |= {"output_token_ids": choice["token_ids"][:15]}
    for chunk in chunks[5:]:
        call = sent | {"stream": True, "generate_chunk": chunk, STATE: state}
        answer = await post(http, "/v1/chat/completions/derender", call)
        joined.add(answer["chunk"])
        state = answer[STATE]
    message = whole["choices"][0]["message"]
    assert joined.parts["content"] == (message["content"] or "")
    assert joined.parts.get("reasoning", "") == message.get("reasoning", "")
    assert (joined.roles, joined.reason) == (1, choice["finish_reason"])


@pytest.mark.parametrize("kind", ["chat", "completion"])
async def test_a_token_of_a_long_stream_takes_no_more_time(http: httpx.AsyncClient, mesh: Mesh, kind: str) -> None:
    """Of processor time, in streams of 10,000 tokens and of 100. That of a chat is parsed."""
    ids = mesh.encode("The boat went over the lake to the other side. " * 950)[:10_000]
    assert len(ids) == 10_000
    chat = {**CHAT, **CHATS["reasons"]}
    path = "/v1/chat/completions/derender" if kind == "chat" else "/v1/completions/derender"
    sent: dict[str, Any] = {"stream": True, "prompt_token_ids": [5, 6]} | (
        {"chat_request": chat} if kind == "chat" else {"completion_request": {"model": MODEL, "prompt": "x"}}
    )

    async def stream(num_tokens: int) -> None:
        state = None
        for chunk in chunks_of(ids[:num_tokens], 20, None):
            answer = await post(http, path, sent | {"generate_chunk": chunk, STATE: state})
            state = answer[STATE]
        assert state is not None
        assert state["num_tokens"] == num_tokens

    short = await usual_cpu_seconds(lambda: stream(100)) / 100
    long = await least_cpu_seconds(lambda: stream(10_000), 2 * short * 10_000) / 10_000
    print(f"{kind}: {long / short:.2f} of the time for a token")
    assert long <= 2 * short


async def test_a_chunk_that_comes_twice_gets_the_same_answer(http: httpx.AsyncClient) -> None:
    asked = await post(http, "/v1/chat/completions/render", CHAT)
    ids = (await post(http, "/inference/v1/generate", asked))["choices"][0]["token_ids"]
    sent = {"chat_request": CHAT, "prompt_token_ids": asked["token_ids"], "stream": True}
    streams = []
    for repeats in (False, True):
        joined, state = Joined(), None
        for chunk in chunks_of(ids, 8, "length"):
            call = sent | {"generate_chunk": chunk, STATE: state}
            first = await post(http, "/v1/chat/completions/derender", call)
            if repeats and state is not None and not chunk["choices"][0]["finish_reason"]:
                assert await post(http, "/v1/chat/completions/derender", call) == first
            joined.add(first["chunk"])
            state = first[STATE]
        streams.append(joined)
    once, twice = streams
    assert twice.parts == once.parts


async def test_a_stop_string_is_found_across_chunks(http: httpx.AsyncClient, mesh: Mesh) -> None:
    ids = mesh.encode("one two three four")
    body = {"model": MODEL, "prompt": "x", "stop": ["two th"]}
    texts, state, reasons = "", None, []
    for chunk in chunks_of(ids, 1, "length"):
        sent = {"stream": True, "generate_chunk": chunk, STATE: state, "completion_request": body}
        answer = await post(http, "/v1/completions/derender", sent)
        (choice,) = answer["chunk"]["choices"]
        texts, state = texts + choice["text"], answer[STATE]
        reasons += [(choice["finish_reason"], choice["stop_reason"])] if choice["finish_reason"] else []
    assert texts.strip() == "one"
    assert reasons == [("stop", "two th")]


async def test_a_generation_streams_its_tokens(http: httpx.AsyncClient, mesh: Mesh) -> None:
    prompt = mesh.encode("A lantern")
    params = {"max_tokens": 9, "ignore_eos": True, "temperature": 0, "logprobs": 2}
    body = {"token_ids": prompt, "sampling_params": params, "stream": True, "return_token_ids": True}
    body["stream_options"] = {"include_usage": True}
    events = []
    async with http.stream("POST", "/inference/v1/generate", json=body) as response:
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                events.append(json.loads(line.removeprefix("data: ")))
    choices = [choice for event in events for choice in event["choices"]]
    assert [token for choice in choices for token in choice["token_ids"]] == mesh.expected(prompt, 9)
    content = [entry for choice in choices for entry in choice["logprobs"]["content"]]
    assert [entry["token_id"] for entry in content] == mesh.expected(prompt, 9)
    assert all(len(entry["top_logprobs"]) == 2 and entry["rank"] == 1 for entry in content)
    assert [event["prompt_token_ids"] for event in events if "prompt_token_ids" in event] == [prompt]
    assert choices[-1]["finish_reason"] == "length"
    assert events[-1]["usage"]["completion_tokens"] == 9


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"kv_transfer_params": {"do_remote_prefill": True}}, "kv_transfer_params"),
        ({"ec_transfer_params": {}}, "ec_transfer_params"),
        ({"features": {}}, "features.mm_hashes"),
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": [-1]}, "token_ids"),
        ({"token_ids": [10**6]}, "token_ids"),
        ({"sampling_params": {"temperature": -1}}, "temperature"),
        ({"sampling_params": {"stream": True}}, "sampling_params.stream"),
        ({"sampling_params": {"use_beam_search": True}}, "sampling_params.use_beam_search"),
        ({"sampling_params": {"extra_args": {"a": 1}}}, "extra_args"),
        ({"sampling_params": {"detokenize": False}, "output_mode": "text"}, "output_mode"),
        ({"output_mode": "sound"}, "output_mode"),
        ({"output_mode": "derender"}, "output_mode"),  # of vLLM 0.33
    ],
)
async def test_what_is_no_request_in_tokens(http: httpx.AsyncClient, body: dict[str, Any], field: str) -> None:
    response = await http.post("/inference/v1/generate", json={"token_ids": [1, 2], "sampling_params": {}} | body)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == field


_STREAM = {"stream": True, "generate_chunk": {"choices": [{"index": 0, "token_ids": [1]}]}}


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "generate_response"),
        (
            {"generate_response": {"choices": [{"index": 0, "text": "a"}], "output_mode": "text"}},
            "generate_response.output_mode",
        ),
        ({"generate_response": {"choices": [{"index": 0, "token_ids": [2**32]}]}}, "choices[].token_ids"),
        ({"generate_response": {"choices": [{"index": 0, "token_ids": [1] * 600}]}}, "choices[].token_ids"),
        ({"stream_state": {}, "generate_response": {"choices": []}}, "stream_state"),
        ({"stream": True, "generate_response": {"choices": []}}, "generate_chunk"),
        (_STREAM | {"stream_state": {"num_tokens": 3, "output_token_ids": [1]}}, "stream_state.output_token_ids"),
        (_STREAM | {"stream_state": {"num_tokens": -3}}, "stream_state.num_tokens"),
        (_STREAM | {"chat_request": {"messages": []}}, "chat_request.messages"),
    ],
)
async def test_what_is_no_answer_in_tokens(http: httpx.AsyncClient, body: dict[str, Any], field: str) -> None:
    response = await http.post("/v1/chat/completions/derender", json=body)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == field


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/chat/completions", CHAT | {"use_beam_search": True, "n": 2}, "use_beam_search"),
        ("/v1/completions", {"prompt": "a", "echo": True}, "echo"),
        ("/v1/completions", {"prompt": ""}, "prompt"),
    ],
)
async def test_what_is_not_rendered(http: httpx.AsyncClient, path: str, body: dict[str, Any], field: str) -> None:
    response = await http.post(f"{path}/render", json=body)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == field


@pytest.mark.parametrize("stream", [False, True])
async def test_tokens_over_grpc(mesh: Mesh, stream: bool) -> None:
    prompt = mesh.encode("A lantern")
    request = pb.GenerateRequest(request_id="mine", tokenized=pb.TokenizedInput(input_ids=prompt), stream=stream)
    params = request.sampling_params
    params.max_tokens, params.ignore_eos, params.temperature, params.logprobs, params.n = 9, True, 0.0, 2, 1
    async with ready_channel(mesh.gateway.settings.listen) as channel:
        stub: Any = VllmEngineStub(channel)
        assert (await stub.HealthCheck(pb.HealthCheckRequest())).healthy
        info = await stub.GetModelInfo(pb.GetModelInfoRequest())
        assert (info.served_model_name, info.max_context_length) == (MODEL, 512)
        responses = [each async for each in stub.Generate(request)]
    chunks = [each.chunk for each in responses if each.WhichOneof("response") == "chunk"]
    (complete,) = (each.complete for each in responses if each.WhichOneof("response") == "complete")
    assert list(complete.output_ids) == mesh.expected(prompt, 9)
    assert (complete.finish_reason, complete.prompt_tokens, complete.completion_tokens) == ("length", len(prompt), 9)
    logprobs = [chunk.output_logprobs for chunk in chunks] if stream else [complete.output_logprobs]
    assert bool(chunks) == stream
    assert [token for each in logprobs for token in each.token_ids] == list(complete.output_ids)
    assert all(len(top.token_ids) == 2 for each in logprobs for top in each.top_logprobs)


async def test_grpc_refuses_what_the_mesh_decides_and_ends_what_a_caller_names(mesh: Mesh) -> None:
    tokens = pb.TokenizedInput(input_ids=[1, 2, 3])
    refused = [
        pb.GenerateRequest(tokenized=tokens, kv_transfer_params_json="{}"),
        pb.GenerateRequest(tokenized=tokens, kv_transfer_params=pb.KvTransferParams()),
        pb.GenerateRequest(tokenized=tokens, mm_inputs=pb.MultimodalInputs()),
        pb.GenerateRequest(),
    ]
    async with ready_channel(mesh.gateway.settings.listen) as channel:
        stub: Any = VllmEngineStub(channel)
        for request in refused:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                [each async for each in stub.Generate(request)]
            assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        long = pb.GenerateRequest(request_id="long", tokenized=tokens, stream=True)
        long.sampling_params.max_tokens, long.sampling_params.ignore_eos = 400, True
        call = stub.Generate(long)
        await anext(aiter(call))
        await stub.Abort(pb.AbortRequest(request_ids=["long", "unknown"]))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            [each async for each in call]
        assert caught.value.code() == grpc.StatusCode.ABORTED
    await mesh.until_idle()
