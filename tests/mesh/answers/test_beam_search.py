"""Beam search through all five services: the hash worker's log probabilities are exact, so its beams are known."""

import asyncio
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from tests.mesh.harness import MODEL, SOON, VOCAB_SIZE, Mesh
from tests.mesh.split import SplitMesh
from tests.ready_channel import ready_channel
from tokenloom.client import AsyncClient, errors
from tokenloom.v1 import inference_pb2, inference_pb2_grpc, types_pb2
from tokenloom.v1.engine_pb2 import PAUSE_MODE_ABORT, PAUSE_MODE_WAIT, PauseMode, PauseRequest, ResumeRequest
from tokenloom.v1.engine_pb2_grpc import EngineAdminStub
from tokenloom.v1.kserve import grpc_service_pb2 as kserve_pb2
from tokenloom.v1.kserve import grpc_service_pb2_grpc as kserve_pb2_grpc

pytestmark = pytest.mark.asyncio(loop_scope="module")

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PROMPT = list(range(10, 50))
Found = list[tuple[list[int], float]]


async def post(http: httpx.AsyncClient, path: str = COMPLETIONS, **fields: Any) -> httpx.Response:
    body = {"model": MODEL, "return_token_ids": True, "ignore_eos": True, "use_beam_search": True, **fields}
    return await http.post(path, json=body)


async def search(http: httpx.AsyncClient, path: str = COMPLETIONS, **fields: Any) -> dict[str, Any]:
    response = await post(http, path, **fields)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def expected(
    mesh: Mesh, prompt: list[int], width: int, max_tokens: int, end: int | None = None, penalty: float = 1.0
) -> Found:
    """Return the sequences after the prompt, with their sums of log probabilities, best first; vLLM's rules."""
    live: Found = [([], 0.0)]
    done: Found = []
    for _ in range(max_tokens):
        grown: Found = []
        for tokens, total in live:
            best = mesh.expected([*prompt, *tokens], 1)[0]
            for distance in range(2 * width):
                token_id = (best + distance) % VOCAB_SIZE
                (done if token_id == end else grown).append(([*tokens, token_id], total - (distance + 1) / 8))
        live = sorted(grown, key=lambda each: -each[1])[:width]

    def score(each: tuple[list[int], float]) -> float:
        tokens, total = each
        return total / (len(prompt) + len(tokens) - (tokens[-1] == end)) ** penalty

    return sorted([*done, *live], key=score, reverse=True)[:width]


@pytest.mark.parametrize("width", [1, 2, 5])
async def test_the_likeliest_outputs_of_a_completion(mesh: Mesh, http: httpx.AsyncClient, width: int) -> None:
    answer = await search(http, prompt=PROMPT, n=width, max_tokens=7, logprobs=1)
    found = expected(mesh, PROMPT, width, 7)
    assert [choice["token_ids"] for choice in answer["choices"]] == [tokens for tokens, _ in found]
    for index, (choice, (tokens, total)) in enumerate(zip(answer["choices"], found, strict=True)):
        assert choice["index"] == index
        assert (choice["finish_reason"], choice["stop_reason"]) == ("length", None)
        assert choice["text"] == mesh.tokenizer.decode([*PROMPT, *tokens])[len(mesh.tokenizer.decode(PROMPT)) :]
        columns = choice["logprobs"]
        assert sum(columns["token_logprobs"]) == pytest.approx(total)
        assert [max(top.values()) for top in columns["top_logprobs"]] == [-1 / 8] * 7
        assert all(len(top) <= 2 for top in columns["top_logprobs"])
    assert answer["usage"]["prompt_tokens"] == 40
    assert answer["usage"]["completion_tokens"] == 7 * width


async def test_the_usage_counts_the_prompt_that_was_cached(http: httpx.AsyncClient) -> None:
    for cached in (0, 48):
        answer = await search(http, prompt=list(range(100, 164)), n=2, max_tokens=4)
        details = answer["usage"]["prompt_tokens_details"]
        assert (details["cached_tokens"] if details else 0) == cached
        assert answer["usage"]["prompt_tokens"] == 64
        assert answer["usage"]["completion_tokens"] == 8


async def test_chats_and_several_prompts(mesh: Mesh, http: httpx.AsyncClient) -> None:
    chat = await search(http, CHAT, messages=[{"role": "user", "content": "hi"}], n=3, max_tokens=4, logprobs=True)
    found = expected(mesh, chat["prompt_token_ids"], 3, 4)
    assert [choice["token_ids"] for choice in chat["choices"]] == [tokens for tokens, _ in found]
    for choice, (_, total) in zip(chat["choices"], found, strict=True):
        assert choice["message"]["role"] == "assistant"
        assert sum(each["logprob"] for each in choice["logprobs"]["content"]) == pytest.approx(total)
    prompts = [PROMPT, [7], PROMPT[:20]]
    several = await search(http, prompt=prompts, n=2, max_tokens=5)
    outputs = [tokens for prompt in prompts for tokens, _ in expected(mesh, prompt, 2, 5)]
    assert [choice["token_ids"] for choice in several["choices"]] == outputs
    echoed = await search(http, prompt="Once upon a time", n=2, max_tokens=3, echo=True)
    assert all(choice["text"].startswith("Once upon a time") for choice in echoed["choices"])


@pytest.mark.parametrize("is_included", [False, True])
@pytest.mark.parametrize("penalty", [None, 0.0, 3.0])
async def test_an_end_token_ends_an_output(
    mesh: Mesh, http: httpx.AsyncClient, is_included: bool, penalty: float | None
) -> None:
    """By default it is not part of the output, as in vLLM."""
    end = expected(mesh, PROMPT, 3, 6)[0][0][3]
    answer = await search(
        http,
        prompt=PROMPT,
        n=3,
        max_tokens=6,
        stop_token_ids=[end],
        length_penalty=penalty,
        include_stop_str_in_output=is_included,
        logprobs=0,
    )
    found = expected(mesh, PROMPT, 3, 6, end, 1.0 if penalty is None else penalty)
    assert any(tokens[-1] == end for tokens, _ in found)
    for choice, (tokens, _) in zip(answer["choices"], found, strict=True):
        is_ended = tokens[-1] == end
        kept = tokens[:-1] if is_ended and not is_included else tokens
        assert choice["token_ids"] == kept
        assert len(choice["logprobs"]["tokens"]) == len(kept)
        assert choice["finish_reason"] == ("stop" if is_ended else "length")
        assert choice["stop_reason"] == (end if is_ended else None)
    assert answer["usage"]["completion_tokens"] == sum(len(choice["token_ids"]) for choice in answer["choices"])


async def test_the_same_over_grpc(mesh: Mesh) -> None:
    request = inference_pb2.GenerateRequest(
        token_ids=types_pb2.TokenIds(ids=PROMPT),
        sampling_params=types_pb2.SamplingParams(max_tokens=5, logprobs=2),
        ignore_eos=True,
        n=3,
        beam_search=inference_pb2.BeamSearch(length_penalty=0.5),
    )
    async with ready_channel(mesh.gateway.settings.listen) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        responses = [response async for response in stub.Generate(request)]
        request.beam_search.length_penalty = 11
        with pytest.raises(grpc.aio.AioRpcError, match="length_penalty must be a number from -10 to 10"):
            await anext(aiter(stub.Generate(request)))
    found = expected(mesh, PROMPT, 3, 5)
    assert [list(response.token_ids) for response in responses] == [tokens for tokens, _ in found]
    for response, (_, total) in zip(responses, found, strict=True):
        assert sum(response.logprobs.sampled) == pytest.approx(total)
        assert response.logprobs.top == 2
        assert response.finish_reason == types_pb2.FINISH_REASON_LENGTH
    assert responses[-1].usage.completion_tokens == 15


async def test_the_same_over_kserves_protocol(mesh: Mesh, http: httpx.AsyncClient) -> None:
    request = kserve_pb2.ModelInferRequest(model_name=MODEL)
    text = request.inputs.add(name="text_input", datatype="BYTES", shape=[1])
    text.contents.bytes_contents.append(b"Once upon a time")
    request.parameters["use_beam_search"].bool_param = request.parameters["ignore_eos"].bool_param = True
    request.parameters["n"].int64_param = 3
    request.parameters["max_tokens"].int64_param = 4
    answer = await search(http, prompt="Once upon a time", n=3, max_tokens=4)
    async with ready_channel(mesh.gateway.settings.listen) as channel:
        stub = kserve_pb2_grpc.GRPCInferenceServiceStub(channel)
        response = await stub.ModelInfer(request)
        request.inputs.add(name="stream", datatype="BOOL", shape=[1]).contents.bool_contents.append(True)
        with pytest.raises(grpc.aio.AioRpcError, match="stream is not available with use_beam_search"):
            await stub.ModelInfer(request)
    texts = response.outputs[0].contents.bytes_contents
    assert [each.decode() for each in texts] == [choice["text"] for choice in answer["choices"]]


async def test_the_same_with_our_client(mesh: Mesh, http: httpx.AsyncClient) -> None:
    async with AsyncClient(mesh.gateway.settings.listen) as client:
        answer = await client.generate(prompt=PROMPT, n=3, max_tokens=5, ignore_eos=True, use_beam_search=True)
        with pytest.raises(errors.InvalidArgument, match="use_beam_search is not available in a stream"):
            await client.stream(prompt=PROMPT, use_beam_search=True)
    assert [list(output.token_ids) for output in answer.outputs] == [ids for ids, _ in expected(mesh, PROMPT, 3, 5)]


async def test_a_session_cannot_search(mesh: Mesh) -> None:
    turn = inference_pb2.GenerateRequest(text="Once", beam_search=inference_pb2.BeamSearch())
    async with ready_channel(mesh.gateway.settings.listen) as channel:
        with pytest.raises(grpc.aio.AioRpcError, match="beam_search is not supported in a session"):
            await anext(aiter(inference_pb2_grpc.InferenceStub(channel).GenerateSession(iter([turn]))))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"stream": True}, "stream is not available with use_beam_search"),
        ({"return_timeline": True}, "return_timeline is not available"),
        ({"stop": "x"}, "stop is not available"),
        ({"bad_words": ["x"]}, "bad_words is not available"),
        ({"min_tokens": 2}, "min_tokens is not available"),
        ({"logit_bias": {"5": 1}}, "logit_bias is not available"),
        ({"repetition_penalty": 1.1}, "repetition_penalty is not available"),
        ({"prompt_logprobs": 1}, "prompt_logprobs is not available"),
        ({"structured_outputs": {"regex": "a"}}, "structured_outputs is not available"),
        ({"spaces_between_special_tokens": False}, "spaces_between_special_tokens is not available"),
        ({"n": 11}, "n may be at most 10"),
        ({"n": 0}, "n must be"),
        ({"max_tokens": 300}, "max_tokens"),
        ({"length_penalty": 10.5}, "length_penalty: "),
        ({"length_penalty": 2, "use_beam_search": False}, "length_penalty needs use_beam_search"),
        ({"use_beam_search": "yes"}, "use_beam_search: "),
    ],
)
async def test_what_a_search_does_not_support_is_refused_by_name(
    http: httpx.AsyncClient, fields: dict[str, Any], words: str
) -> None:
    answer = await post(http, **{"prompt": PROMPT, "n": 2, "max_tokens": 3} | fields)
    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"]
    assert answer.json()["error"]["param"] in fields


async def test_neutral_values_and_those_without_effect_are_accepted(mesh: Mesh, http: httpx.AsyncClient) -> None:
    found = expected(mesh, PROMPT, 2, 3)
    neutral = {"repetition_penalty": 1, "presence_penalty": 0, "min_tokens": 0, "temperature": 0.7, "top_p": 0.5}
    answer = await search(http, prompt=PROMPT, n=2, max_tokens=3, seed=5, **neutral)
    assert [choice["token_ids"] for choice in answer["choices"]] == [tokens for tokens, _ in found]


async def until_live(http: httpx.AsyncClient, number: int) -> None:
    """Wait until clients wait for so many outputs."""
    async with asyncio.timeout(SOON):
        while (await http.get("/load")).json()["server_load"] != number:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_a_search_ends_with_its_client_and_counts_against_the_limit(socket_dir: Path) -> None:
    slow = Mesh(socket_dir, engine={"hash_step_seconds": 0.02}, gateway={"max_live_requests": 4})
    async with slow.running(), slow.http() as http:
        running = asyncio.create_task(post(http, prompt=PROMPT, n=3, max_tokens=200))
        await until_live(http, 3)
        refused = await post(http, prompt=PROMPT, n=2, max_tokens=1)
        assert refused.status_code == 503
        assert "too many requests" in refused.json()["error"]["message"]
        running.cancel()
        await asyncio.wait([running])
        await until_live(http, 0)
        await slow.until_idle()
        assert (await post(http, prompt=PROMPT, n=4, max_tokens=1)).status_code == 200


@pytest.mark.parametrize("mode", [PAUSE_MODE_ABORT, PAUSE_MODE_WAIT])
async def test_a_search_outlives_a_paused_engine(socket_dir: Path, mode: PauseMode) -> None:
    pair = Mesh(socket_dir, engines=2, engine={"hash_step_seconds": 0.02})
    async with (
        pair.running(),
        pair.http() as http,
        ready_channel(pair.engines[0].settings.listen) as channel,
    ):
        running = asyncio.create_task(search(http, prompt=PROMPT, n=4, max_tokens=12))
        await until_live(http, 4)
        admin = EngineAdminStub(channel)
        await admin.Pause(PauseRequest(mode=mode))
        await admin.Resume(ResumeRequest())  # a step's request that arrived during the pause waited for this
        answer = await running
    found = expected(pair, PROMPT, 4, 12)
    assert [choice["token_ids"] for choice in answer["choices"]] == [tokens for tokens, _ in found]


async def test_prefill_and_decode_on_different_engines(socket_dir: Path) -> None:
    async with SplitMesh(socket_dir).running() as mesh, mesh.http() as http:
        answer = await search(http, prompt=PROMPT, n=3, max_tokens=6)
        found = expected(mesh, PROMPT, 3, 6)
        assert [choice["token_ids"] for choice in answer["choices"]] == [tokens for tokens, _ in found]
        await mesh.check_nothing_is_left()
